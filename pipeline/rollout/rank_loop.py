"""The loop of a rollout rank: the head's messages in, groups and notices out. It never decodes nor runs a workflow.

Beside it run: the executor (workflows, an asyncio thread) and the engine (decoding, its own thread or process). Who
waits: the executor for tokens and rewards, the engine for requests and while weights load, this loop for messages. The
executor's results come back through this loop's own inbox, so that shards are written here and nowhere else.

On big worlds one rank of each node writes for all of its node: the others hand it their finished groups through memory
that they share, and it answers the head for them. A rank for whose groups there is no room writes them itself.
"""

from __future__ import annotations

import errno
import logging
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pekoe.pipeline import files
from pekoe.pipeline.messages import (
    Assign,
    AssignEvaluation,
    Cancel,
    CheckEngine,
    DiskRefused,
    EngineFailed,
    EngineRestored,
    Evaluated,
    Finished,
    Flush,
    Follow,
    HandedOver,
    Inbox,
    LoadWeights,
    Message,
    Phase,
    Post,
    PrepareWeights,
    Published,
    Rejected,
    StopRollout,
    Wake,
)
from pekoe.pipeline.records import Group
from pekoe.pipeline.rollout.engine import EngineFailedError, InferenceEngine, SamplingParameters
from pekoe.pipeline.rollout.executor import Executor
from pekoe.pipeline.rollout.restarting_engine import RestartingEngine
from pekoe.pipeline.rollout.self_test import check_engine
from pekoe.pipeline.rollout.weight_intake import Paused, WeightIntake, WeightSource

logger = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
"""Between two tries to publish a shard for which the disk has no room."""
STALE_SECONDS = 60.0
"""For how long a stale handle of the network filesystem is tried again."""
INBOX_KINDS: tuple[type[Message], ...] = (
    Assign, AssignEvaluation, Cancel, Flush, Follow, HandedOver, PrepareWeights, LoadWeights, Phase, Wake,
    CheckEngine, StopRollout,
)  # fmt: skip
STOP_SECONDS = 10.0
"""How much later than a member of its node a writer may hear that the run is over."""
MAX_HANDED_OVER = 16
"""Groups that go to the node's writer in one file, at most: what has finished together."""


class GroupWriter(Protocol):
    """The open shard (`trajectory/writer.py`)."""

    def add(self, group: Group) -> None: ...
    def flush(self) -> Published | None: ...
    def due(self) -> bool: ...
    @property
    def num_groups(self) -> int: ...


class HandOver(Protocol):
    """The way from a rank to its node's writer (`trajectory/hand_over.py`)."""

    writer: int
    """Rank that writes the shards of this node."""

    def put(self, groups: Sequence[Group]) -> str | None: ...
    def take(self, path: str) -> list[Group]: ...


@dataclass(frozen=True, slots=True)
class GroupDone:
    """From the executor: a group to write."""

    group: Group


@dataclass
class RolloutParts:
    """What `runs/rl_rollout.py` passes in."""

    post: Post
    inbox: Inbox
    head: int
    engine: InferenceEngine
    writer: GroupWriter
    weights: WeightSource
    check_sequences: list[list[int]]
    max_tokens: int
    """Longest sequence that a trainer can take (`actor.mb_spec.max_tokens_per_mb`)."""
    set_phase: Callable[[str], None]
    set_version: Callable[[int], None]
    hand_over: HandOver | None = None
    """None: every rank writes its own shards."""
    open_writer: Callable[[int], GroupWriter] | None = None
    """A new open shard, of another attempt (attached worlds only)."""
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    """Of training: log-probs are compared at its temperature, and with its cuts and penalties in the engine."""
    update_mode: str = "interrupt"
    """`weights.update_mode`."""


