"""What a rank is doing and how it fails: role, phase, and the last words that become the error record.

Any thread may fail; the first failure counts. A thread of its own writes the record (a shared filesystem may hang),
then the main thread ends MPI, and if that does not happen in time, the process ends itself: the world follows within
seconds.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType

from pekoe.launch.error_record import ErrorRecord, describe, stacks_in, write_record
from pekoe.launch.start_up_times import StartUpTimes
from pekoe.launch.stop_signals import EXIT_FAILURE
from pekoe.launch.supervisor import Reports
from pekoe.pipeline.observe import stacks
from pekoe.pipeline.observe.phases import ThreadPhases
from pekoe.pipeline.run_directory import RunDirectory

logger = logging.getLogger(__name__)

CLAIM_SECONDS = 0.5
"""A failing rank waits this long before it claims the record: if its error is the consequence of a killed peer, that
peer's supervisor has claimed it by then."""
EXIT_SECONDS = 2.0
"""How long after the record the main thread may take to end MPI before the process just exits."""


class RankState:
    """One per process. All methods may be called from any thread."""

    def __init__(self, rank: int, host: str, reports: Reports | None = None, abort_seconds: float = 5.0) -> None:
        self.rank = rank
        self.host = host
        self.reports = reports or Reports()
        self.abort_seconds = abort_seconds
        self.role = ""
        self.phase = "start"
        self.phase_since = time.monotonic()
        self.start_up = StartUpTimes()
        self.threads = ThreadPhases()
        """What the threads of the roles do; `phase` is of all of them together then."""
        self.log = ""
        self.run: RunDirectory | None = None
        self.attempt = 0
        self.failed = threading.Event()
        self.recorded = threading.Event()
        """The record of this failure is written, or is known to be impossible."""
        self.exit_code = 1
        """Of the failure."""
        self.on_failure: Callable[[], None] | None = None
        """Wakes the main thread."""
        self.end_process: Callable[[], None] = self.exit_now
        """How the main thread ends the process after a failure."""
        self._lock = threading.Lock()
        self._order = threading.Lock()
        """Held while a thread's phase becomes part of the rank's: the newest text must be the last."""
        self.reports.tell(rank=rank)

    def set_role(self, role: str) -> None:
        self.role = role
        self.reports.tell(role=role)

    def set_phase(self, phase: str) -> None:
        """Repeating the current phase keeps its start time."""
        with self._lock:
            if phase == self.phase:
                return
            self.phase = phase
            self.phase_since = time.monotonic()
        self.start_up.enter(phase)
        self.reports.tell(phase=phase)

    def set_thread_phase(
        self, who: str, phase: str, limit: float | None, on: Sequence[int], moved: float | None
    ) -> None:
        """What one thread does, for how many seconds at most, on which ranks it waits, when it got on last."""
        with self._order:
            self.set_phase(self.threads.set(who, phase, limit, on, moved))
        ended = self.start_up.thread_enters(who, phase)
        if ended is not None:
            logger.info(ended)

    def set_run(self, run: RunDirectory, attempt: int, log: str = "") -> None:
        """From now on a failure is recorded in this run directory; `log` is relative to it."""
        self.run, self.attempt, self.log = run, attempt, log
        self.reports.tell(run=str(run.path), attempt=attempt, log=log)

    def catch_everything(self) -> None:
        """Uncaught exceptions of the main thread and of all others end here; a signal shows the stacks of all."""

        def main_thread(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.end(error)

        def other_thread(arguments: threading.ExceptHookArgs) -> None:
            if arguments.exc_value is not None and not means_success(arguments.exc_value):
                self.fail(arguments.exc_value, arguments.thread.name if arguments.thread else "")

        stacks.answer_signal()
        sys.excepthook = main_thread
        threading.excepthook = other_thread

    def fail(self, error: BaseException, thread: str = "") -> None:
        """Begins the end and returns at once; only the first failure of the process counts."""
        with self._lock:
            if self.failed.is_set():
                return
            self.exit_code = int(getattr(error, "exit_code", 1))
            self.failed.set()
        line, trace = describe(error)
        record = ErrorRecord(
            attempt=self.attempt, rank=self.rank, host=self.host, role=self.role, phase=self.phase,
            phase_seconds=time.monotonic() - self.phase_since, error=line, traceback=trace,
            thread=thread or threading.current_thread().name, pid=os.getpid(), log=self.log, stacks=stacks_in(error),
            code=self.exit_code or EXIT_FAILURE,
        )  # fmt: skip
        threading.Thread(target=self._last_words, args=(record,), name="last-words", daemon=True).start()
        deadline = threading.Timer(self.abort_seconds, os._exit, (self.exit_code or EXIT_FAILURE,))
        deadline.daemon = True
        deadline.start()
        if self.on_failure is not None:
            self.on_failure()

    def end(self, error: BaseException) -> None:
        """`fail`, then ends the process when the record is written; for the main thread."""
        self.fail(error)
        self.recorded.wait(self.abort_seconds)
        self.end_process()

    def exit_now(self) -> None:
        """Ends the process without teardown; the process manager ends the world."""
        flush_streams()
        os._exit(self.exit_code or EXIT_FAILURE)

    def _last_words(self, record: ErrorRecord) -> None:
        with suppress(OSError):
            print(f"pekoe: {record.sentence()}\n{record.traceback}", file=sys.stderr, flush=True)
        try:
            if self.run is not None:
                if self.reports.supervised:
                    time.sleep(CLAIM_SECONDS)
                write_record(self.run, record)
        finally:
            self.reports.tell(explained=True)
            self.recorded.set()
            time.sleep(EXIT_SECONDS)
            self.exit_now()


def flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


def means_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and not error.code
