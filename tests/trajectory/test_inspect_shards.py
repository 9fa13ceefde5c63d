"""`pekoe shards`: what the command prints and its exit codes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pekoe.pipeline.records import Finish, Group, Trajectory, group_number
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.archive import Archive
from pekoe.pipeline.trajectory.inspect_shards import add_arguments, main
from pekoe.pipeline.trajectory.ledger import Entry, Ledger
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.shard import Shard
from pekoe.pipeline.trajectory.shard_views import marked_text
from pekoe.pipeline.trajectory.writer import ShardWriter


def shards(*words: str | Path) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args([str(word) for word in words]))


def episode(tokens: list[int], versions: list[int], turns: list[int] | None = None) -> Trajectory:
    mask = np.array([version >= 0 for version in versions], np.uint8)
    return Trajectory(
        tokens=np.array(tokens, np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.array(versions, np.int32),
        turns=np.array(turns, np.int32) if turns else np.where(mask, 0, -1).astype(np.int32),
        prompt_length=next(index for index, version in enumerate(versions) if version >= 0),
        reward=0.25,
        finish=Finish.LENGTH,
        info={"score": "half"},
    )


@pytest.fixture
def filled(run: RunDirectory, make_group: Callable[..., Group]) -> RunDirectory:
    writer = ShardWriter(run, ShardAttributes("r", 0, "rank-1", 0.7))
    writer.add(make_group(1, samples=3, version=2))
    writer.add(Group(group_number(1, 5), 2, "gsm8k/train/17", [episode([5, 6, 7, 8, 9], [-1, -1, 3, 3, 4])]))
    writer.flush()
    writer.add(make_group(2, samples=2, version=4))
    writer.flush()
    return run


def test_ls_sums_every_shard_up(filled: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert shards("ls", filled.path) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["shard", "groups", "rows"]
    assert first.split()[:5] == ["0-rank-1/000000.h5", "2", "4", str(24 + 25 + 26 + 5), "2-4"]
    assert second.split()[:5] == ["0-rank-1/000001.h5", "1", "2", "49", "4-4"]


def test_verify_names_the_damaged_shard(filled: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert shards("verify", filled.path) == 0
    assert "2 of 2 shards are whole" in capsys.readouterr().out
    path = filled.shards / "0-rank-1" / "000001.h5"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    assert shards("verify", filled.path) == 1
    shown = capsys.readouterr().out
    assert "DAMAGED shards/0-rank-1/000001.h5: checksum" in shown
    assert "1 of 2 shards are whole" in shown
    assert shards("verify", filled.path, "0-rank-1/000000.h5") == 0
    assert shards("ls", filled.path) == 1
    assert shards("show", filled.path, "0-rank-1/000001.h5") == 1


def test_verify_says_what_is_wrong_with_which_groups_and_what_happens_next(
    run: RunDirectory, make_group: Callable[..., Group], capsys: pytest.CaptureFixture[str]
) -> None:
    writer = ShardWriter(run, ShardAttributes("r", 0, "rank-1", 0.7))
    names = []
    for first in range(0, 8, 2):
        for number in (first, first + 1):
            writer.add(make_group(group_number(1, number), samples=1, length=40_000))
        notice = writer.flush()
        assert notice is not None
        names.append(notice.path)
    groups = [f"{group_number(1, number)} (epoch 1, position {number})" for number in range(8)]
    for name in names[:3]:
        data = bytearray((run.path / name).read_bytes())
        with Shard(run.path / name) as shard:
            data[shard.addresses["turn"] + 160_000] ^= 1
        (run.path / name).write_bytes(data)
    (run.path / names[3]).write_bytes((run.path / names[3]).read_bytes()[:-5])
    Ledger(run).record(1, consumed=[Entry(group_number(1, number), 0, names[1], (0,)) for number in (2, 3)])
    Ledger(run).record(2, consumed=[Entry(group_number(1, 4), 0, names[2], (0,))])
    assert shards("verify", run.path) == 1
    shown = capsys.readouterr().out.splitlines()
    again = "sampled again on resume; remove nothing by hand"
    trained = "of its groups were trained on already, the last in step"
    for index in range(3):
        assert shown[3 * index].startswith(f"DAMAGED {names[index]}: checksum of the block at byte ")
        assert shown[3 * index + 1] == f"  groups: {groups[2 * index]}, {groups[2 * index + 1]}"
    assert shown[2] == f"  next: its groups are {again}"
    assert shown[5] == f"  next: 2 {trained} 1: training misses nothing; remove nothing by hand"
    assert shown[8] == f"  next: 1 {trained} 2; the others are {again}"
    assert shown[9:12] == [
        f"DAMAGED {names[3]}: no seal at the end: truncated, or not a shard",
        "  groups: unknown, the part that names them is damaged too",
        f"  next: its groups are {again}",
    ]
    assert shown[12] == "0 of 4 shards are whole"


def test_archives_are_listed_shown_and_verified_like_shards(
    filled: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = Archive(filled)
    archive.add(["shards/0-rank-1/000000.h5"])
    assert archive.close(60)
    assert shards("ls", filled.path) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:3] == ["0-rank-1/000001.h5", "1", "2"]
    assert second.split()[:4] == ["archive/000000.h5", "2", "4", str(24 + 25 + 26 + 5)]
    assert shards("show", filled.path, "archive/000000.h5", "--row", "3", "--ids") == 0
    assert "gsm8k/train/17" in capsys.readouterr().out
    assert shards("verify", filled.path) == 0
    assert "2 of 2 shards are whole" in capsys.readouterr().out
    path = filled.archive / "000000.h5"
    path.write_bytes(path.read_bytes()[:-1])
    assert shards("verify", filled.path) == 1
    shown = capsys.readouterr().out
    assert "DAMAGED archive/000000.h5" in shown
    assert "next: its groups have ended, training misses nothing" in shown


def test_verify_reports_what_was_set_aside_and_what_is_unfinished(
    filled: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    filled.put_aside(filled.shards / "0-rank-1" / "000000.h5", "of a future that was abandoned")
    (filled.set_aside / "stray").write_text("")
    (filled.shards / "0-rank-1" / "000002.h5.77.part").write_bytes(b"half")
    assert shards("verify", filled.path) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 of 1 shards are whole",
        "set aside (set-aside/), not part of the run any more: 2",
        "  shards__0-rank-1__000000.h5: of a future that was abandoned",
        "  stray: no reason was written down",
        "1 unfinished (*.part): being written, or left by a kill and deleted on resume",
    ]


def test_show_prints_an_episode_with_rewards_and_versions(
    filled: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    number = group_number(1, 5)
    assert shards("show", filled.path, "0-rank-1/000000.h5", "--group", str(number), "--ids") == 0
    shown = capsys.readouterr().out
    assert f"row 3 · group {number} (epoch 1, position 5, try 2) · gsm8k/train/17" in shown
    assert "reward 0.25 · length · 2 prompt tokens, 3 sampled · versions 3-4 · mean log-prob -0.500" in shown
    assert "{'score': 'half'}" in shown
    assert shown.rstrip().endswith("⟦given⟧5 6\n⟦turn 0, version 3⟧7 8\n⟦version 4⟧9")


def test_show_takes_the_newest_shard_and_limits_itself(
    filled: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shards("show", filled.path, "--limit", "1", "--ids") == 0
    shown = capsys.readouterr().out
    assert "000001.h5" in shown
    assert "1 more rows" in shown
    assert shards("show", filled.path, "0-rank-1/000001.h5", "--row", "7", "--ids") == 2


def test_show_decodes_with_the_tokenizer_that_the_run_names(
    filled: RunDirectory, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(12)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    filled.config.write_text(f"tokenizer_path: null\nactor:\n  path: {tmp_path / 'tokenizer'}\n")
    assert shards("show", filled.path, "0-rank-1/000000.h5", "--row", "3") == 0
    assert "⟦given⟧w5 w6⟦turn 0, version 3⟧w7 w8⟦version 4⟧w9" in capsys.readouterr().out


def test_show_falls_back_to_ids_and_says_why(filled: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert shards("show", filled.path, "0-rank-1/000000.h5", "--row", "3") == 0
    captured = capsys.readouterr()
    assert "⟦given⟧5 6" in captured.out
    assert "token ids only" in captured.err


def test_turns_are_marked() -> None:
    text = marked_text(episode([1, 2, 3, 4, 5], [-1, 0, -1, 0, 1], [-1, 0, -1, 1, 1]), None)
    assert text.split("\n") == ["⟦given⟧1", "⟦turn 0, version 0⟧2", "⟦given⟧3", "⟦turn 1, version 0⟧4", "⟦version 1⟧5"]


def test_wrong_use_is_explained(filled: RunDirectory, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert shards("ls", tmp_path / "nowhere") == 2
    assert "not a run directory" in capsys.readouterr().err
    assert shards("show", filled.path, "9-x/000000.h5") == 2
    assert "no such shard" in capsys.readouterr().err
    for path in filled.shards.rglob("*.h5"):
        path.unlink()
    assert shards("ls", filled.path) == 0
    assert "no shards" in capsys.readouterr().out


def test_declaring_the_command_imports_no_hdf5() -> None:
    code = "import sys, pekoe.pipeline.trajectory.inspect_shards; print('h5py' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"], done.stderr
