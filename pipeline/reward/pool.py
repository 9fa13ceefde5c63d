"""The pool as a rank sees it: `await pool.score(…)` from any asyncio loop, in any thread.

    score ──Call──► supervisor ──► worker        score waits for its answer; the reader thread delivers it
      ▲                                │
      └── reader thread ◄──Answer──────┘         the reader waits for frames, and for silence that lasts too long

A call waits in the supervisor's queue without limit of its own (the episode has one); from the moment a worker has
it, it is answered or the worker is killed within `timeout_seconds`. So an answer arrives at least that often, or the
pool has failed.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import logging
import math
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pekoe.pipeline.child_processes import end_keeper, start_keeper
from pekoe.pipeline.config.rollout import RewardConfig
from pekoe.pipeline.process_tree import family
from pekoe.pipeline.reward.frames import Answer, Call, Failed, Forget, Setup, Workers, receive_frame, send_frame

WINDOW_CALLS = 200
LEAST_CALLS = 50
SILENCE_SECONDS = 30.0
CLOSE_SECONDS = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Score:
    """What became of one call."""

    value: float
    """The reward; the pool's `error_value` (NaN where that is None) unless the status is `ok`."""
    status: str
    """`ok`, `timeout`, `error` (it raised), `invalid` (no finite number) or `died` (its process ended)."""
    detail: str = ""


class RewardError(Exception):
    """One call failed and no `error_value` stands for it: the episode fails."""


class RewardFailure(Exception):
    """The reward function cannot be used: too many calls fail, or the pool broke. The run must stop."""


