"""Starts a world inside an allocation with srun or the site's mpiexec, watches it, and says how it ended.

    driver (batch shell, first node) ─► srun / mpiexec ─► on each node: supervisor ─► rank
        signals ──► SIGUSR2 to srun, and a file for the head          (`stop_request`)
        watches ──► the launcher's end, the error record, limits
        ends    ──► SIGTERM to the launcher (srun kills its step), scancel of the step, SIGKILL

SIGTERM to srun kills the step at once, so that no signal is passed on to it as it came. Ranks exit 0 after an orderly
end; the true code is in the head's note, a failure in its record (`world_end`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pekoe.launch import environment, terminal
from pekoe.launch.attempts import first_directory
from pekoe.launch.error_record import ErrorRecord, record_path, write_record
from pekoe.launch.job_steps import end_world_steps
from pekoe.launch.stop_request import request_stop
from pekoe.launch.stop_signals import STOP_SIGNALS
from pekoe.launch.supervisor import DRIVEN
from pekoe.launch.world_end import heartbeats_of, noted_code, verdict
from pekoe.pipeline.run_directory import RunDirectory

POLL_SECONDS = 0.1
LOOK_SECONDS = 1.0
"""Between two looks at the run directory."""
END_SECONDS = 3.0
"""On top of cluster.abort_seconds: how long a world with an error record may take to end by itself."""
LEAVE_SECONDS = 30.0
"""From the head's orderly end to that of the launcher, which waits for ever for a node whose slurmstepd was killed."""
KILL_SECONDS = 4.0
"""From one way to end a world to the next, harder one."""
FORWARDED = (*STOP_SIGNALS, signal.SIGINT)


@dataclass(frozen=True)
class Limits:
    """Seconds that the launcher gives a world."""

    start: float
    """Until the first rank is heard."""
    failed: float
    """From the error record to the end."""
    stop: float
    """From the first stop signal to the end."""


@dataclass(frozen=True)
class StepStart:
    """What to start."""

    run: RunDirectory
    attempt: int
    command: tuple[str, ...]
    """srun or mpiexec with everything after it."""
    launcher: str
    """`srun` or `mpiexec`."""
    job: str
    """Slurm's id of the job that it runs in."""
    limits: Limits
    variables: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment."""
    on_terminated: Callable[[], None] = lambda: None
    """Called once when SIGTERM has come, after the ranks were told: Slurm kills this process soon. Takes seconds at
    most."""


def step_environment(inherited: Mapping[str, str], start: StepStart) -> dict[str, str]:
    """Of the launcher, hence of the ranks: the run's code snapshot comes before every install, then the directory that
    the run was first started from."""
    kept = environment.for_step(inherited)
    code = str(start.run.code.resolve()) if start.run.code.is_dir() else None
    parts = [part for part in (code, first_directory(start.run), inherited.get("PYTHONPATH")) if part]
    if parts:
        kept["PYTHONPATH"] = os.pathsep.join(parts)
    return {**kept, **start.variables, DRIVEN: "1"}


class StepWorld:
    """One world under way. Main thread only, since it takes the signal handlers."""

    def __init__(self, start: StepStart) -> None:
        self.start = start
        self.began = time.monotonic()
        self.pending: int | None = None
        """The first stop signal, until it has reached the ranks."""
        self.terminated = False
        """SIGTERM came: Slurm or somebody ends the job itself."""
        self.interrupts = 0
        self._stop_since: float | None = None
        self._told_terminated = False
        self._failed_since: float | None = None
        self._noted_since: float | None = None
        self._is_hung = False
        self._heard = False
        self._next_look = 0.0
        self._handlers = {number: signal.signal(number, self._on_signal) for number in FORWARDED}
        self._process = subprocess.Popen(
            start.command, env=step_environment(os.environ, start), stdin=subprocess.DEVNULL, start_new_session=True
        )

    @property
    def stopped(self) -> bool:
        """A stop signal came."""
        return self._stop_since is not None

    def wait(self) -> int:
        """The exit code (0, 75, 78 or 1); nothing of the world is left on any node that Slurm reaches."""
        try:
            while self._process.poll() is None:
                time.sleep(POLL_SECONDS)
                self._deliver()
                if time.monotonic() >= self._next_look:
                    self._next_look = time.monotonic() + LOOK_SECONDS
                    self._look()
        finally:
            self._tell_terminated()
            self._end()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        start, code = self.start, self._process.returncode
        if self._is_hung and all(beat.heartbeat.phase == "ended" for beat in heartbeats_of(start.run, start.attempt)):
            code = 0
        return verdict(start.run, start.attempt, start.launcher, code, self.stopped)

    def _on_signal(self, number: int, frame: object) -> None:
        self.terminated = self.terminated or number == signal.SIGTERM
        if number == signal.SIGINT:
            self.interrupts += 1
        if self._stop_since is None:
            self._stop_since = time.monotonic()
            self.pending = signal.SIGUSR2 if number == signal.SIGINT else number

    def _deliver(self) -> None:
        """Once. A file finds also a head that is not there yet; srun is asked when ranks are there to hear."""
        if self.interrupts > 1:
            self._record("ended at once by the user (second Ctrl-C), without a checkpoint of the last steps; continue "
                         f"with `pekoe run --resume {self.start.run.path}`")  # fmt: skip
            self._end()
        if self.pending is not None:
            number, self.pending = self.pending, None
            terminal.say(f"signal {number}: stopping: the step ends, a checkpoint is written")
            with contextlib.suppress(OSError):
                request_stop(self.start.run, self.start.attempt, number)
            if self.start.launcher == "srun" and self._is_heard():
                self._process.send_signal(signal.SIGUSR2)
        self._tell_terminated()

    def _tell_terminated(self) -> None:
        if self.terminated and not self._told_terminated:
            self._told_terminated = True
            self.start.on_terminated()

    def _look(self) -> None:
        """Ends a world that does not end by itself."""
        now, limits = time.monotonic(), self.start.limits
        if self._failed_since is None and record_path(self.start.run, self.start.attempt).exists():
            self._failed_since = now
        if self._noted_since is None and noted_code(self.start.run, self.start.attempt) is not None:
            self._noted_since = now
        if self._failed_since is not None and now - self._failed_since > limits.failed:
            self._end()
        elif self._noted_since is not None and now - self._noted_since > LEAVE_SECONDS:
            terminal.say(f"{self.start.launcher} has not ended {LEAVE_SECONDS:.0f} s after the head: it is ended now")
            self._is_hung = True
            self._end()
        elif self._stop_since is not None and now - self._stop_since > limits.stop:
            terminal.say(f"the world has not ended {limits.stop:.0f} s after the stop signal: it is ended now")
            self._end()
        elif now - self.began > limits.start and not self._is_heard():
            self._record(f"no rank was heard within {limits.start:.0f} s (cluster.setup_seconds) of the start by "
                         f"{self.start.launcher}")  # fmt: skip
            self._end()

    def _is_heard(self) -> bool:
        self._heard = self._heard or bool(heartbeats_of(self.start.run, self.start.attempt))
        return self._heard

    def _end(self) -> None:
        """Every process of the world dies, on every node; the launcher is reaped. After a good end nothing is done."""
        process = self._process
        if process.poll() == 0:
            return
        if process.poll() is None:
            process.terminate()
            self._wait(KILL_SECONDS)
        end_world_steps(self.start.job)
        if process.poll() is None:
            self._wait(KILL_SECONDS)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def _record(self, text: str) -> None:
        """No rank is to blame."""
        write_record(self.start.run, ErrorRecord(self.start.attempt, -1, socket.gethostname(), "", "start", 0.0, text))
