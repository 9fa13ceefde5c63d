"""Checkpoints that are written while training goes on: what is in them, what a slow or full disk does, other sizes."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
import transformers
from trainer_worlds import run_world

from pekoe.pipeline import complete_folder
from pekoe.pipeline.messages import Present, Saved

pytestmark = pytest.mark.trainers

SCRIPT = Path(__file__).with_name("save_world.py")
GROUP_SECONDS, SLOW_SECONDS = 6.0, 9.0
WORLDS = {
    4: ["seven"],
    2: ["first", "beside", "refused", "seven", "seven_resumed"],
    1: ["first", "learner", "seven_resumed"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("saves")
    for kind, vocabulary in (("qwen3", 61), ("seven", 7)):
        config = transformers.Qwen3Config(
            vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.2,
            tie_word_embeddings=False,
        )  # fmt: skip
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path / kind)
    return path


@pytest.fixture(scope="module")
def results(folder):
    for size in WORLDS:
        run_world(SCRIPT, folder, size, WORLDS[size])
    return {
        (name, size): torch.load(folder / f"{name}-{size}.pt", weights_only=False)
        for size, names in WORLDS.items()
        for name in names
    }


@pytest.mark.timeout(900)
def test_training_on_changes_nothing_of_what_is_written(results):
    for found in results["beside", 2]["told"]:
        assert found["equal"] == [(True, True), (True, True)], "weights moved on; parameters and moments are the step's"
        assert found["steps"][0] >= 3
        assert found["refused"] == "the staged state of the last save has not been written yet"
        assert found["pointers"][0] == found["pointers"][1], "the second save uses the same host memory"
    # float64 here: parameter and two moments of 8 bytes, half of each on a rank, and the step counters
    weights = sum(p.numel() for p in transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
    )).parameters())  # fmt: skip
    assert results["beside", 2]["bytes"] == pytest.approx(12 * weights, rel=0.05)


def test_a_slow_disk_on_one_rank_trips_no_collective_of_training(results):
    """It took longer than the time limit of the trainer group, with every rank training all the while."""
    assert SLOW_SECONDS > 1.4 * GROUP_SECONDS
    steps = [found["steps"] for found in results["beside", 2]["told"]]
    assert steps[0] == steps[1]


def test_hashes_are_those_of_the_files(results, folder):
    files = [file for found in results["beside", 2]["told"] for file in found["files"]]
    names = sorted(file.name for file in files)
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    for file in files:
        path = folder / "beside-2" / "1" / file.name
        assert (path.stat().st_size, complete_folder.file_hash(path)) == (file.num_bytes, file.blake2b)


@pytest.mark.parametrize(
    ("name", "where", "code"),
    [
        ("create", 1, errno.ENOSPC),
        ("first write", 1, errno.ENOSPC),
        ("write inside a tensor", 1, errno.EDQUOT),
        ("sync", 1, errno.EIO),
        ("metadata", 0, errno.ENOSPC),
    ],
)
def test_what_a_disk_refuses_all_ranks_hear_as_an_error_of_the_disk(results, name, where, code):
    told = results["refused", 2][name]
    assert told[where][1] == code
    assert told[1 - where][1] == errno.EIO
    for _, _, text in told:
        assert f"trainer rank {where}: OSError: [Errno {code}] planted" in text


def test_a_bug_in_a_save_is_not_taken_for_a_bad_disk(results):
    assert [kind for kind, _, _ in results["refused", 2]["bug"]] == ["RuntimeError", "RuntimeError"]


def test_the_save_after_refused_ones_is_good(results):
    assert results["refused", 2]["after"]


@pytest.mark.parametrize(("source", "size"), [(4, 2), (4, 1), (2, 1), (2, 2)])
def test_other_numbers_of_ranks_go_on_alike(results, source, size):
    """A vocabulary of 7 over 4, 2 and 1 ranks: parameters, moments and rates are those of the run that went on."""
    saved, found = results["seven", source], results["seven_resumed", size][source]
    assert found["loaded"].keys() == saved["saved"].keys()
    assert any(name.startswith("exp_avg_sq.") for name in found["loaded"])
    for name, tensor in saved["saved"].items():
        torch.testing.assert_close(found["loaded"][name], tensor, rtol=0, atol=0)
    rates = [rate for rate, _ in saved["rates"]]
    assert len(set(rates)) > 5, "warm-up and decay"
    assert [rate for rate, _ in found["rates"]] == rates[5:]
    for (_, loss), (_, expected) in zip(found["rates"], saved["rates"][5:], strict=True):
        assert loss == pytest.approx(expected, abs=1e-10)
    for name, tensor in saved["final"].items():
        torch.testing.assert_close(found["final"][name], tensor, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("size", [1, 2])
def test_a_save_before_the_first_update_changes_nothing_and_is_the_beginning(results, size):
    found = results["first", size]
    for name, tensor in found["undisturbed"].items():
        torch.testing.assert_close(found["saved"][name], tensor, rtol=0, atol=0)
        torch.testing.assert_close(found["loaded"][name], tensor, rtol=0, atol=0)


def test_saves_are_written_one_after_the_other_while_the_learner_answers(results, folder):
    found = results["learner", 1]
    told = [(type(message), getattr(message, "number", getattr(message, "version", None))) for message in found["two"]]
    assert told == [(Present, 1), (Saved, 1), (Present, 2), (Saved, 2)], "training waits for the copy only"
    work = [path for _, _, path in found["events"]]
    first = [index for index, path in enumerate(work) if "/v1" in path]
    second = [index for index, path in enumerate(work) if "/v2" in path]
    assert max(first) < min(second), "they never overlap"
    for message in (found["two"][1], found["two"][3]):
        assert not message.error
        names = sorted(file.name for file in message.files)
        assert names == ["engine/.metadata", "engine/__0_0.distcp", "rng-0"]
        assert 0 < message.stage_seconds < message.seconds
        for file in message.files:
            path = folder / "two" / f"v{message.version}" / file.name
            assert complete_folder.file_hash(path) == file.blake2b
    assert found["two"][3].stage_seconds > 0.4, "and for a save that is still in flight"


def test_without_a_thread_the_learner_writes_itself(results):
    assert [type(message) for message in results["learner", 1]["at once"]] == [Saved, Present]


def test_a_full_disk_is_told_and_the_next_save_is_tried(results, folder):
    """With a second model, whose staged copy was given up with the first one's."""
    first, second = [message for message in results["learner", 1]["full"] if isinstance(message, Saved)]
    assert (first.version, first.disk_is_full, first.files) == (1, True, ())
    assert "planted" in first.error
    assert (second.version, second.error, second.disk_is_full) == (2, "", False)
    assert (folder / "full" / "v2" / "rng-0").read_bytes() == b"numbers"
    assert {Path(file.name).parent.name for file in second.files} == {"engine", "critic", ""}
    assert not (folder / "full" / "v1" / "critic").exists()


def test_a_bug_in_the_saver_is_raised_in_its_thread_and_nothing_is_told(results):
    assert results["learner", 1]["broken"] == ("saver", "RuntimeError", True, True)
