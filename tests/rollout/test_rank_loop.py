"""The loop of a rollout rank, as its watchdog sees it."""

from __future__ import annotations

import errno
import queue
import threading
import time
from typing import Any

import pytest

from pekoe.pipeline.messages import DiskRefused, Inbox, Published, StopRollout
from pekoe.pipeline.observe.progress_watch import ProgressWatch
from pekoe.pipeline.records import Example
from pekoe.pipeline.rollout import rank_loop
from pekoe.pipeline.rollout.executor import EpisodeSource, Executor, ExecutorSettings
from pekoe.pipeline.rollout.rank_loop import RolloutLoop, RolloutParts


class Silent:
    """A post that nothing is sent through, a workflow that is never run, an empty shard."""

    rank = 1
    num_groups = 0

    def due(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not used in this test")


def example(index: int) -> Example:
    raise AssertionError("no example is asked for")


def test_a_loop_that_has_ended_does_not_stand_still(models: Any, harness: Any) -> None:
    """The head may take long to leave after a rollout rank has: nobody may be blamed for that."""
    engine = harness.engine(models.build())
    inbox: Inbox = queue.SimpleQueue()
    silent: Any = Silent()
    loop = RolloutLoop(
        RolloutParts(silent, inbox, 0, engine, silent, silent, [], 64, lambda phase: None, lambda version: None)
    )
    executor = Executor(ExecutorSettings(1, 5.0, 0, 1), engine, EpisodeSource(silent, example), None, loop)
    clock = [0.0]
    watch = ProgressWatch("rollout", loop.progress, 10.0, lambda: clock[0])

    def look(seconds: int) -> None:
        for _ in range(seconds):
            clock[0] += 1.0
            watch.look()

    look(30)
    assert not watch.is_stalled, "before it has begun"
    thread = threading.Thread(target=loop.run, args=(executor,), daemon=True)
    thread.start()
    deadline = time.monotonic() + 5.0
    while not loop.turns and time.monotonic() < deadline:
        time.sleep(0.001)
    look(5)
    assert watch.is_busy
    inbox.put((0, StopRollout("finished")))
    thread.join(5.0)
    assert not thread.is_alive()
    look(30)
    assert not watch.is_stalled


class Refusing:
    """An open shard of two groups that the disk refuses with the errors given, one a try; and a post."""

    rank = 1
    num_groups = 2

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.sent: list[Any] = []

    def due(self) -> bool:
        return True

    def flush(self) -> Published:
        if self.codes:
            raise OSError(self.codes.pop(0), "planted")
        return Published("shards/0-rank-1/000000.h5", ())

    def send(self, to: int, message: Any) -> None:
        self.sent.append(message)


def refused_loop(monkeypatch: pytest.MonkeyPatch, *codes: int) -> tuple[RolloutLoop, Refusing]:
    monkeypatch.setattr(rank_loop, "RETRY_SECONDS", 0.01)
    disk: Any = Refusing(*codes)
    unused: Any = Silent()
    parts = RolloutParts(
        disk, queue.SimpleQueue(), 0, unused, disk, unused, [], 64, lambda phase: None, lambda version: None
    )
    return RolloutLoop(parts), disk


def test_a_shard_without_room_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, disk = refused_loop(monkeypatch, errno.ENOSPC, errno.EDQUOT)
    loop.publish()
    loop.publish()
    assert [type(message) for message in disk.sent] == [DiskRefused], "not before the pause is over"
    for _ in range(2):
        time.sleep(0.02)
        loop.publish_if_due()
    assert [type(message) for message in disk.sent] == [DiskRefused, DiskRefused, Published]
    assert disk.sent[0].num_groups == 2
    assert not loop.is_refused


def test_a_stale_handle_is_tried_again_for_a_while_and_is_no_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, disk = refused_loop(monkeypatch, errno.ESTALE)
    loop.publish()
    time.sleep(0.02)
    loop.publish()
    assert [type(message) for message in disk.sent] == [Published]
    monkeypatch.setattr(rank_loop, "STALE_SECONDS", 0.01)
    loop, disk = refused_loop(monkeypatch, errno.ESTALE, errno.ESTALE)
    loop.publish()
    time.sleep(0.02)
    with pytest.raises(OSError, match="planted"):
        loop.publish()


def test_other_errors_of_the_disk_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _ = refused_loop(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="planted"):
        loop.publish()
