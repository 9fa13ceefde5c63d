"""The loop of a rollout rank, as its watchdog sees it."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

from pekoe.pipeline.messages import Inbox, StopRollout
from pekoe.pipeline.observe.progress_watch import ProgressWatch
from pekoe.pipeline.records import Example
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
