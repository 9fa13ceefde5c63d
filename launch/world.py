"""The MPI world of one attempt, as one rank sees it.

    main thread:   join ─► share (start-up values) ─► serve(done): post office, heartbeats, watchdog ─► finalize
    worker threads: what the run does; they talk over `post` and set `done` at the end

The main thread alone calls MPI; in `serve` it never blocks over 0.1 s and burns no core. An uncaught exception in any
thread ends the whole world: the record is written, then MPI_Abort. At the end every rank says Leaving and keeps
pumping until the head says Farewell, since MPI_Finalize would spin while it waits for a slower rank.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pekoe.launch import environment, mpi_transport
from pekoe.launch.environment import Facts
from pekoe.launch.error_record import record_path
from pekoe.launch.exchange import LONGEST_PAUSE, SHORTEST_PAUSE, Exchange
from pekoe.launch.fence import Fence
from pekoe.launch.pulse import Pulse
from pekoe.launch.rank_state import RankState, flush_streams, means_success
from pekoe.launch.rendezvous import LOOPBACK, listen, own_address
from pekoe.launch.shared_memory import mapped_files
from pekoe.launch.stack_requests import StackRequests
from pekoe.launch.stop_signals import EXIT_CONFIGURATION, EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE, StopSignals
from pekoe.pipeline.messages import Farewell, Leaving, Post, SignalReceived
from pekoe.pipeline.observe.progress_watch import ProgressWatch, StalledRoleError
from pekoe.pipeline.run_directory import RunDirectory

if TYPE_CHECKING:
    from mpi4py import MPI

    from pekoe.launch.postoffice import PostOffice

DUTY_SECONDS = 0.1
FINALIZE_SECONDS = 5.0


class WorldSizeError(ValueError):
    """MPI, the process manager and the allocation do not agree on the number of ranks."""

    exit_code = EXIT_CONFIGURATION


@dataclass(frozen=True)
class WorldSettings:
    """Times of a world in seconds; see the `cluster` keys of the same names."""

    heartbeat_seconds: float = 2.0
    silence_seconds: float = 120.0
    abort_seconds: float = 5.0
    grace_seconds: float = 60.0
    setup_seconds: float = 600.0
    """Limit for MPI_Init, and for the other ranks to leave once the head has left."""


class World:
    """Made by `join`; use it as a context manager, so that SystemExit counts as a failure too."""

    def __init__(
        self, communicator: MPI.Intracomm, post: PostOffice, places: Sequence[tuple[str, int]], facts: Facts,
        state: RankState, signals: StopSignals, settings: WorldSettings,
    ) -> None:  # fmt: skip
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()
        self.facts = facts
        self.hosts = tuple(host for host, _ in places)
        """Host of each rank."""
        self.pids = tuple(pid for _, pid in places)
        """Process of each rank on its host."""
        self.post: Post = post
        self.address = LOOPBACK if len(set(self.hosts)) == 1 else own_address()
        """Under which the other ranks reach this one: loopback when all are on one host."""
        self.job_id = facts.job_id
        self.attempt = state.attempt
        self.state = state
        self.settings = settings
        self.stop_requested = signals.requested
        """A stop signal came to this rank (on the head: to any rank)."""
        self.gauges: Callable[[], dict[str, float]] | None = None
        """Called for each heartbeat, from the main thread."""
        self.version = 0
        self.ends_at: float | None = None
        """When the job ends, seconds since 1970, as the head reckons; None: not known."""
        self._office = post
        self._communicator = communicator
        self._exchange = Exchange(communicator, self._end_if_failed, settings.setup_seconds)
        self._signals = signals
        self._checks: list[Callable[[], None]] = []
        self.watches: list[ProgressWatch] = []
        self._over = threading.Event()
        self._told_head = False
        self._next_duty = 0.0
        self._pause = 0.0
        self._fence: Fence | None = None
        self._leaving: set[int] = set()
        self._farewell = False
        self._inbox = post.inbox(SignalReceived, Leaving, Farewell)
        self._pulse = Pulse(self)
        self._stacks = StackRequests(self)

    @classmethod
    def join(
        cls, world_size: int, settings: WorldSettings | None = None, *, facts: Facts | None = None,
        state: RankState | None = None, signals: StopSignals | None = None,
    ) -> World:  # fmt: skip
        """Starts MPI (main thread, once). WorldSizeError unless MPI, the environment and `world_size` name one
        number."""
        settings = settings or WorldSettings()
        facts = facts or environment.read(os.environ)
        state = state or RankState(facts.rank, facts.host)
        state.abort_seconds = settings.abort_seconds
        state.catch_everything()
        if facts.size != world_size:
            raise WorldSizeError(environment.wrong_size(world_size, facts))
        state.set_phase("mpi init")
        state.reports.limit(settings.setup_seconds)
        state.reports.tell(grace=settings.grace_seconds + settings.abort_seconds)
        communicator = _start_mpi(facts.launcher)
        state.reports.tell(shared_memory=mapped_files())
        state.set_phase("joining")
        if communicator.Get_size() != world_size:
            raise WorldSizeError(
                f"MPI found a world of {communicator.Get_size()} ranks but {facts.launcher} started {facts.size}: "
                "the MPI library does not speak to this launcher (srun --mpi=pmi2 for MPICH, --mpi=pmix for Open MPI)"
            )
        from pekoe.launch.postoffice import PostOffice

        if signals is None:
            signals = StopSignals()
            signals.install()
        signals.claim()
        places = communicator.allgather((facts.host, os.getpid()))
        facts = _with_neighbours(facts, [host for host, _ in places])
        world = cls(communicator, PostOffice(communicator), places, facts, state, signals, settings)
        state.on_failure = world._office.wake.set
        state.end_process = world._abort_mpi
        signals.on_first(world._start_deadman)
        atexit.register(world._at_exit)
        os.register_at_fork(before=world._warn_of_fork)
        state.set_phase("joined")
        return world

    @property
    def num_hosts(self) -> int:
        return len(set(self.hosts))

    def begin_attempt(self, run: RunDirectory, attempt: int, log: str = "") -> None:
        """Heartbeats and the error record go to this run directory from now on."""
        self.attempt = attempt
        self._fence = Fence(run, attempt)
        self.state.set_run(run, attempt, log)
        self._pulse.open_files(run, attempt)

    def check_newest(self) -> None:
        """Before a write that counts: SupersededError if a newer attempt of the run has begun, or is about to."""
        if self._fence is not None:
            self._fence.check()

    def listen(self) -> tuple[socket.socket, str]:
        """A socket that listens on a port of the kernel's choice, and its `host:port` for the other ranks."""
        return listen(self.num_hosts)

    def set_role(self, role: str) -> None:
        self.state.set_role(role)

    def set_phase(self, phase: str) -> None:
        """What this rank is doing now, for heartbeats and error records; any thread."""
        self.state.set_phase(phase)

    def set_thread_phase(
        self, who: str, phase: str, limit: float | None = None, on: Sequence[int] = (), moved: float | None = None
    ) -> None:
        """What one thread is doing now, for how many seconds at most (without progress since `moved`, monotonic, where
        given), and on which ranks it waits."""
        self.state.set_thread_phase(who, phase, limit, on, moved)

    def set_version(self, version: int) -> None:
        """Version of the weights that this rank holds."""
        self.version = version

    def add_check(self, check: Callable[[], None]) -> None:
        """`check()` runs in the main thread about every second while serving; what it raises ends the world."""
        self._checks.append(check)

    def add_watch(self, watch: ProgressWatch) -> None:
        """Looked at about every second while serving; one that has stalled ends the world with StalledRoleError."""
        self.watches.append(watch)

    def stacks_of(self, ranks: Sequence[int], seconds: float = 2.0) -> dict[int, str]:
        """What the threads of these ranks are doing: Python stacks, or why they are not known. Any thread; takes at
        most about so many seconds, and some more where a rank does not answer."""
        return self._stacks.ask(ranks, seconds)

    def last_words(self, rank: int) -> str:
        """What was heard last of a rank, for people."""
        return self._pulse.last_words(rank)

    def peer_failed(self) -> bool:
        """Has any rank of this attempt failed? Then a stop signal is the teardown: start nothing collective. Looks at
        the run directory: not for the main thread."""
        run = self.state.run
        return self.state.failed.is_set() or (run is not None and record_path(run, self.attempt).exists())

    def run_checks(self) -> None:
        self._signals.claim()
        for watch in self.watches:
            watch.look()
            if watch.is_stalled:
                raise self._stalled(watch)
        for check in self._checks:
            check()

    def start(self, name: str, target: Callable[[], object]) -> None:
        """Runs `target` in a daemon thread; an exception or a non-zero SystemExit in it ends the world."""

        def work() -> None:
            try:
                target()
            except BaseException as error:
                if not means_success(error):
                    self.state.fail(error, name)

        threading.Thread(target=work, name=name, daemon=True).start()

    def share(self, value: Any, root: int = 0) -> Any:
        """Start-up only, all ranks, main thread: everyone gets the root's value (what JSON can hold, at most 1 MiB).

        TimeoutError when the root takes longer than `cluster.setup_seconds`.
        """
        return self._exchange.share(value, root)

    def collect(self, value: Any) -> list[Any]:
        """Start-up only, all ranks, main thread: everyone gets the values of all ranks, by rank (each at most 1 MiB,
        together at most 16 MiB).

        TimeoutError when a rank takes longer than `cluster.setup_seconds`.
        """
        return self._exchange.collect(value)

    def serve(self, done: threading.Event) -> None:
        """The main thread's loop until `done` is set by a worker. Does not return from a failure: it aborts the
        world."""
        self._pulse.listen_from_now()
        while not done.is_set():
            self._turn()

    def finalize(self, code: int = EXIT_DONE) -> None:
        """Orderly end of all ranks: last messages go out, then MPI_Finalize. `code` is this rank's exit code."""
        self.set_phase("leaving")
        self._pulse.send()
        self.post.send(0, Leaving())
        deadline = time.monotonic() + self.settings.setup_seconds
        while not self._farewell:
            self._turn()
            self._hear_ranks()
            if self.rank == 0 and len(self._leaving) == self.size:
                for rank in range(1, self.size):
                    self.post.send(rank, Farewell())
                self._farewell = True
            if self.rank == 0 and time.monotonic() > deadline:
                missing = sorted(set(range(self.size)) - self._leaving)
                raise TimeoutError(
                    f"ranks {missing} did not leave within {self.settings.setup_seconds} s: "
                    f"{self._pulse.phases(missing)}"
                )
        self._office.part(self.settings.abort_seconds)
        self._pulse.close()
        self.set_phase("ended")
        self.state.reports.ended(code)
        hung = threading.Timer(FINALIZE_SECONDS, self._leave_hung_finalize, (code,))
        hung.daemon = True
        hung.start()
        _finish_mpi()
        hung.cancel()
        self._over.set()

    def abort(self, error: BaseException, thread: str = "") -> None:
        """Ends the whole world with the first failure's record and exit code; does not return."""
        self.state.fail(error, thread)
        if threading.current_thread() is threading.main_thread():
            self._abort_mpi()
        threading.Event().wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not means_success(error):
            self.abort(error)
        elif not self._over.is_set():
            self.finalize()

    def pump(self) -> bool:
        """One turn of the post office; True if anything moved. Main thread."""
        self._end_if_failed()
        return self._office.pump()

    def _stalled(self, watch: ProgressWatch) -> StalledRoleError:
        doing = self.state.threads.of(watch.who) or self.state.phase
        return StalledRoleError(
            f"{watch.who} on rank {self.rank} ({self.state.role or 'no role yet'}, {self.state.host}) has work but has "
            f"made no progress for {watch.stalled_seconds:.0f} s (cluster.progress_seconds is {watch.limit:g}), "
            f"in phase {doing!r}",
            self.stacks_of([self.rank]),
        )

    def _turn(self) -> None:
        moved = self.pump()
        now = time.monotonic()
        if now >= self._next_duty:
            self._next_duty = now + DUTY_SECONDS
            self._do_duties(now)
        if moved:
            self._pause = 0.0
            return
        self._pause = min(max(self._pause * 2, SHORTEST_PAUSE), LONGEST_PAUSE)
        self._office.wake.wait(self._pause)

    def _do_duties(self, now: float) -> None:
        number = self._signals.first
        if number is not None and not self._told_head:
            self._told_head = True
            self.post.send(0, SignalReceived(number))
        self._hear_ranks()
        self._stacks.serve()
        self._pulse.beat(now)

    def _hear_ranks(self) -> None:
        """Of signals, and of who leaves."""
        while not self._inbox.empty():
            source, message = self._inbox.get()
            if isinstance(message, SignalReceived):
                self._signals.request(message.signal)
            elif isinstance(message, Leaving):
                self._leaving.add(source)
            else:
                self._farewell = True

    def _end_if_failed(self) -> None:
        if self.state.failed.is_set():
            self._abort_mpi()

    def _abort_mpi(self) -> None:
        self.state.recorded.wait(self.settings.abort_seconds)
        flush_streams()
        self._communicator.Abort(self.state.exit_code or EXIT_FAILURE)

    def _start_deadman(self, number: int) -> None:
        """The thread first: printing may hang with the filesystem of the log."""
        threading.Thread(target=self._deadman, name="deadman", daemon=True).start()
        print(f"pekoe: rank {self.rank}: signal {number}: stopping at the next boundary", file=sys.stderr, flush=True)

    def _deadman(self) -> None:
        if self._over.wait(self.settings.grace_seconds):
            return
        print(
            f"pekoe: rank {self.rank}: not over {self.settings.grace_seconds} s after the stop signal, in phase "
            f"{self.state.phase!r}; ending now", file=sys.stderr, flush=True,
        )  # fmt: skip
        faulthandler.dump_traceback(all_threads=True)
        code = EXIT_FAILURE if self._peer_failed_within(1.0) else EXIT_REQUEUE
        self.state.reports.ended(code)
        flush_streams()
        os._exit(code)

    def _peer_failed_within(self, seconds: float) -> bool:
        """`peer_failed`, asked by a thread of its own: a filesystem that hangs means no."""
        found = threading.Event()

        def look() -> None:
            if self.peer_failed():
                found.set()

        threading.Thread(target=look, name="peer-failed", daemon=True).start()
        return found.wait(seconds)

    def _leave_hung_finalize(self, code: int) -> None:
        print(f"pekoe: MPI_Finalize did not return in {FINALIZE_SECONDS} s; leaving", file=sys.stderr, flush=True)
        flush_streams()
        os._exit(code)

    def _at_exit(self) -> None:
        if not self._over.is_set() and not self.state.failed.is_set():
            self.abort(RuntimeError("the rank's program ended without leaving the world"))

    def _warn_of_fork(self) -> None:
        if not self._over.is_set():
            warnings.warn(
                "fork after MPI_Init: the child shares registered memory; "
                "start processes before World.join, by forkserver or exec",
                RuntimeWarning, stacklevel=2,
            )  # fmt: skip


def _with_neighbours(facts: Facts, hosts: Sequence[str]) -> Facts:
    """Counts the ranks of this host where the environment does not say how many there are."""
    if facts.local_size is not None:
        return facts
    here = [rank for rank, host in enumerate(hosts) if host == hosts[facts.rank]]
    return replace(facts, local_rank=here.index(facts.rank), local_size=len(here))


def _start_mpi(launcher: str) -> MPI.Intracomm:
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    if not MPI.Is_initialized():
        os.environ.update(mpi_transport.variables(os.environ, launcher, MPI.Get_library_version()))
        MPI.Init_thread(MPI.THREAD_FUNNELED)
    if MPI.Query_thread() < MPI.THREAD_FUNNELED:
        raise RuntimeError("MPI gives less than thread level FUNNELED: worker threads are not safe with this library")
    return MPI.COMM_WORLD


def _finish_mpi() -> None:
    from mpi4py import MPI

    MPI.Finalize()