class RolloutLoop:
    """Owns the open shard; its `intake` owns the engine's pauses."""

    def __init__(self, parts: RolloutParts) -> None:
        self.parts = parts
        self.executor: Executor | None = None
        self.assigned: set[tuple[int, int]] = set()
        """(group, try) that are wanted from this rank's executor."""
        self.is_following = False
        """This is a rank of an attached world."""
        self.done: list[Group] = []
        """Finished groups that go to the node's writer next; empty whenever the inbox is."""
        self.intake = WeightIntake(parts)
        self.is_running = False
        self.turns = 0
        self.is_refused = False
        """The disk had no room for the open shard."""
        self.not_before = 0.0
        """When to try to publish again (monotonic seconds)."""
        self.refused_since = 0.0

    def progress(self) -> tuple[float, bool]:
        """(a counter that grows while the loop turns, is it still to turn)."""
        return float(self.turns), self.is_running

    # Called by the executor on its own thread: cheap, no I/O.

    def on_group(self, group: Group) -> None:
        self.parts.inbox.put((self.parts.post.rank, GroupDone(group)))  # type: ignore[arg-type]

    def on_rejected(self, message: Rejected) -> None:
        self.assigned.discard((message.group, message.try_number))
        self.parts.post.send(self.parts.head, message)

    def on_evaluated(self, message: Evaluated) -> None:
        self.parts.post.send(self.parts.head, message)

    def run(self, executor: Executor) -> str:
        """Until StopRollout; returns its reason. Published shards stay; the open one is thrown away with its groups."""
        self.executor, self.is_running = executor, True
        while True:
            self.turns += 1
            self.parts.set_phase(self.intake.describe() or "rollout")
            try:
                _, message = self.parts.inbox.get(timeout=0.5)
            except queue.Empty:
                self.publish_if_due()
                continue
            if isinstance(message, StopRollout):
                executor.stop()
                self.is_running = False
                return message.reason
            self.handle(message)
            self.publish_if_due()

    def publish_if_due(self) -> None:
        if self.is_refused or self.parts.writer.due():
            self.publish()

    def handle(self, message: Message | GroupDone | Paused) -> None:
        assert self.executor is not None
        if not isinstance(message, GroupDone):
            self.pass_on()
        match message:
            case GroupDone():
                self.take(message.group)
            case HandedOver():
                self.take_over(message.path)
            case Assign():
                self.assigned.add((message.group, message.try_number))
                self.executor.submit(message)
            case AssignEvaluation():
                self.executor.evaluate(message)
            case Cancel():
                self.assigned.discard((message.group, message.try_number))
                self.executor.cancel(message.group, message.try_number)
            case Follow():
                self.follow(message.attempt)
            case Flush():
                self.publish()
            case CheckEngine():
                self.check(message)
            case PrepareWeights():
                self.intake.prepare(message)
            case Paused():
                self.intake.on_paused(message)
            case LoadWeights():
                self.intake.load(message)
            case EngineFailed():
                self.intake.on_failed(message)
            case EngineRestored():
                self.intake.on_restored(message)
            case Phase():
                self.intake.rest(message.version)
            case Wake():
                self.intake.resume()
            case _:
                raise AssertionError(f"the rollout loop cannot handle {message!r}")

    def check(self, message: CheckEngine) -> None:
        """Before anything is sampled for the run: what the engine samples and scores, for the head to compare. An
        engine that fails in it is built anew; the head hears of that instead."""
        self.parts.set_phase("comparing log-probs")
        parts = self.parts
        generate = parts.engine.generate_once if isinstance(parts.engine, RestartingEngine) else None
        try:
            answer = check_engine(parts.engine, message.version, parts.check_sequences, parts.sampling, generate)
        except EngineFailedError:
            logger.exception("the engine has failed while it was compared")
            return
        parts.post.send(parts.head, answer)

    def take(self, group: Group) -> None:
        """A finished group goes into the open shard, this rank's or its node's, unless a sequence is longer than a
        trainer can take. In an attached world, one that is not wanted any more is forgotten."""
        if self.is_following and (group.number, group.try_number) not in self.assigned:
            return
        self.assigned.discard((group.number, group.try_number))
        longest = max(len(t.tokens) for t in group.trajectories)
        if longest > self.parts.max_tokens:
            detail = f"a sequence has {longest} tokens; actor.mb_spec.max_tokens_per_mb is {self.parts.max_tokens}"
            self.parts.post.send(self.parts.head, Rejected(group.number, group.try_number, "too_long", detail))
            return
        if self.parts.hand_over is None or self.parts.hand_over.writer == self.parts.post.rank:
            self.keep(group)
            return
        self.done.append(group)
        if self.parts.inbox.empty() or len(self.done) >= MAX_HANDED_OVER:
            self.pass_on()

    def keep(self, group: Group) -> None:
        """Into this rank's own open shard: the head hears of it from here."""
        self.parts.writer.add(group)
        self.parts.post.send(self.parts.head, Finished(group.number, group.try_number))

    def pass_on(self) -> None:
        """What has finished together goes to the node's writer; without room there, into this rank's own shard."""
        if not self.done:
            return
        assert self.parts.hand_over is not None
        done, self.done = self.done, []
        path = self.parts.hand_over.put(done)
        if path is not None:
            self.parts.post.send(self.parts.hand_over.writer, HandedOver(path))
            return
        for group in done:
            self.keep(group)

    def take_over(self, path: str) -> None:
        """Groups of another rank of this node. One that has heard of the end before this rank has cleared away what it
        handed over: nobody wants that any more."""
        assert self.parts.hand_over is not None
        try:
            groups = self.parts.hand_over.take(path)
        except FileNotFoundError:
            if not self.is_about_to_stop():
                raise
            return
        for group in groups:
            self.keep(group)

    def is_about_to_stop(self) -> bool:
        """Whether StopRollout comes within STOP_SECONDS; what comes before it is lost."""
        deadline = time.monotonic() + STOP_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            try:
                source, message = self.parts.inbox.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(message, StopRollout):
                self.parts.inbox.put((source, message))
                return True
        return False

    def follow(self, attempt: int) -> None:
        """Nothing that was sampled for the attempt before can come to light in this one: what runs is stopped, what has
        finished is forgotten, and the open shard is thrown away."""
        assert self.executor is not None
        assert self.parts.open_writer is not None
        self.is_following = True
        for group, try_number in list(self.assigned):
            self.executor.cancel(group, try_number)
        self.executor.settle()
        self.assigned.clear()
        self.done.clear()
        self.parts.writer = self.parts.open_writer(attempt)
        self.is_refused = False

    def publish(self) -> None:
        """Publishes the open shard. Without room on the disk its groups are kept, the head is told, and it is tried
        again every few seconds: what is open stays bounded, since the head admits nothing meanwhile. A stale handle
        (ESTALE), or a folder that the head of a new attempt has just cleared away (ENOENT), is tried again for
        STALE_SECONDS; any other error is raised."""
        if time.monotonic() < self.not_before:
            return
        self.parts.set_phase("publishing a shard")
        try:
            notice = self.parts.writer.flush()
        except OSError as error:
            now = time.monotonic()
            if not self.is_refused:
                self.refused_since = now
            is_stale = error.errno in (errno.ESTALE, errno.ENOENT) and now - self.refused_since < STALE_SECONDS
            if not (is_stale or files.is_full(error)):
                raise
            logger.error("%s; tried again in %.0f s", error, RETRY_SECONDS)
            self.not_before, self.is_refused = now + RETRY_SECONDS, True
            if not is_stale:
                self.parts.post.send(self.parts.head, DiskRefused(str(error), self.parts.writer.num_groups))
            return
        self.is_refused = False
        if notice is not None:
            self.parts.post.send(self.parts.head, notice)
