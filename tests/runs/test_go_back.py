"""The way back on the disk: what lies beyond the start point is set aside, whatever interrupts it, and no more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pekoe.pipeline import files
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.control.dispatcher import Dispatcher
from pekoe.pipeline.observe.metrics import MetricsWriter, event_files, read_metrics
from pekoe.pipeline.records import Finish, Group, Trajectory
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.resume import CONTROLLER_STATE, EXPORTS_ASIDE, Past, go_back, training_cursor
from pekoe.pipeline.runs.start import RunData, StartPoint
from pekoe.pipeline.trajectory.archive import Archive
from pekoe.pipeline.trajectory.ledger import Entry, Ledger
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.store import Store
from pekoe.pipeline.trajectory.writer import ShardWriter

START = 2
"""Steps 1 to 4 were made; the checkpoint is of step 2. Group n is consumed in step n + 1; 4 and 5 lie in shards."""


class Crash(BaseException):
    """The process dies."""


class DyingDisk(files.Disk):
    """Dies before the n-th change of names."""

    def __init__(self, left: int) -> None:
        self.left = left

    def _count(self) -> None:
        if self.left == 0:
            raise Crash
        self.left -= 1

    def rename(self, old: Path, new: Path) -> None:
        self._count()
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)

    def remove_tree(self, folder: Path) -> None:
        self._count()
        super().remove_tree(folder)


class Nobody:
    """A post office without ranks."""

    rank, size = 0, 2

    def send(self, to: int, message: object) -> None:
        pass


def group_of(number: int, version: int) -> Group:
    versions = np.array([-1, version, version], np.int32)
    active = versions >= 0
    trajectory = Trajectory(
        tokens=np.array([1, 2, number], np.int32), loss_mask=active.astype(np.uint8),
        logprobs=np.where(active, -0.5, 0).astype(np.float32), versions=versions,
        turns=np.where(active, 0, -1).astype(np.int32), prompt_length=1, reward=1.0, finish=Finish.STOP,
    )  # fmt: skip
    return Group(number, 0, "example", [trajectory])


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    made = RunConfig()
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1", "answer": "1"}\n' * 8)
    made.train_dataset.type, made.train_dataset.path, made.train_dataset.batch_size = "jsonl", str(data), 1
    made.train_dataset.shuffle = False
    made.rollout.max_head_offpolicyness = 5
    return made


@pytest.fixture
def run(tmp_path: Path, config: RunConfig) -> RunDirectory:
    """As a run looks that died in its fifth step, and once before in the middle of going back."""
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    writer = ShardWriter(directory, ShardAttributes("test", 0, "rank-1", 1.0))
    ledger = Ledger(directory)
    dispatcher = Dispatcher(config, Nobody(), training_cursor(config, RunData(config)), [1], 8)  # type: ignore[arg-type]
    with MetricsWriter(directory, 0) as metrics:
        for number, version in enumerate((0, 0, 1, 3, 2, 4)):
            dispatcher.admit_all()
            writer.add(group_of(number, version))
            notice = writer.flush()
            assert notice is not None
            dispatcher.on_published(notice)
            if number < 4:
                dispatcher.consume([dispatcher.table.ready[number]])
                ledger.record(number + 1, consumed=[Entry(number, 0, notice.path, (0,))])
                metrics.write(number + 1, {"reward/mean": 0.5})
                save(directory, number + 1, dispatcher)
    for name in ("step-1", "step-2", "step-3", "step-4.previous", "step-9.part"):
        (directory.exports / name).mkdir()
    for name in ("v-2", "v-3", "v-4", "v-5.part", "v-1.abcd.discarded", "readers"):
        (directory.weights / name).mkdir()
    (directory.weights / "v-5.failed.json").write_text("{}")
    (directory.eval / "step-4.json").write_text("{}")
    (directory.ledger / "step-00000005.json.77.part").write_text("{")
    (directory.shards / "0-rank-1" / "000009.h5.part").write_text("half")
    return directory


def save(directory: RunDirectory, step: int, dispatcher: Dispatcher) -> None:
    if step == START:
        folder = directory.checkpoints / f"step-{step}"
        folder.mkdir()
        (folder / CONTROLLER_STATE).write_bytes(msgspec.msgpack.encode(dispatcher.state()))


def back(run: RunDirectory, config: RunConfig, attempt: int = 1) -> Past:
    start = StartPoint(START, str(run.checkpoints / f"step-{START}"), 8)
    return go_back(run, config, attempt, start, RunData(config))


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.name != "data.jsonl")


def check_is_back(run: RunDirectory, past: Past) -> None:
    assert Ledger(run).steps() == [1, 2]
    assert [line.step for line in read_metrics(run)] == [1, 2]
    assert len(event_files(run)) == 1
    assert names(run.exports) == ["step-1", "step-2"]
    assert names(run.weights) == ["readers", "v-2"]
    assert names(run.eval) == []
    assert names(run.ledger) == ["step-00000001.json", "step-00000002.json"]
    shards = [notice.path for notice in past.notices]
    assert shards == ["shards/0-rank-1/000002.h5", "shards/0-rank-1/000004.h5"]
    assert past.done == {"export"}
    assert [path.name for path in run.path.rglob("*.part")] == []
    aside = [path.name for path in run.set_aside.iterdir()]
    for name in ("ledger__step-00000003", "ledger__step-00000004", "weights__v-4", "exports__step-3", "eval__step-4"):
        assert any(found.startswith(name) for found in aside), name
    newer = [name for name in aside if name.startswith("shards__") and not name.endswith(".json")]
    assert sorted(name[:26] for name in newer) == ["shards__0-rank-1__000003.h", "shards__0-rank-1__000005.h"]


@pytest.mark.parametrize("keep", ["none", "shards", "archive"])
def test_what_came_later_is_set_aside_with_its_reason(keep: str, run: RunDirectory, config: RunConfig) -> None:
    config.rollout.keep_trajectories = keep
    past = back(run, config)
    check_is_back(run, past)
    consumed = ("shards/0-rank-1/000000.h5", "shards/0-rank-1/000001.h5")
    assert past.spent == consumed
    assert [path in Store(run).paths() for path in consumed] == [keep != "none"] * 2
    for path in run.set_aside.iterdir():
        if not path.name.endswith(".json") or path.name.startswith(("ledger", "eval", "weights__v-5.failed.json")):
            reason = path.with_name(f"{path.name}.reason.json")
            if not path.name.endswith(".reason.json"):
                assert json.loads(reason.read_text())["reason"], path
    before = names(run.path)
    check_is_back(run, back(run, config, 2))
    assert names(run.path) == before, "the second time there is nothing left to do"


def test_it_can_die_again_and_again(run: RunDirectory, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt gets one operation further than the one before."""
    config.rollout.keep_trajectories = "shards"
    for left in range(200):
        monkeypatch.setattr(files, "disk", DyingDisk(left))
        try:
            past = back(run, config, 1 + left)
        except Crash:
            continue
        break
    else:
        raise AssertionError("it never came to its end")
    assert left > 2
    check_is_back(run, past)


