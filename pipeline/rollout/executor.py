"""The executor: assignments in, groups out. Runs the episodes of many groups at once on an asyncio loop of its own.

It waits for tokens (engine) and rewards (pool); the rank loop feeds it from another thread and gets its results
through an `Outlet`. A group is accepted or rejected whole: the first episode that is lost for good cancels the
others, which frees their slots in the engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from pekoe.pipeline.messages import EQUAL_REWARDS, Assign, AssignEvaluation, Evaluated, Rejected
from pekoe.pipeline.records import POSITION_BITS, Example, Group, Trajectory
from pekoe.pipeline.rollout.engine import InferenceEngine
from pekoe.pipeline.rollout.episode import DETAIL_CHARACTERS, EpisodeIdentity, EpisodePolicy, run_episode
from pekoe.pipeline.rollout.equal_rewards import has_equal_rewards
from pekoe.pipeline.rollout.group_gate import GroupGate
from pekoe.pipeline.rollout.workflow import RejectEpisode, Workflow

STOP_SECONDS = 10.0
SETTLE_SECONDS = 10.0
TICK_SECONDS = 0.5
"""How often the loop shows that it turns."""

logger = logging.getLogger(__name__)


class Outlet(Protocol):
    """Where results go. Called on the executor's thread, between two tokens of everybody: must be cheap."""

    def on_group(self, group: Group) -> None: ...

    def on_rejected(self, message: Rejected) -> None: ...

    def on_evaluated(self, message: Evaluated) -> None: ...


@dataclass(frozen=True, slots=True)
class EpisodeSource:
    """What an assignment's example index means, and what is done with it."""

    workflow: Workflow
    example: Callable[[int], Example]


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """Seeds and limits."""

    run_seed: int
    episode_seconds: float
    episode_retries: int
    max_running_episodes: int
    """Of training; as many again for evaluation, so that neither waits for the other."""
    fatal: tuple[type[Exception], ...] = ()
    """Errors raised in an episode that end the run instead of the episode (the reward pool's failure)."""


