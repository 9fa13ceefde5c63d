"""A rollout rank that lends its device to an engine led by another rank (tensor parallelism).

    rollout thread   says Hello; PrepareWeights: answers WeightsReady, waits for the load, answers WeightsLoaded;
                     StopRollout: waits until the leader has closed the engine
    overlap only     LoadWeights: a thread receives the version beside decoding, into a second copy, as the leader does
    engine thread    waits for the leader's turns without limit; a Load among them takes the tensors from this rank's
                     own receiver, so that weights come straight to where they are used

It runs no workflow, judges nothing, writes no shard. When it fails, or the leader does, the attempt ends.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from pekoe.pipeline.messages import (
    Hello,
    Inbox,
    LoadWeights,
    Message,
    Post,
    PrepareWeights,
    StopRollout,
    WeightsLoaded,
    WeightsReady,
)
from pekoe.pipeline.registry import INFERENCE_ENGINES, resolve
from pekoe.pipeline.reward.pool import RewardPool
from pekoe.pipeline.rollout.engine import Instance
from pekoe.pipeline.rollout.staged_weights import StagedWeights
from pekoe.pipeline.rollout.weight_intake import ERROR_CHARACTERS
from pekoe.pipeline.runs.context import HEAD, RunContext
from pekoe.pipeline.runs.engine_instance import join_instance
from pekoe.pipeline.runs.engine_setup import engine_settings
from pekoe.pipeline.runs.rl_rollout import build_receiver, roll
from pekoe.pipeline.weights.transport import WeightReceiver

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

INBOX_KINDS: tuple[type[Message], ...] = (PrepareWeights, LoadWeights, StopRollout)
STOP_SECONDS = 30.0
"""How long the leader has to close the engine once the run is over."""


class LentEngine(Protocol):
    """This rank's part of the engine."""

    def wait(self, seconds: float) -> bool: ...
    def gauges(self) -> dict[str, float]: ...


def serve(context: RunContext, pool: RewardPool | None) -> str:
    """The rollout thread of any rollout rank, until StopRollout. Returns how the run ended."""
    instance = join_instance(context)
    if instance.rank > 0:
        return follow(context, instance)
    assert pool is not None
    return roll(context, pool, instance)


def follow(context: RunContext, instance: Instance) -> str:
    """The rollout thread, until StopRollout. Returns how the run ended."""
    world = context.world
    inbox = world.post.inbox(*INBOX_KINDS)
    set_phase = context.phase_of("rollout")
    set_phase("loading the engine")
    seconds = context.config.weights.ready_seconds + context.config.weights.bucket_seconds
    receiver = build_receiver(context)
    weights = LentWeights(receiver, seconds, overlap=context.config.weights.update_mode == "overlap")
    with context.building:
        engine = build_lent_engine(context, instance, weights)
    context.add_gauges("engine", engine.gauges)
    loop = FollowerLoop(world.post, inbox, weights, set_phase, world.set_version)
    world.post.send(HEAD, Hello("rollout", context.start.version))
    outcome = loop.run()
    set_phase("waiting for the leader to close the engine")
    if not engine.wait(STOP_SECONDS):
        raise TimeoutError(f"the leader of this engine has not closed it within {STOP_SECONDS:g} s")
    receiver.close()
    return outcome


def build_lent_engine(context: RunContext, instance: Instance, weights: LentWeights) -> LentEngine:
    """Returns when all ranks of the instance have built theirs; what stops it later ends the world."""
    assert context.ranks.rollout is not None
    engine_class = resolve(INFERENCE_ENGINES, context.ranks.rollout.engine, "allocation")
    engine: LentEngine = engine_class.follow(
        engine_settings(context), instance, weights.receive, lambda error: context.world.abort(error, "engine")
    )
    return engine