def test_it_can_die_once_at_each_change_of_names(
    run: RunDirectory, config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for left in range(200):
        copied = RunDirectory(tmp_path / f"copy-{left}")
        shutil.copytree(run.path, copied.path)
        monkeypatch.setattr(files, "disk", DyingDisk(left))
        try:
            back(copied, config, 1)
        except Crash:
            monkeypatch.setattr(files, "disk", files.Disk())
            check_is_back(copied, back(copied, config, 2))
            continue
        break
    assert left > 20


@pytest.mark.parametrize(("kind", "name", "count"), [("weights", "v-3", 1), ("exports", "step-3", EXPORTS_ASIDE + 1)])
def test_any_number_of_kills_leaves_few_copies_of_the_model(
    kind: str, name: str, count: int, run: RunDirectory, config: RunConfig
) -> None:
    for attempt in range(1, 9):
        back(run, config, attempt)
        (run.path / kind / name).mkdir()
    back(run, config, 9)
    aside = [path.name for path in run.set_aside.iterdir() if path.is_dir() and path.name.startswith(f"{kind}__")]
    assert len(aside) == count


def test_archives_of_what_was_not_consumed_yet_are_set_aside(run: RunDirectory, config: RunConfig) -> None:
    config.rollout.keep_trajectories = "archive"
    archive = Archive(run)
    archive.add(["shards/0-rank-1/000000.h5"])
    assert archive.flush(30)
    archive.add(["shards/0-rank-1/000001.h5", "shards/0-rank-1/000003.h5"])
    assert archive.close(30)
    assert len(list(run.archive.glob("*.h5"))) == 2
    past = back(run, config)
    assert len(list(run.archive.glob("*.h5"))) == 1
    assert past.spent == ()


def test_a_ledger_with_a_gap_stops_it_before_anything_is_moved(run: RunDirectory, config: RunConfig) -> None:
    (run.ledger / "step-00000002.json").unlink()
    before = names(run.path)
    with pytest.raises(ValueError, match=r"no record of step 2 .*pekoe doctor"):
        back(run, config)
    (run.ledger / "step-00000002.json").write_text("{")
    with pytest.raises(ValueError, match=r"step-00000002.json is damaged.*pekoe doctor"):
        back(run, config)
    assert set(names(run.path)) == {*before, "ledger/step-00000002.json"}


def test_before_the_first_checkpoint_shards_of_the_first_weights_are_used(run: RunDirectory, config: RunConfig) -> None:
    """Version 0 is the same for all attempts."""
    past = go_back(run, config, 1, StartPoint(0, "", 8), RunData(config))
    assert Ledger(run).steps() == []
    assert [notice.path for notice in past.notices] == [f"shards/0-rank-1/00000{number}.h5" for number in (0, 1)]
    assert past.state == {}
    assert past.done == frozenset()
