"""Work on the disk by the real code, in a form that can be broken off anywhere and begun again.

`prepare` makes the state before; `start` gives the work of a process, to be called again after an error of the disk;
after a crash another process starts. `check` is what must hold at every instant, `done` what the work is for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file

from pekoe.pipeline import complete_folder, files
from pekoe.pipeline.messages import TensorSpec, WrittenFile
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.train.checkpoint import Checkpoints
from pekoe.pipeline.train.engines.hf_folder import HfFolderWriter
from pekoe.pipeline.trajectory.ledger import Entry, Ledger
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.store import Store
from pekoe.pipeline.trajectory.writer import ShardWriter
from pekoe.pipeline.weights.disk import DiskTransport, version_folder
from pekoe.pipeline.weights.transport_setup import TransportSetup

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "trajectory"))

from conftest import build_group

Work = Callable[[], None]


class Scenario(Protocol):
    """`promised` holds what the work said is done: it must survive."""

    promised: list[Any]

    def prepare(self, run: RunDirectory) -> None: ...

    def start(self, run: RunDirectory) -> Work: ...

    def check(self, run: RunDirectory) -> None: ...

    def done(self, run: RunDirectory) -> None: ...


def next_attempt(run: RunDirectory) -> int:
    """Later than all whose traces are there."""
    found = [int(path.name.partition("-")[0]) for path in run.shards.iterdir()]
    found += [int(path.name.split("attempt-")[1].split(".")[0]) for path in run.checkpoints.glob("*attempt-*")]
    return max(found, default=-1) + 1


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.name.endswith((files.PART, files.DISCARDED)))


def write_checkpoint(checkpoints: Checkpoints, step: int, more: dict[str, bytes] | None = None) -> Path:
    """The files of one rank, as an engine and a role write them."""
    checkpoints.abandon(step)
    part = checkpoints.begin(step)
    files.make_folder(part / "engine")
    written = []
    for name, data in {"engine/shard-0": bytes([step]) * 3000, "state": b"{}", **(more or {})}.items():
        with files.create(part / name) as file:
            for start in range(0, len(data), 2000):
                file.write(data[start : start + 2000])
        written.append(WrittenFile(name, file.num_bytes, file.digest))
    return checkpoints.commit(step, {"rows": step}, written)


def write_shard_of(run: RunDirectory, attempt: int, groups: list[int], version: int = 0) -> str:
    writer = ShardWriter(run, ShardAttributes("e/t", attempt, "rank-1", 1.0))
    for number in groups:
        writer.add(build_group(number, samples=2, version=version))
    published = writer.flush()
    assert published is not None
    return published.path


class Shards:
    """Three shards of two groups; a new process adopts what is there and makes the rest."""

    groups = range(6)

    def __init__(self) -> None:
        self.promised: list[Any] = []

    def prepare(self, run: RunDirectory) -> None:
        run.create()

    def start(self, run: RunDirectory) -> Work:
        attempt = next_attempt(run)
        store = Store(run)
        adopted = store.adoptable(0, lambda _: True).notices
        kept = [notice.path for notice in adopted]
        missing = sorted(set(self.groups) - {group.group for notice in adopted for group in notice.groups})
        writer = ShardWriter(run, ShardAttributes("e/t", attempt, "rank-1", 1.0))

        def work() -> None:
            store.set_aside_unknown(attempt, kept)
            while True:
                if (published := writer.flush()) is not None:
                    self.promised.append(published.path)
                if not missing:
                    return
                for number in missing[:2]:
                    writer.add(build_group(number, samples=2))
                del missing[:2]

        return work

    def check(self, run: RunDirectory) -> None:
        store = Store(run)
        names = store.paths()
        assert set(self.promised) <= set(names), "a published shard is lost"
        for name in names:
            for group in store.notice(name).groups:
                expected = build_group(group.group, samples=2).trajectories
                for row, trajectory in zip(group.rows, expected, strict=True):
                    ((number, found),) = store.read([(name, row.row)])
                    assert number == group.group
                    assert found.tokens.tolist() == trajectory.tokens.tolist()
        store.close()

    def done(self, run: RunDirectory) -> None:
        store = Store(run)
        there = [group.group for name in store.paths() for group in store.notice(name).groups]
        assert sorted(set(there)) == list(self.groups)
        store.set_aside_unknown(next_attempt(run), store.paths())
        assert leftovers(run.shards) == []
        assert not any(run.set_aside.iterdir()), "no valid shard was taken for a bad one"


class LedgerRecords:
    """Three steps and the end."""

    def __init__(self) -> None:
        self.promised: list[Any] = []

    def prepare(self, run: RunDirectory) -> None:
        run.create()

    def start(self, run: RunDirectory) -> Work:
        ledger = Ledger(run)
        todo = [1, 2, 3]

        def work() -> None:
            # a new process goes on from no checkpoint: what is there is of an abandoned future
            if todo == [1, 2, 3] and not self.promised:
                ledger.set_aside_after(0)
            while todo:
                ledger.record(todo[0], consumed=[Entry(todo[0], 0, "shards/0-r/0.h5", (0, 1))])
                self.promised.append(todo.pop(0))
            ledger.record_end(3, [Entry(7, 0)], [])

        self.promised.clear()
        return work

    def check(self, run: RunDirectory) -> None:
        records = Ledger(run).read()
        assert set(self.promised) <= {record.step for record in records}
        assert [[entry.group for entry in record.consumed] for record in records] == [[r.step] for r in records]

    def done(self, run: RunDirectory) -> None:
        self.check(run)
        assert Ledger(run).steps() == [1, 2, 3]
        assert len(list(run.ledger.glob("end-*.json"))) == 1


class CheckpointsOfARun:
    """Three checkpoints, of which one is kept."""

    def __init__(self) -> None:
        self.promised: list[Any] = []

    def prepare(self, run: RunDirectory) -> None:
        run.create()

    def start(self, run: RunDirectory) -> Work:
        checkpoints = Checkpoints(run, keep=1, attempt=next_attempt(run))
        found = checkpoints.latest(deep=True)
        todo = [step for step in (1, 2, 3) if found is None or step > found[0]]

        def work() -> None:
            while todo:
                write_checkpoint(checkpoints, todo[0])
                self.promised.append(todo.pop(0))
                checkpoints.prune()

        return work

    def check(self, run: RunDirectory) -> None:
        found = Checkpoints(run, keep=1).latest(deep=True)
        assert (found[0] if found else 0) >= max(self.promised, default=0)

    def done(self, run: RunDirectory) -> None:
        last = Checkpoints(run, keep=1, attempt=next_attempt(run))
        last.prune()
        (path,) = (path for path in run.checkpoints.iterdir() if path.name != "readers")
        assert path.name in ("step-3", "step-3.1"), "saved again where its first save was not known to be durable"
        assert last.latest(deep=True) == (3, path)


class Export:
    """An export where an older one of the same name stands."""

    specs = (TensorSpec("a", (4,), "float32"), TensorSpec("b", (4,), "float32"))

    def __init__(self) -> None:
        self.promised: list[Any] = []

    def _source(self, run: RunDirectory) -> Path:
        return run.path / "model"

    def prepare(self, run: RunDirectory) -> None:
        run.create()
        self._source(run).mkdir()
        (self._source(run) / "config.json").write_text('{"model_type": "x"}')
        (self._source(run) / "tokenizer.json").write_text("{}")
        self._write(run, 1.0)

    def _write(self, run: RunDirectory, value: float) -> None:
        writer = HfFolderWriter(self._source(run), run.exports / "step-1", self.specs)
        for spec in self.specs:
            writer.add(spec.name, torch.full((4,), value))
        writer.finish("float32")

    def start(self, run: RunDirectory) -> Work:
        return lambda: self._write(run, 2.0)

    def check(self, run: RunDirectory) -> None:
        folder = run.exports / "step-1"
        if not folder.is_dir():
            folder = folder.with_name("step-1.previous")
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
        assert load_file(folder / "model.safetensors")["b"].tolist() in ([1.0] * 4, [2.0] * 4)

    def done(self, run: RunDirectory) -> None:
        self._write(run, 2.0)
        assert [path.name for path in run.exports.iterdir()] == ["step-1"]
        assert load_file(run.exports / "step-1" / "model.safetensors")["b"].tolist() == [2.0] * 4


class WeightsOnDisk:
    """Three versions by the disk transport, of which two are kept."""

    specs = (TensorSpec("a", (8,), "float32"), TensorSpec("b", (8,), "float32"))

    def __init__(self) -> None:
        self.promised: list[Any] = []

    def prepare(self, run: RunDirectory) -> None:
        run.create()

    def start(self, run: RunDirectory) -> Work:
        cpu = torch.device("cpu")
        sender = DiskTransport.sender(TransportSetup(0, "trainer", run, cpu, "gloo", "127.0.0.1", 2, 5.0, verify=True))
        sender.open_epoch(0, (0, 1))
        todo = [1, 2, 3]

        def work() -> None:
            while todo:
                tensors = [(spec.name, torch.full((8,), float(todo[0]))) for spec in self.specs]
                sender.send(todo[0], 0, (0, 1), self.specs, iter(tensors))
                todo.pop(0)

        return work

    def check(self, run: RunDirectory) -> None:
        for version in (1, 2, 3):
            if (folder := version_folder(run.weights, version)).is_dir():
                assert complete_folder.verify(folder, deep=True)["version"] == version

    def done(self, run: RunDirectory) -> None:
        self.check(run)
        sender = DiskTransport.sender(
            TransportSetup(0, "trainer", run, torch.device("cpu"), "gloo", "127.0.0.1", 64, 5.0)
        )
        sender.open_epoch(0, (0, 1))
        sender.send(4, 0, (0, 1), (), iter(()))
        folders = sorted(path.name for path in run.weights.iterdir() if path.is_dir() and path.name != "readers")
        assert folders == ["v-3", "v-4"]


class PutAside:
    """A shard and a folder leave the run."""

    def __init__(self) -> None:
        self.promised: list[Any] = []

    def prepare(self, run: RunDirectory) -> None:
        run.create()
        (run.shards / "0-r").mkdir()
        (run.shards / "0-r" / "0.h5").write_bytes(b"garbage")
        (run.exports / "step-9").mkdir()
        (run.exports / "step-9" / "config.json").write_bytes(b"{}")

    def _both(self, run: RunDirectory) -> dict[Path, Path]:
        return {
            run.shards / "0-r" / "0.h5": run.set_aside / "shards__0-r__0.h5",
            run.exports / "step-9": run.set_aside / "exports__step-9",
        }

    def start(self, run: RunDirectory) -> Work:
        def work() -> None:
            for path in self._both(run):
                run.put_aside(path, "a reason")
                self.promised.append(path)

        return work

    def check(self, run: RunDirectory) -> None:
        for before, after in self._both(run).items():
            assert before.exists() + after.exists() == 1
            assert after.exists() or before not in self.promised
        for path in run.set_aside.glob("*.reason.json"):
            assert files.read_json(path)["reason"] == "a reason"

    def done(self, run: RunDirectory) -> None:
        self.check(run)
        assert all(after.exists() for after in self._both(run).values())
