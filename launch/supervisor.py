"""A small parent for each rank that sees its end with its own eyes.

    srun / hydra ──► supervisor (waits, forwards signals) ──► the rank (MPI, workers, …)
                        ▲            reports over a pipe          │
                        └─────────────────────────────────────────┘

The process manager kills all other ranks milliseconds after the first death, so nobody can tell afterwards who was
first. The supervisor can: it learns of the death before the process manager does, and writes the error record with the
phase that the rank reported last. It forks before anything heavy is imported and before MPI starts. Rank and
supervisor die together (PR_SET_PDEATHSIG), and what the rank leaves behind in its process group is killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from pekoe.launch.error_record import END_NOTE, ErrorRecord, record_path, write_record
from pekoe.launch.rank_log import TERMINAL
from pekoe.launch.shared_memory import remove_files
from pekoe.launch.stop_signals import EXIT_FAILURE, EXIT_REQUEUE, STOP_SIGNALS
from pekoe.pipeline import files
from pekoe.pipeline.observe.stacks import dump_by_signal
from pekoe.pipeline.run_directory import RunDirectory

LAUNCH_DIRECTORY = "PEKOE_LAUNCH_DIR"
"""Set by the local launcher: a private folder in which each rank's supervisor notes its pids and its end."""
DRIVEN = "PEKOE_DRIVEN"
"""Set by a launcher that learns the exit code from files: ranks that end in order exit 0 towards the process manager,
which would kill the slower ones of a world that stops with 75."""
FORWARDED = (*STOP_SIGNALS, signal.SIGINT, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1
EARLY_GRACE_SECONDS = 60.0
"""From the stop signal to the end of a rank that has not read its configuration yet."""
LOOK_SECONDS, RARE_LOOK_SECONDS, MANY_RANKS = 1.0, 15.0, 64
"""How often a supervisor looks for another rank's failure on the shared filesystem; from that rank on, rarely."""
EXIT_LIMIT_SECONDS = 15.0
"""From the orderly end of a rank's work to the end of its process."""


class Reports:
    """The rank's end of the pipe. Every method may be called from any thread; without a supervisor they do nothing."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor
        self._facts: dict[str, Any] = {}

    @property
    def supervised(self) -> bool:
        return self._descriptor is not None

    @property
    def has_ended(self) -> bool:
        return "ended" in self._facts

    def tell(self, **facts: Any) -> None:
        """`run`, `attempt`, `rank`, `role`, `phase`, `log`: what an error record would need now."""
        self._facts.update(facts)
        if self._descriptor is not None:
            with suppress(OSError):
                os.write(self._descriptor, (json.dumps(facts) + "\n").encode())

    def limit(self, seconds: float) -> None:
        """The current phase may hold the interpreter's lock (MPI_Init does): after so long the supervisor ends it."""
        self.tell(limit=seconds)

    def ended(self, code: int) -> None:
        """The rank's work is over in an orderly way: whatever its process does from now on, the exit code is this."""
        note_end(int(self._facts.get("rank", 0)), code, orderly=True)
        self.tell(ended=code)


@dataclass
class _Watched:
    """What the supervisor knows of its rank."""

    pid: int
    host: str
    rank: int
    facts: dict[str, Any] = field(default_factory=dict)
    phase_since: float = field(default_factory=time.time)
    unread: bytes = b""
    verdict: str = ""
    """Why the supervisor itself ended the rank."""
    stacks: str = ""
    """Of the rank's threads, when the verdict fell."""
    next_look: float = 0.0
    """At the record of another rank's failure, while MPI starts."""
    signalled_at: float | None = None
    """When the first stop signal came."""

    def read(self, descriptor: int) -> None:
        with suppress(BlockingIOError):
            while data := os.read(descriptor, 65536):
                self.unread += data
        *lines, self.unread = self.unread.split(b"\n")
        for line in lines:
            facts = json.loads(line)
            if "phase" in facts:
                self.phase_since = time.time()
                self.facts.pop("limit", None)
            self.facts.update(facts)

    def record(self, reason: str) -> ErrorRecord:
        return ErrorRecord(
            attempt=int(self.facts.get("attempt", 0)), rank=int(self.facts.get("rank", -1)), host=self.host,
            role=str(self.facts.get("role", "")), phase=str(self.facts.get("phase", "start")),
            phase_seconds=time.time() - self.phase_since, error=reason, pid=self.pid,
            log=str(self.facts.get("log", "")),
            stacks={str(self.facts.get("rank", -1)): self.stacks} if self.stacks else {},
        )  # fmt: skip

    def judge(self) -> None:
        """Ends a rank that cannot end itself: stuck in a limited phase, a peer failed meanwhile, or deaf to a stop
        signal."""
        now = time.time()
        limit, grace = self.facts.get("limit"), self.facts.get("grace", EARLY_GRACE_SECONDS)
        if "ended" in self.facts:
            if now - self.phase_since > EXIT_LIMIT_SECONDS:
                self.verdict = "its process did not leave after an orderly end"
        elif "explained" in self.facts:
            return
        elif limit is not None and now - self.phase_since > limit:
            self.verdict = f"phase {self.facts.get('phase')!r} took more than {limit} s"
            self.stacks = self._dump()
        elif limit is not None and now >= self.next_look and self._peer_failed():
            self.verdict = "another rank failed"
        elif self.signalled_at is not None and now - self.signalled_at > grace:
            self.verdict = f"not over {grace} s after the stop signal"
            self._dump()
            self.facts["ended"] = EXIT_FAILURE if self._peer_failed() else EXIT_REQUEUE
        if self.verdict:
            os.kill(self.pid, signal.SIGKILL)

    def _peer_failed(self) -> bool:
        self.next_look = time.time() + (LOOK_SECONDS if self.rank < MANY_RANKS else RARE_LOOK_SECONDS)
        run = self.facts.get("run")
        return run is not None and record_path(RunDirectory(Path(run)), int(self.facts.get("attempt", 0))).exists()

    def _dump(self) -> str:
        """Makes the rank write the stacks of its threads into its log."""
        run, log = self.facts.get("run"), self.facts.get("log")
        return dump_by_signal(self.pid, Path(run) / log) if run and log else ""


def supervise(target: Callable[[Reports], int], rank: int) -> NoReturn:
    """Forks: the child runs `target` and exits with what it returns, the parent watches and never returns."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _die_with(parent)
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGUSR1))
        _run_child(target, Reports(write_end))
    os.close(write_end)
    watched = _Watched(pid, socket.gethostname(), rank)
    note_start(rank, parent, pid)
    status = _watch(watched, read_end)
    _kill_group(pid)
    _finish(watched, rank, status)


def note_start(rank: int, supervisor: int, pid: int) -> None:
    """Tells the local launcher, if there is one, which processes a rank has."""
    _note(f"start-{rank}.json", {"supervisor": supervisor, "pid": pid})


def note_end(rank: int, code: int, orderly: bool) -> None:
    """Tells the local launcher, if there is one, how a rank ended; the first word counts."""
    _note(f"end-{rank}.json", {"code": code, "orderly": orderly})


def _note(name: str, facts: dict[str, Any]) -> None:
    folder = os.environ.get(LAUNCH_DIRECTORY)
    if not folder:
        return
    path = Path(folder) / name
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(facts))
    with suppress(FileExistsError):
        os.link(part, path)
    part.unlink()


def _die_with(parent: int) -> None:
    """The kernel kills this process when its parent dies; a parent that is gone already counts."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _run_child(target: Callable[[Reports], int], reports: Reports) -> NoReturn:
    """Never returns into the caller's frames, and skips the interpreter's teardown, which may crash after correct work.

    After an orderly end the C library's `exit` runs: MPICH tells the process manager there that this rank is done.
    """
    code = 1
    try:
        code = target(reports)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    if reports.has_ended:
        ctypes.CDLL(None).exit(code)
    os._exit(code)


def _watch(watched: _Watched, read_end: int) -> int:
    """Reads reports and forwards signals until the rank is dead; returns its wait status."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    for heard in (*FORWARDED, signal.SIGCHLD):
        signal.signal(heard, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    while True:
        ready, _, _ = select.select([wake_read, read_end], [], [], 1.0)
        if wake_read in ready:
            for number in os.read(wake_read, 4096):
                if number in FORWARDED:
                    os.kill(watched.pid, number)
                if number in STOP_SIGNALS and watched.signalled_at is None:
                    watched.signalled_at = time.time()
        if read_end in ready:
            watched.read(read_end)
        done, status = os.waitpid(watched.pid, os.WNOHANG)
        if done:
            watched.read(read_end)
            return status
        if not watched.verdict:
            watched.judge()


def _kill_group(pid: int) -> None:
    """Ends what the dead rank left in its process group (reward processes, compilers)."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _finish(watched: _Watched, rank: int, status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    orderly = "ended" in watched.facts
    if "rank" not in watched.facts:
        watched.facts["rank"] = rank
    if orderly:
        code = int(watched.facts["ended"])
    else:
        remove_files(watched.facts.get("shared_memory", ()))
        reason = watched.verdict or _reason(code)
        code = code if code > 0 else 1
        record = watched.record(reason)
        run = watched.facts.get("run")
        unexplained = write_record(RunDirectory(Path(run)), record) if run else not watched.facts.get("explained")
        if unexplained:
            fresh_line = "\n" if os.environ.get(TERMINAL) else ""
            print(f"{fresh_line}pekoe: {record.sentence()}", file=sys.stderr, flush=True)
    note_end(rank, code, orderly)
    driven = bool(os.environ.get(LAUNCH_DIRECTORY) or os.environ.get(DRIVEN))
    if orderly and driven and rank == 0 and "run" in watched.facts:
        _note_code(RunDirectory(Path(watched.facts["run"])), int(watched.facts.get("attempt", 0)), code)
    os._exit(0 if orderly and driven else code)


def _note_code(run: RunDirectory, attempt: int, code: int) -> None:
    """For the launcher, where the head could not say it itself: refused before there was a world, or deaf."""
    path = run.logs(attempt) / END_NOTE
    if path.exists():
        return
    with suppress(OSError):
        files.write_json(path, {"code": code, "signal": None, "time": time.time()})


def _reason(code: int) -> str:
    if code >= 0:
        return f"the process exited with code {code} without saying why"
    number = -code
    return f"killed by signal {number} ({signal.Signals(number).name})"
