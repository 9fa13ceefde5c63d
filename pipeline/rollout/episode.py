"""One episode: a workflow run on one example, with its identity, its time limit and its second chances."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import traceback
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from pekoe.pipeline.records import Example, Trajectory, sampling_seed
from pekoe.pipeline.rollout.engine import GenerationRequest, InferenceEngine, Response
from pekoe.pipeline.rollout.workflow import RejectEpisode, Workflow

DETAIL_CHARACTERS = 3000
CANCEL_SECONDS = 5.0
"""How long a cancelled workflow may take to clean up before it is left to itself."""

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EpisodeIdentity:
    """What an engine must know of the episode behind a request."""

    run_seed: int
    group: int
    """Group of the request: unique among all that run."""
    seed_group: int
    """Group that enters the seed; for evaluations the same at every version."""
    try_number: int
    sample: int
    group_size: int
    min_version: int

    def seed(self, call: int) -> int:
        return sampling_seed(self.run_seed, self.seed_group, self.try_number, self.sample, call)


class BoundEngine:
    """The engine as an episode sees it: fills in who asks, and a seed that counts the episode's calls."""

    def __init__(self, engine: InferenceEngine, identity: EpisodeIdentity) -> None:
        self._engine = engine
        self._identity = identity
        self._num_calls = 0

    async def generate(self, request: GenerationRequest) -> Response:
        identity = self._identity
        bound = dataclasses.replace(
            request,
            seed=identity.seed(self._num_calls),
            group=identity.group,
            sample=identity.sample,
            group_size=identity.group_size,
            min_version=max(request.min_version, identity.min_version),
        )
        self._num_calls += 1
        return await self._engine.generate(bound)


@dataclass(frozen=True, slots=True)
class EpisodePolicy:
    """Limits of one episode."""

    seconds: float
    retries: int
    fatal: tuple[type[Exception], ...] = ()
    """Errors that say nothing of this episode but end the run: they pass through."""


async def run_episode(
    workflow: Workflow, engine: InferenceEngine, example: Example, identity: EpisodeIdentity, policy: EpisodePolicy
) -> list[Trajectory]:
    """The checked trajectories of one episode. A try that raises is repeated with the same seeds.

    Raises RejectEpisode (`error` with the traceback, `timeout`, `none`, or the workflow's own reason) or a fatal error.
    """
    detail = ""
    for attempt in range(policy.retries + 1):
        episode = workflow.arun_episode(BoundEngine(engine, identity), example)
        try:
            return _checked(await within(policy.seconds, episode), identity)
        except RejectEpisode:
            raise
        except Exception as error:
            if isinstance(error, policy.fatal):
                raise
            detail = traceback.format_exc()[-DETAIL_CHARACTERS:]
            logger.warning("%s, sample %d, attempt %d failed:\n%s", example.name, identity.sample, attempt, detail)
    raise RejectEpisode("error", f"{example.name}, sample {identity.sample}:\n{detail}")


async def within(seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result. Raises RejectEpisode(`timeout`), saying where it was, when it takes longer; it is
    cancelled.

    A coroutine that swallows its cancellation cannot hold the caller: it is left behind with an error in the log.
    """
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _cancel(task)
        raise
    if not task.done():
        where = _position(coroutine)
        await _cancel(task)
        raise RejectEpisode(
            "timeout", f"the episode took over {seconds:g} s (rollout.episode_seconds); it was at {where}"
        )
    if task.cancelled():
        raise RuntimeError("the workflow's task was cancelled from inside")
    return task.result()


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=CANCEL_SECONDS)
    if not done:
        logger.error("a workflow did not end %g s after its cancellation and is left behind: %r", CANCEL_SECONDS, task)
    elif not task.cancelled():
        task.exception()


def _position(coroutine: Coroutine[Any, Any, Any]) -> str:
    """The innermost three lines at which a suspended chain of coroutines waits."""
    places = []
    inner: Any = coroutine
    while getattr(inner, "cr_frame", None) is not None:
        places.append(f"{inner.cr_code.co_filename}:{inner.cr_frame.f_lineno} in {inner.cr_code.co_qualname}")
        inner = inner.cr_await
    return " > ".join(places[-3:])


def _checked(result: Trajectory | list[Trajectory] | None, identity: EpisodeIdentity) -> list[Trajectory]:
    if result is None or result == []:
        raise RejectEpisode("none", "the workflow returned no trajectory")
    trajectories = result if isinstance(result, list) else [result]
    for trajectory in trajectories:
        trajectory.check()
        trajectory.sample = identity.sample
        trajectory.seed = identity.seed(0)
    return trajectories
