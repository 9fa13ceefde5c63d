"""The calls of a rank that its engine's process has not answered yet."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pekoe.pipeline.rollout.child.protocol import Answer


class CallTable:
    """Numbers calls and gives each its answer, or all of them the error that ended the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._make_error: Callable[[], Exception] | None = None

    @property
    def is_over(self) -> bool:
        """No call is taken any more."""
        return self._make_error is not None

    def open(self) -> tuple[int, Future[Any]]:
        """A new call. Raises what `end` was given once that was called."""
        with self._lock:
            if self._make_error is not None:
                raise self._make_error()
            number = next(self._numbers)
            future: Future[Any] = Future()
            self._waiting[number] = future
            return number, future

    def answer(self, answer: Answer) -> None:
        """Nobody may be waiting for it any more."""
        with self._lock:
            future = self._waiting.pop(answer.number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if answer.error is not None:
            future.set_exception(answer.error.exception())
        else:
            future.set_result(answer.value)

    def forget(self, number: int) -> bool:
        """True when the call was still under way."""
        with self._lock:
            return self._waiting.pop(number, None) is not None

    def refuse(self, make_error: Callable[[], Exception]) -> bool:
        """From now on `open` raises; False when it does already."""
        with self._lock:
            if self._make_error is not None:
                return False
            self._make_error = make_error
            return True

    def fail_waiting(self) -> None:
        """Everything under way ends with the error that `refuse` was given."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        assert self._make_error is not None
        for future in waiting.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(self._make_error())
