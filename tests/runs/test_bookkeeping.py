"""The thread beside the controller that removes what a checkpoint makes superfluous."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pekoe.launch.fence import Fence, SupersededError, raise_fence
from pekoe.pipeline.control.dispatcher import Losses
from pekoe.pipeline.control.step import StepRows
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.bookkeeping import Bookkeeping
from pekoe.pipeline.train.checkpoint import Checkpoints
from pekoe.pipeline.trajectory.ledger import Ledger


class Stubborn:
    """A disk that lets nothing go the first time."""

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[str], Sequence[str]]] = []

    def take(self, consumed: Sequence[str], unused: Sequence[str]) -> None:
        self.asked.append((consumed, unused))
        if len(self.asked) == 1:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    def close(self) -> None:
        """Nothing waits."""


def test_shards_that_could_not_be_removed_are_removed_with_the_next_checkpoint(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    idle = iter([{"a", "b"}, {"c"}, {"d"}])
    spent = Stubborn()
    books = Bookkeeping(
        Ledger(run), Checkpoints(run, 1), spent, lambda: next(idle), lambda message: None, 1, ["a", "c"]
    )
    threading.Thread(target=books.run, daemon=True).start()
    for version in (1, 2, 3):
        books.begin(version, b"")
        books.tidy()
    books.close(10.0)
    assert spent.asked == [(["a"], ["b"]), (["a", "c"], ["b"]), ([], ["d"])]


def test_a_head_whose_run_another_attempt_has_writes_and_removes_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.run_json.write_text(json.dumps({"attempts": [{"number": 0}]}))
    fence, spent = Fence(run, 0), Stubborn()
    spent.asked.append(((), ()))
    ledger, checkpoints = Ledger(run), Checkpoints(run, 1)
    books = Bookkeeping(ledger, checkpoints, spent, lambda: {"a"}, lambda message: None, 1, ["a"], fence.check)
    books.record_end(0, Losses())
    raise_fence(run)
    before = sorted(path.name for path in run.path.rglob("*"))
    rows = StepRows((), (), np.zeros(0, np.uint8))
    for write in (lambda: books.record_step(1, rows, Losses()), lambda: books.record_end(1, Losses())):
        with pytest.raises(SupersededError, match="attempt 1 of"):
            write()
    books.commit(1, [])
    with pytest.raises(SupersededError):
        books.run()
    books.spend(["a"])
    with pytest.raises(SupersededError):
        books.run()
    assert sorted(path.name for path in run.path.rglob("*")) == before
    assert len(spent.asked) == 1
