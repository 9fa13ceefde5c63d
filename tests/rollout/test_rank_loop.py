"""The loop of a rollout rank, as its watchdog sees it."""

from __future__ import annotations

import errno
import queue
import threading
import time
from typing import Any

import numpy as np
import pytest

from pekoe.pipeline.messages import DiskRefused, Finished, Flush, HandedOver, Inbox, Published, StopRollout
from pekoe.pipeline.observe.progress_watch import ProgressWatch
from pekoe.pipeline.records import Example, Finish, Group, Trajectory
from pekoe.pipeline.rollout import rank_loop
from pekoe.pipeline.rollout.executor import EpisodeSource, Executor, ExecutorSettings
from pekoe.pipeline.rollout.rank_loop import GroupDone, RolloutLoop, RolloutParts


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


def group(number: int) -> Group:
    tokens, zeros = np.arange(4, dtype=np.int32), np.zeros(4, np.int32)
    row = Trajectory(
        tokens, np.ones(4, np.uint8), np.zeros(4, np.float32), zeros, zeros, 1, 1.0, Finish.STOP, number, 0
    )
    return Group(number, 0, f"data/{number}", [row])


class Node:
    """The ranks of one node: their posts, shards, and the place between them, which may be full."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, Any]] = []
        self.shards: dict[int, list[int]] = {1: [], 2: []}
        self.files: dict[str, list[Group]] = {}
        self.is_full = False
        self.loops = {rank: self.loop(rank) for rank in (1, 2)}

    def loop(self, rank: int) -> RolloutLoop:
        node = self

        class Rank:
            """Rank 1 writes."""

            writer = 1

            def send(self, to: int, message: Any) -> None:
                node.sent.append((self.rank, to, message))

            def add(self, one: Group) -> None:
                node.shards[self.rank].append(one.number)

            def flush(self) -> Published | None:
                numbers, node.shards[self.rank] = node.shards[self.rank], []
                return Published(f"{self.rank}:{numbers}", ()) if numbers else None

            def put(self, groups: list[Group]) -> str | None:
                path = str(len(node.files))
                return None if node.is_full else node.files.setdefault(path, list(groups)) and path

            def take(self, path: str) -> list[Group]:
                if path not in node.files:
                    raise FileNotFoundError(path)
                return node.files[path]

            def __init__(self, rank: int) -> None:
                self.rank = rank

        own: Any = Rank(rank)
        unused: Any = Silent()
        parts = RolloutParts(
            own, queue.SimpleQueue(), 0, unused, own, unused, [], 64, lambda phase: None, lambda version: None, own
        )
        loop = RolloutLoop(parts)
        loop.executor = unused
        return loop

    def finish(self, rank: int, *numbers: int) -> None:
        """These groups finish at the same time."""
        inbox = self.loops[rank].parts.inbox
        for number in numbers:
            self.loops[rank].on_group(group(number))
        while not inbox.empty():
            self.loops[rank].handle(inbox.get()[1])

    def said_to_head(self, rank: int) -> list[int]:
        return [m.group for source, to, m in self.sent if (source, to) == (rank, 0) and isinstance(m, Finished)]


def test_a_node_has_one_writer_which_answers_for_all() -> None:
    node = Node()
    node.finish(1, 10)
    node.finish(2, 20, 21, 22)
    assert node.said_to_head(1) == [10]
    assert node.said_to_head(2) == [], "the head asks for a group where it lies"
    ((_, to, handed),) = [sent for sent in node.sent if isinstance(sent[2], HandedOver)]
    assert to == 1
    assert len(node.files) == 1, "what finished together lies in one file"
    node.loops[1].handle(handed)
    assert node.said_to_head(1) == [10, 20, 21, 22]
    node.loops[1].handle(Flush())
    assert node.sent[-1] == (1, 0, Published("1:[10, 20, 21, 22]", ()))


def test_many_groups_that_finish_at_once_go_in_several_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_loop, "MAX_HANDED_OVER", 4)
    node = Node()
    node.finish(2, *range(10))
    assert [len(groups) for groups in node.files.values()] == [4, 4, 2]


def test_a_group_does_not_wait_behind_an_order() -> None:
    node = Node()
    loop = node.loops[2]
    loop.parts.inbox.put((0, Flush()))
    loop.handle(GroupDone(group(1)))
    assert not node.files, "something else has come: perhaps another group"
    loop.handle(loop.parts.inbox.get()[1])
    assert [[g.number for g in groups] for groups in node.files.values()] == [[1]]


def test_where_the_place_is_full_a_rank_writes_itself_and_is_flushed_itself() -> None:
    node = Node()
    node.is_full = True
    node.finish(2, 20)
    assert node.said_to_head(2) == [20]
    node.loops[2].handle(Flush())
    assert node.sent[-1] == (2, 0, Published("2:[20]", ()))


def test_a_member_that_hears_of_the_end_first_may_clear_away_what_its_writer_has_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_loop, "STOP_SECONDS", 0.2)
    writer = Node().loops[1]
    inbox = writer.parts.inbox
    inbox.put((0, Flush()))
    inbox.put((0, StopRollout("stopped")))
    writer.handle(HandedOver("gone"))
    assert inbox.get()[1] == StopRollout("stopped")
    assert inbox.empty()
    with pytest.raises(FileNotFoundError):
        writer.handle(HandedOver("gone"))