class Executor:
    """`run` blocks its thread; every other method may be called from any thread, also before `run`."""

    def __init__(
        self,
        settings: ExecutorSettings,
        engine: InferenceEngine,
        training: EpisodeSource,
        evaluation: EpisodeSource | None,
        outlet: Outlet,
        complete: Callable[[Group], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`complete` adds what a finished group of training still lacks; RejectEpisode rejects the group."""
        self._settings = settings
        self._policy = EpisodePolicy(settings.episode_seconds, settings.episode_retries, settings.fatal)
        self._engine = engine
        self._training = training
        self._evaluation = evaluation
        self._outlet = outlet
        self._complete = complete
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._backlog: list[Callable[[], object]] | None = []
        self._stopped = asyncio.Event()
        self._failure: BaseException | None = None
        self._gates = (GroupGate(settings.max_running_episodes), GroupGate(settings.max_running_episodes))
        self._tasks: set[asyncio.Task[None]] = set()
        self._groups: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._began: dict[object, float] = {}
        self._num_done = 0
        self._num_failed = 0
        self._ticks = 0

    def run(self) -> None:
        """Until `stop`. Raises a fatal error of an episode, or what an outlet raised."""
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._main(loop))
        finally:
            with self._lock:
                self._loop = None
            loop.close()
        if self._failure is not None:
            raise self._failure

    def submit(self, message: Assign) -> None:
        """Runs the episodes of a group; ends in `on_group` or `on_rejected`, unless it is cancelled."""
        self._call(lambda: self._submit(message))

    def evaluate(self, message: AssignEvaluation) -> None:
        """Runs evaluation episodes of one example; ends in `on_evaluated`. Raises ValueError without validation
        data."""
        if self._evaluation is None:
            raise ValueError("valid_dataset: an evaluation was asked for, but there is no validation data")
        source = self._evaluation
        self._call(lambda: self._spawn(self._run_evaluation(source, message)))

    def cancel(self, group: int, try_number: int) -> None:
        """Stops a group without a word to the outlet; one that is done or unknown is left as it is."""
        self._call(lambda: self._cancel(group, try_number))

    def settle(self) -> None:
        """Returns when what was asked for until now has happened: after `cancel`, no result of that group comes any
        more. A loop that does not turn for SETTLE_SECONDS is the watchdog's business."""
        done = threading.Event()
        self._call(done.set)
        done.wait(SETTLE_SECONDS)

    def stop(self) -> None:
        """Makes `run` cancel what runs and return."""
        self._call(self._stopped.set)

    def gauges(self) -> dict[str, float]:
        """`episodes` running, `groups_waiting` for a place, `oldest_seconds` of a running episode, groups `done`,
        `failed`."""
        began = list(self._began.values())
        return {
            "episodes": float(len(began)),
            "groups_waiting": float(sum(gate.num_waiting for gate in self._gates)),
            "oldest_seconds": time.monotonic() - min(began) if began else 0.0,
            "done": float(self._num_done),
            "failed": float(self._num_failed),
        }

    def progress(self) -> tuple[float, bool]:
        """(a counter that grows while the loop turns, True): a workflow that blocks it makes everybody wait."""
        return float(self._ticks), self._loop is not None

    def _call(self, action: Callable[[], object]) -> None:
        """On the loop as soon as it runs; dropped when it has ended."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(action)
            elif self._backlog is not None:
                self._backlog.append(action)

    async def _main(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._loop, backlog, self._backlog = loop, self._backlog or [], None
        for action in backlog:
            loop.call_soon(action)
        self._tick(loop)
        await self._stopped.wait()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_SECONDS)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticks += 1
        loop.call_later(TICK_SECONDS, self._tick, loop)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failure = self._failure or first_leaf(error)
            self._stopped.set()

    def _submit(self, message: Assign) -> None:
        key = (message.group, message.try_number)
        task = self._groups[key] = self._spawn(self._run_group(message))
        task.add_done_callback(lambda done: self._groups.pop(key) if self._groups.get(key) is done else None)

    def _cancel(self, group: int, try_number: int) -> None:
        task = self._groups.get((group, try_number))
        if task is not None:
            task.cancel()

    async def _run_group(self, message: Assign) -> None:
        try:
            group = await self._group(message)
            is_dropped = message.drop_equal and has_equal_rewards(group)
            if self._complete is not None and not is_dropped:
                await self._complete(group)
        except* RejectEpisode as errors:
            rejection = first_leaf(errors)
            assert isinstance(rejection, RejectEpisode)
            self._num_failed += 1
            self._outlet.on_rejected(
                Rejected(message.group, message.try_number, rejection.reason, rejection.detail[:DETAIL_CHARACTERS])
            )
        else:
            self._num_done += 1
            if is_dropped:
                self._outlet.on_rejected(Rejected(message.group, message.try_number, EQUAL_REWARDS))
            else:
                self._outlet.on_group(group)

    async def _group(self, message: Assign) -> Group:
        async with self._gates[0].places(message.n_samples):
            example = look_up(self._training, message.example)
            identities = [
                EpisodeIdentity(
                    run_seed=self._settings.run_seed,
                    group=message.group,
                    seed_group=message.group,
                    try_number=message.try_number,
                    sample=sample,
                    group_size=message.n_samples,
                    min_version=message.min_version,
                )
                for sample in range(message.n_samples)
            ]
            async with asyncio.TaskGroup() as episodes:
                tasks = [
                    episodes.create_task(self._episode(self._training.workflow, example, identity))
                    for identity in identities
                ]
        trajectories = [trajectory for task in tasks for trajectory in task.result()]
        return Group(message.group, message.try_number, example.name, trajectories)

    async def _run_evaluation(self, source: EpisodeSource, message: AssignEvaluation) -> None:
        """Samples are independent: one that is lost is logged and left out of the result."""
        try:
            example = look_up(source, message.example)
        except RejectEpisode as error:
            logger.error("evaluation example %d: %s", message.example, error)
            self._outlet.on_evaluated(evaluated(message, []))
            return
        identities = [
            EpisodeIdentity(
                run_seed=self._settings.run_seed,
                group=-1 - (message.evaluation << POSITION_BITS | message.example),
                seed_group=-1 - message.example,
                try_number=0,
                sample=sample,
                group_size=message.n_samples,
                min_version=message.evaluation,
            )
            for sample in range(message.n_samples)
        ]
        async with self._gates[1].places(message.n_samples):
            episodes = (self._episode(source.workflow, example, identity) for identity in identities)
            results = await asyncio.gather(*episodes, return_exceptions=True)
        kept = []
        for result in results:
            if isinstance(result, RejectEpisode):
                logger.error("evaluation of %s at version %d: %s", example.name, message.evaluation, result)
            elif isinstance(result, BaseException):
                raise result
            else:
                kept.append(result)
        self._outlet.on_evaluated(evaluated(message, kept))

    async def _episode(self, workflow: Workflow, example: Example, identity: EpisodeIdentity) -> list[Trajectory]:
        key = object()
        self._began[key] = time.monotonic()
        try:
            return await run_episode(workflow, self._engine, example, identity, self._policy)
        finally:
            del self._began[key]


def look_up(source: EpisodeSource, index: int) -> Example:
    """The example. Raises RejectEpisode(`error`) when the dataset cannot give it."""
    try:
        return source.example(index)
    except Exception as error:
        raise RejectEpisode("error", traceback.format_exc()[-DETAIL_CHARACTERS:]) from error


def evaluated(message: AssignEvaluation, episodes: list[list[Trajectory]]) -> Evaluated:
    """The result of an evaluation example; an episode's reward is that of its last trajectory, turns included. Empty if
    all were lost."""
    versions = [t.versions[t.loss_mask.astype(bool)] for episode in episodes for t in episode]
    return Evaluated(
        evaluation=message.evaluation,
        example=message.example,
        rewards=tuple(episode[-1].total_reward for episode in episodes),
        lengths=tuple(sum(int(t.loss_mask.sum()) for t in episode) for episode in episodes),
        truncated=tuple(episode[-1].truncated for episode in episodes),
        min_version=min((int(v.min()) for v in versions), default=-1),
        max_version=max((int(v.max()) for v in versions), default=-1),
    )


def first_leaf(error: BaseException) -> BaseException:
    """The first error in nested groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
