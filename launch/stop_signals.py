"""SIGTERM, SIGUSR2 and SIGHUP mean: stop at the next boundary. A thread hears them at once.

The interpreter writes each signal's number into a pipe (`signal.set_wakeup_fd`), even while the main thread is busy in
C code; a thread reads it, sets `requested` and starts the deadman. Setting an Event in a Python signal handler could
deadlock on the Event's own lock.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE, EXIT_CONFIGURATION = 0, 1, 75, 78
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)


class StopSignals:
    """Installed once per rank, by its main thread, before anything heavy is imported."""

    def __init__(self) -> None:
        self.requested = threading.Event()
        """Set by the first signal; more signals change nothing."""
        self.first: int | None = None
        """Number of the first signal."""
        self._on_first: list[Callable[[int], None]] = []
        self._lock = threading.Lock()

    def install(self) -> None:
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        self.claim()
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(read_end,), name="stop-signals", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def claim(self) -> None:
        """Takes the handlers (again): libraries put theirs in place, as MPICH's libfabric does for SIGHUP. Main thread
        only."""
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)

    def on_first(self, action: Callable[[int], None]) -> None:
        """`action(signal number)` runs once, in the listening thread (or here, if the signal has come already)."""
        with self._lock:
            if self.first is None:
                self._on_first.append(action)
                return
        action(self.first)

    def request(self, number: int) -> None:
        """As if the signal had come to this process: another rank got it."""
        with self._lock:
            if self.first is not None:
                return
            self.first = number
            actions, self._on_first = self._on_first, []
        self.requested.set()
        for action in actions:
            action(number)

    def _listen(self, read_end: int) -> None:
        while data := os.read(read_end, 4096):
            for number in data:
                if number in STOP_SIGNALS:
                    self.request(number)