class RewardPool:
    """`processes` killable workers behind a supervisor. Start it before MPI is initialised; close it, or use it with
    `with`."""

    def __init__(self, config: RewardConfig, start_seconds: float = 120.0) -> None:
        self._config = config
        self._start_seconds = start_seconds
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Answer]] = {}
        self._pids: Future[tuple[int, ...]] = Future()
        self._failure: RewardFailure | None = None
        self._failed_flags: collections.deque[bool] = collections.deque(maxlen=WINDOW_CALLS)
        self._counters = dict.fromkeys(("calls", "errors", "timeouts", "seconds"), 0.0)
        self._example = ""
        self._last_frame = time.monotonic()
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> RewardPool:
        """Starts the supervisor and returns at once; calls wait until workers are there."""
        config = self._config
        self._process, self._channel = start_keeper("pekoe.pipeline.reward.supervisor", "the reward pool")
        path = tuple(os.path.abspath(entry) for entry in sys.path)
        targets = (config.name,) if config.name else ()
        send_frame(self._channel, Setup(targets, config.processes, config.timeout_seconds, self._start_seconds, path))
        self._last_frame = time.monotonic()
        threading.Thread(target=self._read, args=(self._channel,), name="reward-answers", daemon=True).start()
        return self

    def wait_ready(self) -> tuple[int, ...]:
        """Blocks until every worker has loaded the function; gives the workers' process ids. Raises RewardFailure."""
        return self._pids.result(timeout=self._start_seconds + SILENCE_SECONDS)

    async def score(
        self,
        target: str,
        prompt: str,
        completion: str,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        data: dict[str, Any],
    ) -> Score:
        """Judges one completion with the function named `target`, called with `data` and `reward.args` as keywords.

        Raises RewardFailure when the pool broke or failures exceed `max_error_share`; a failed call itself does not
        raise.
        """
        arguments = (prompt, completion, [int(t) for t in prompt_ids], [int(t) for t in completion_ids])
        payload = pickle.dumps((*arguments, {**data, **self._config.args}))
        number, future = self._submit(target, payload)
        try:
            answer = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._forget(number)
            raise
        self._check_share()
        if answer.status == "ok":
            return Score(answer.value, "ok")
        substitute = self._config.error_value
        return Score(math.nan if substitute is None else substitute, answer.status, answer.detail)

    async def __call__(
        self,
        prompt: str,
        completion: str,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        data: dict[str, Any],
    ) -> float:
        """`score` with the run's function, as a workflow's judge. Raises RewardError where no `error_value` is
        given."""
        score = await self.score(self._config.name, prompt, completion, prompt_ids, completion_ids, data)
        if math.isnan(score.value):
            raise RewardError(f"{score.status}: {score.detail}")
        return score.value

    def gauges(self) -> dict[str, float]:
        """`calls`, `errors` (timeouts included), `timeouts`, `seconds` spent in calls, `waiting`, `error_share`."""
        with self._lock:
            return {**self._counters, "waiting": float(len(self._waiting)), "error_share": self._share()}

    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the supervisor's children now (workers first of all)."""
        process = self._process
        return () if process is None else tuple(sorted(family(process.pid) - {process.pid}))

    def close(self) -> None:
        """Ends the supervisor and with it every worker; pending calls fail."""
        process, channel, self._process = self._process, self._channel, None
        if process is not None and channel is not None:
            end_keeper(process, channel, CLOSE_SECONDS)

    def __enter__(self) -> RewardPool:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, target: str, payload: bytes) -> tuple[int, Future[Answer]]:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._channel is None:
                raise RewardFailure("the reward pool was not started")
            number = next(self._numbers)
            future: Future[Answer] = Future()
            if not self._waiting:
                self._last_frame = time.monotonic()
            self._waiting[number] = future
            with contextlib.suppress(ConnectionError):  # the reader sees the end of the stream and fails the future
                send_frame(self._channel, Call(number, target, payload))
        return number, future

    def _forget(self, number: int) -> None:
        with self._lock:
            if self._waiting.pop(number, None) is not None and self._channel is not None:
                with contextlib.suppress(ConnectionError):
                    send_frame(self._channel, Forget(number))

    def _read(self, channel: socket.socket) -> None:
        """The reader thread: returns when the supervisor is gone."""
        limit = self._config.timeout_seconds + self._start_seconds + SILENCE_SECONDS
        while True:
            if not select.select([channel], [], [], 1.0)[0]:
                if self._waiting and time.monotonic() - self._last_frame > limit:
                    self._fail(f"the supervisor of the reward pool was silent for {limit:g} s")
                continue
            frame = receive_frame(channel)
            self._last_frame = time.monotonic()
            if frame is None:
                self._fail("the supervisor of the reward pool ended")
                channel.close()
                return
            if isinstance(frame, Answer):
                self._deliver(frame)
            elif isinstance(frame, Workers) and not self._pids.done():
                self._pids.set_result(frame.pids)
            elif isinstance(frame, Failed):
                self._fail(frame.detail)

    def _deliver(self, answer: Answer) -> None:
        failed = answer.status != "ok"
        with self._lock:
            future = self._waiting.pop(answer.number, None)
            self._counters["calls"] += 1
            self._counters["errors"] += failed
            self._counters["timeouts"] += answer.status == "timeout"
            self._counters["seconds"] += answer.seconds
            self._failed_flags.append(failed)
            if failed:
                self._example = f"{answer.status}: {answer.detail}"
        if failed:
            logger.warning("reward call failed: %s: %s", answer.status, answer.detail.strip().splitlines()[-1:])
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(answer)

    def _fail(self, detail: str) -> None:
        with self._lock:
            self._failure = self._failure or RewardFailure(detail)
            waiting, self._waiting = self._waiting, {}
            if not self._pids.done():
                self._pids.set_exception(self._failure)
        for future in waiting.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(self._failure)

    def _share(self) -> float:
        return sum(self._failed_flags) / len(self._failed_flags) if self._failed_flags else 0.0

    def _check_share(self) -> None:
        with self._lock:
            share, num_calls, limit = self._share(), len(self._failed_flags), self._config.max_error_share
            if num_calls >= LEAST_CALLS and share > limit:
                raise RewardFailure(
                    f"{share:.0%} of the last {num_calls} reward calls failed (reward.max_error_share {limit:g}); "
                    f"the latest: {self._example}"
                )
