"""A second engine on a rollout rank that samples nothing: it says how likely a teacher finds what was sampled.

    executor: group is done ─► add_logprobs ─► waiting ─► one thread, a group at a time ─► teacher_logprobs ─► shard

The engine is paused from its start on and keeps its weights. Neither the executor's loop nor decoding waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pekoe.pipeline.records import TEACHER_LOGPROBS, Float32, Group, Int32
from pekoe.pipeline.rollout.engine import EngineFailedError, InferenceEngine
from pekoe.pipeline.rollout.workflow import RejectEpisode

logger = logging.getLogger(__name__)


class Teacher:
    """Owns its engine. `make` builds one; one that fails is built anew, `max_restarts` times at most. No sequence may
    have more than `longest` tokens."""

    def __init__(
        self, make: Callable[[], InferenceEngine], temperature: float, longest: int, max_restarts: int = 0
    ) -> None:
        self._make, self._temperature, self._longest, self._restarts_left = make, temperature, longest, max_restarts
        self._worker = ThreadPoolExecutor(1, "teacher")
        self._num_asked = self._num_scored = 0
        self._engine = self._build()

    async def add_logprobs(self, group: Group) -> None:
        """Puts `teacher_logprobs` into each trajectory, at the sampling temperature, 0 where nothing was sampled.
        RejectEpisode(`too_long`) for a sequence that it cannot take; EngineFailedError when the engine fails and may
        not be built again."""
        sequences = [trajectory.tokens for trajectory in group.trajectories]
        longest = max(map(len, sequences))
        if longest > self._longest:
            raise RejectEpisode("too_long", f"a sequence has {longest} tokens; the teacher takes {self._longest}")
        self._num_asked += 1
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._worker, self._score, sequences)
        finally:
            self._num_asked -= 1
        for trajectory, logprobs in zip(group.trajectories, found, strict=True):
            sampled = trajectory.loss_mask != 0
            trajectory.extra[TEACHER_LOGPROBS] = np.where(sampled, logprobs, 0).astype(np.float32)

    def gauges(self) -> dict[str, float]:
        """Groups that wait for it, and sequences scored so far."""
        return {"waiting": float(self._num_asked), "scored": float(self._num_scored)}

    def progress(self) -> tuple[float, bool]:
        """(a counter that grows with every group, is one waiting)."""
        return float(self._num_scored), self._num_asked > 0

    def close(self) -> None:
        """Returns when the thread and the engine have ended; groups that wait are given up."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._engine.close()
        self._worker.shutdown()

    def _build(self) -> InferenceEngine:
        engine = self._make()
        engine.pause()
        return engine

    def _score(self, sequences: list[Int32]) -> list[Float32]:
        """On the teacher's thread."""
        while True:
            try:
                found = self._engine.logprobs(sequences, self._temperature)
            except EngineFailedError:
                if not self._restarts_left:
                    raise
                logger.exception("the teacher's engine has failed and is built anew")
                self._restarts_left -= 1
                self._engine.close()
                self._engine = self._build()
            else:
                self._num_scored += len(sequences)
                return found
