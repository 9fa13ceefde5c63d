"""The estimate of the disk that a run needs, against what real runs left on it."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import KilledRun
from safetensors.numpy import save_file

from pekoe.launch.allocation import place
from pekoe.pipeline.config.load import from_yaml_text, load
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs import disk_estimate
from pekoe.pipeline.runs.disk_estimate import (
    FreeSpace,
    amount,
    checkpoint_bytes,
    estimate,
    free_space,
    log_estimate,
    model_facts,
    shortage_of,
    step_bytes,
    used,
)


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def files_below(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def within_factor_two(estimated: float, found: float) -> bool:
    return found / 2 <= estimated <= found * 2


def test_the_estimate_is_what_a_real_run_leaves_within_a_factor_of_two(killed_run: KilledRun) -> None:
    run = RunDirectory(killed_run.resumed)
    config = load(run.config)
    placement = place(config)
    model = model_facts(Path(config.actor.path))
    made = estimate(config, model, num_trainers=1, num_rollouts=1, num_steps=8)
    assert placement.world_size == 2
    for checkpoint in run.checkpoints.glob("step-*"):
        assert within_factor_two(checkpoint_bytes(config, model), bytes_below(checkpoint))
        assert within_factor_two(made.item("checkpoints").files / 3, files_below(checkpoint))
    for export in run.exports.glob("step-*"):
        assert within_factor_two(made.item("exports").bytes, bytes_below(export))
    kept = bytes_below(run.shards) + bytes_below(run.set_aside)
    assert within_factor_two(made.item("shards").bytes, kept)
    # one checkpoint more is in flight at times than lies there at the end
    peak = bytes_below(run.path) + checkpoint_bytes(config, model)
    assert within_factor_two(made.bytes, peak)
    assert within_factor_two(made.files, files_below(run.path))
    assert used(run)[0] == sum(bytes_below(folder) for folder in (run.checkpoints, run.exports, run.shards, run.code))


def config_of(model: Path, more: str = "") -> RunConfig:
    text = (
        "experiment_name: e\nallocation: hf:d1+fsdp:d1\ntotal_train_steps: 1000\n"
        f"actor: {{path: {model}, dtype: bfloat16}}\n"
        "gconfig: {n_samples: 8, max_new_tokens: 1024, max_tokens: 2048}\n"
        "train_dataset: {batch_size: 128, max_length: 512}\n"
    )
    return from_yaml_text(text + more)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": np.zeros((1000, 100), np.float16)}, folder / "model-00001-of-00002.safetensors")
    save_file(
        {"b": np.zeros((50, 2), np.float16), "c": np.zeros(1, np.float16)}, folder / "model-00002-of-00002.safetensors"
    )
    (folder / "config.json").write_text('{"max_position_embeddings": 32768}')
    return folder


def test_parameters_are_counted_over_all_files(model: Path) -> None:
    facts = model_facts(model)
    assert (facts.num_parameters, facts.num_tensors) == (100_101, 3)
    assert facts.other_bytes == (model / "config.json").stat().st_size
    with pytest.raises(ValueError, match="no safetensors file"):
        model_facts(model.parent)


def test_each_part_by_hand(model: Path) -> None:
    facts = model_facts(model)
    plain = config_of(model, "recover: {freq_steps: 50, keep: 2}\nrollout: {max_head_offpolicyness: 3}\n")
    made = estimate(plain, facts, num_trainers=4, num_rollouts=12)
    tensors = 12 * facts.num_parameters
    assert tensors < checkpoint_bytes(plain, facts, 4) < tensors + 100_000
    assert made.item("checkpoints").bytes == 3 * checkpoint_bytes(plain, facts, 4)
    assert made.item("exports").bytes == facts.num_parameters * 4 + facts.other_bytes
    size, files = step_bytes(plain, 12)
    assert files == 12
    assert 128 * 8 * 1536 * 17 < size < 1.1 * 128 * 8 * 1536 * 17
    assert made.item("shards").bytes == (50 + 4) * size
    assert [item.name for item in made.items] == ["checkpoints", "exports", "shards", "code, logs"]


def test_rows_of_several_turns_and_of_a_teacher_are_longer(model: Path) -> None:
    """Up to the context limit (2,048), with a reward a turn; log-probs of a teacher on engines beside them."""
    plain = step_bytes(config_of(model))[0]
    turns = step_bytes(config_of(model, "workflow: {name: multi_turn}\n"))[0]
    taught = step_bytes(config_of(model, "teacher: {place: engine}\n"))[0]
    assert turns - plain == 128 * 8 * (2048 * 21 - 1536 * 17)
    assert taught - plain == 128 * 8 * 1536 * 4
    assert step_bytes(config_of(model, "teacher: {place: trainer}\n"))[0] == plain


def test_a_critic_doubles_checkpoints(model: Path, tmp_path: Path) -> None:
    facts = model_facts(model)
    plain, critic = config_of(model), config_of(model, "critic: {dtype: float32}\n")
    own = 12 * facts.num_parameters
    assert checkpoint_bytes(critic, facts) - checkpoint_bytes(plain, facts) == pytest.approx(own, rel=0.05)
    double = config_of(model, "critic: {dtype: float64}\n")
    assert checkpoint_bytes(double, facts) - checkpoint_bytes(critic, facts) == own
    assert estimate(critic, facts).item("exports") == estimate(plain, facts).item("exports")
    assert estimate(critic, facts).item("checkpoints").files > estimate(plain, facts).item("checkpoints").files
    critic.critic.path = str(tmp_path)
    with pytest.raises(ValueError, match="no safetensors file"):
        checkpoint_bytes(critic, facts)


def test_what_is_kept_grows_with_the_steps(model: Path) -> None:
    facts = model_facts(model)
    kept = config_of(model, "rollout: {keep_trajectories: archive}\nsaver: {freq_steps: 100}\n")
    made = estimate(kept, facts)
    assert made.item("shards").bytes == 1000 * step_bytes(kept)[0]
    assert made.item("exports").bytes == 10 * (facts.num_parameters * 4 + facts.other_bytes)
    never = config_of(model, "recover: {freq_steps: null}\n")
    assert estimate(never, facts).item("shards").bytes == 1000 * step_bytes(never)[0]
    assert "recover.freq_steps is null" in estimate(never, facts).sentence()
    assert estimate(never, facts).item("checkpoints").bytes == checkpoint_bytes(never, facts)
    disk = config_of(model)
    disk.actor.weight_update_mode = "disk"
    assert estimate(disk, facts).item("weights").bytes == 3 * facts.num_parameters * 4


def test_unknown_steps_are_said(model: Path) -> None:
    kept = config_of(model, "rollout: {keep_trajectories: shards}\nsaver: {freq_steps: 5}\n")
    kept.total_train_steps = None
    made = estimate(kept, model_facts(model))
    assert made.num_steps is None
    assert "for each step, kept: shards" in made.sentence()
    assert "and more every 5 steps" in made.sentence()


def test_a_line_at_the_start_and_its_level_by_what_is_free(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    config = config_of(model, "rollout: {keep_trajectories: shards}\n")
    caplog.set_level(logging.INFO)

    def lines(free: FreeSpace) -> list[tuple[int, str]]:
        monkeypatch.setattr(disk_estimate, "free_space", lambda path: free)
        caplog.clear()
        assert log_estimate(run, config, num_trainers=1, num_rollouts=1, num_steps=1000) is not None
        return [(record.levelno, record.getMessage()) for record in caplog.records]

    ((level, text),) = lines(FreeSpace(1 << 50, 1 << 30))
    assert level == logging.INFO
    assert re.search(r"disk: the run may need [\d.]+ GiB in \d+ files: checkpoints .*quota is not visible", text)
    ((level, text),) = lines(FreeSpace(1 << 30, 1 << 30))
    assert level == logging.WARNING
    assert "1 GiB are free: free space, keep less (recover.keep, rollout.keep_trajectories, saver.freq_steps)" in text
    ((level, text),) = lines(FreeSpace(1 << 50, 100))
    assert level == logging.WARNING
    assert "100 inodes are free" in text
    ((level, text),) = lines(FreeSpace(1 << 20, None))
    assert level == logging.ERROR
    assert "Not even one more checkpoint" in text


def test_what_lies_there_already_is_not_needed_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    config = config_of(model)
    made = estimate(config, model_facts(model))
    monkeypatch.setattr(disk_estimate, "free_space", lambda path: FreeSpace(made.bytes // 2, None))
    assert shortage_of(run, made, 1) is not None
    with (run.shards / "big.h5").open("wb") as file:
        os.truncate(file.fileno(), made.bytes)
    assert shortage_of(run, made, 1) is None


def test_a_model_that_cannot_be_read_costs_the_estimate_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run = RunDirectory(tmp_path / "run")
    run.create()
    assert log_estimate(run, config_of(tmp_path / "none"), num_trainers=1, num_rollouts=1) is None
    assert "no estimate" in caplog.text


def test_free_space_is_that_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    facts = os.statvfs(tmp_path)
    free = free_space(tmp_path / "not" / "yet")
    assert abs(free.bytes - facts.f_bavail * facts.f_frsize) < 1 << 30
    assert free.inodes is None or free.inodes > 0


def test_amounts_are_readable() -> None:
    assert [amount(count) for count in (0, 1023, 1536, 5 << 20, 3 << 40, 5000 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "5 MiB", "3 TiB", "5e+03 TiB",
    ]  # fmt: skip