class LentWeights:
    """Lets the engine's thread wait until this rank has joined the transfer that the leader already loads from."""

    def __init__(self, receiver: WeightReceiver, limit_seconds: float, *, overlap: bool = False) -> None:
        """`overlap`: a version is received beside decoding, from `begin` on, and kept until it is loaded."""
        self._receiver = receiver
        self._limit_seconds = limit_seconds
        self._overlap = overlap
        self._changed = threading.Condition()
        self._prepared: PrepareWeights | None = None
        self._loaded = -1
        self._stager: threading.Thread | None = None
        self._staged = StagedWeights()
        self._staged_message: PrepareWeights | None = None
        self._error: BaseException | None = None

    def prepare(self, message: PrepareWeights) -> None:
        """The transfer of `message.version` may begin; one before it that is not over is given up."""
        if self._stager is not None:
            if self._stager.is_alive():
                self._receiver.abandon("a later transfer has begun")
            self._stager.join()
        self._receiver.prepare(message)
        with self._changed:
            self._prepared, self._staged_message, self._error, self._loaded = message, None, None, -1
            self._changed.notify_all()

    def begin(self, message: LoadWeights) -> None:
        """All members of the transfer are ready. Without overlap the leader's Load says when to receive."""
        prepared = self._prepared
        if not self._overlap or prepared is None:
            return
        if (prepared.version, prepared.epoch) == (message.version, message.epoch):
            self._stager = threading.Thread(target=self._stage, args=(prepared,), name="lent-weights", daemon=True)
            self._stager.start()

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """For the engine's thread. TimeoutError when the version has not come to this rank in time."""
        if self._overlap:
            self._wait_for(version, lambda: self._error is not None or self._is_staged(version))
            if self._error is not None:
                raise self._error
            yield from self._staged
        else:
            self._wait_for(version, lambda: self._prepared is not None and self._prepared.version == version)
            yield from self._received(version)
        with self._changed:
            self._loaded = version
            self._changed.notify_all()

    def is_loaded(self, version: int) -> bool:
        """Whether the engine's thread has taken every tensor of the version."""
        return self._loaded == version

    @property
    def failure(self) -> BaseException | None:
        """Why the version that was begun did not arrive (overlap only); the engine decodes on without it."""
        return self._error

    def _received(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            yield from self._receiver.receive(version)
        except BaseException as error:
            self._receiver.abandon(f"{type(error).__name__}: {error}")
            raise

    def _stage(self, message: PrepareWeights) -> None:
        """A failure is the engine's only if it wants this version: the head may begin a new transfer instead."""
        error: BaseException | None = None
        try:
            self._staged.fill(self._received(message.version))
        except Exception as failure:
            logger.exception("version %d did not arrive", message.version)
            error = failure
        with self._changed:
            self._staged_message, self._error = message, error
            self._changed.notify_all()

    def _is_staged(self, version: int) -> bool:
        return self._staged_message is not None and self._staged_message.version == version

    def _wait_for(self, version: int, is_there: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(is_there, self._limit_seconds):
                last = "none" if self._prepared is None else f"version {self._prepared.version}"
                raise TimeoutError(
                    f"the leader loads weights version {version}, which has not come to this rank within "
                    f"{self._limit_seconds:g} s; it was last told of {last}"
                )


class FollowerLoop:
    """The head's messages in, answers about weights out. A load that fails in the engine never comes back here: it ends
    the world."""

    def __init__(
        self,
        post: Post,
        inbox: Inbox,
        weights: LentWeights,
        set_phase: Callable[[str], None],
        set_version: Callable[[int], None],
    ) -> None:
        self._post = post
        self._inbox = inbox
        self._weights = weights
        self._set_phase = set_phase
        self._set_version = set_version
        self._under_way: PrepareWeights | None = None
        self._began = 0.0

    def run(self) -> str:
        """Until StopRollout; returns its reason."""
        while True:
            self._set_phase("loading weights" if self._under_way else "lending the device")
            try:
                _, message = self._inbox.get(timeout=0.02 if self._under_way else None)
            except queue.Empty:
                self._confirm()
                continue
            if isinstance(message, StopRollout):
                return message.reason
            if isinstance(message, LoadWeights):
                self._weights.begin(message)
            elif isinstance(message, PrepareWeights):
                self._began = time.monotonic()
                self._weights.prepare(message)
                self._under_way = message
                self._post.send(HEAD, WeightsReady(message.version, message.epoch))

    def _confirm(self) -> None:
        """Tells the head once the version is loaded, or has not come. The leader alone compares log-probs: they come
        from all ranks."""
        message, failure = self._under_way, self._weights.failure
        assert message is not None
        if self._weights.is_loaded(message.version):
            self._set_version(message.version)
        elif failure is None:
            return
        self._under_way = None
        error = "" if failure is None else f"{type(failure).__name__}: {failure}"[:ERROR_CHARACTERS]
        self._post.send(HEAD, WeightsLoaded(message.version, time.monotonic() - self._began, error=error))
