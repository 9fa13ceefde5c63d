"""What the ranks of the test worlds run: `python world_program.py RUN WHAT`. Each WHAT is one way to live or to die."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from pekoe.launch import environment
from pekoe.launch.rank_log import log_path, open_log
from pekoe.launch.rank_state import RankState
from pekoe.launch.stop_signals import EXIT_REQUEUE, StopSignals
from pekoe.launch.supervisor import Reports, supervise
from pekoe.launch.world import World, WorldSettings
from pekoe.pipeline.observe.progress_watch import ProgressWatch
from pekoe.pipeline.run_directory import RunDirectory

OUT = os.fdopen(os.dup(1), "w")
RUN, WHAT = Path(sys.argv[1]), sys.argv[2]
STEADY = WorldSettings(heartbeat_seconds=0.2, silence_seconds=30.0, grace_seconds=30.0, setup_seconds=80.0)
FAST = replace(STEADY, silence_seconds=2.0, grace_seconds=3.0)
SILENT = ("serve", "hold", "hold-not", "nodes", "stall", "stuck-init")
"""Worlds in which somebody falls silent, or does not heed a stop."""
LOGGED = ("asked", "stacks", "hold", "hold-not", "stall")
PATIENT = WorldSettings(heartbeat_seconds=0.2)


def say(**facts: object) -> None:
    """One line of JSON on the first stdout that the test reads."""
    OUT.write(json.dumps(facts) + "\n")
    OUT.flush()


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def boom() -> None:
    raise ValueError("boom in rank 1")


def stand_still() -> None:
    """A thread that is alive and does nothing."""
    threading.Event().wait(60)


def hold_the_lock(seconds: int | None = None) -> None:
    """In C, with the interpreter's lock: no other thread of the process runs. A signal ends the bounded sleep."""
    if seconds is None:
        sum(range(10**12))
    else:
        ctypes.PyDLL(None).sleep(seconds)


def rank_program(reports: Reports) -> int:
    facts = environment.read(os.environ)
    if WHAT == "nodes":
        facts = replace(facts, host=f"node-{facts.rank // 2}")
    state = RankState(facts.rank, facts.host, reports, FAST.abort_seconds)
    state.catch_everything()
    run = RunDirectory(RUN)
    log = log_path(run, 0, facts.rank)
    if WHAT in LOGGED:
        open_log(log, facts.rank, is_head=False)
    state.set_run(run, 0, run.relative(log) if WHAT in LOGGED else "")
    state.set_role("trainer" if facts.rank == 0 else "rollout")
    signals = StopSignals()
    signals.install()
    if WHAT == "import-error" and facts.rank == 1:
        import pekoe.pipeline.no_such_module  # noqa: F401
    if WHAT in ("slow-init", "stuck-init"):
        settings = FAST if WHAT in SILENT else STEADY
        reports.tell(grace=settings.grace_seconds + settings.abort_seconds)
        say(rank=facts.rank, pid=os.getpid())
        if facts.rank == 0:
            wait_for(RUN / "go")
        elif WHAT == "stuck-init":
            time.sleep(90.0)
    expected = 5 if WHAT == "wrong-allocation" else facts.size
    settings = FAST if WHAT in SILENT else STEADY
    if WHAT in ("idle", "sleep", "deaf", "stacks", "asked"):
        settings = PATIENT
    if WHAT == "collect-late":
        settings = WorldSettings(heartbeat_seconds=0.2, setup_seconds=5.0)
    with World.join(expected, settings, facts=facts, state=state, signals=signals) as world:
        world.begin_attempt(RunDirectory(RUN), 0)
        return behave(world)


def behave(world: World) -> int:
    done = threading.Event()
    victim = world.rank == 1
    world.set_phase("working")
    if WHAT == "main-while-barrier":
        if victim:
            time.sleep(0.3)
            boom()
        world._communicator.Barrier()
    elif WHAT == "main" and victim:
        boom()
    elif WHAT == "thread" and victim:
        world.start("engine", boom)
    elif WHAT == "foreign-thread" and victim:
        threading.Thread(target=boom, name="stranger").start()
    elif WHAT == "sys-exit" and victim:
        sys.exit(3)
    elif WHAT == "thread-sys-exit" and victim:
        world.start("engine", lambda: sys.exit(3))
    elif WHAT == "os-exit" and victim:
        os._exit(3)
    elif WHAT == "os-exit-0" and victim:
        os._exit(0)
    elif WHAT == "stuck-main" and victim:
        world.start("engine", boom)
        time.sleep(60)
    elif WHAT == "check" and victim:
        world.add_check(boom)
    elif WHAT == "idle":
        before = cpu_seconds()
        world.start("clock", lambda: (time.sleep(5), done.set()))
        world.serve(done)
        say(rank=world.rank, cpu=cpu_seconds() - before)
    elif WHAT == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=victim)
        say(rank=world.rank, child=child.pid)
    elif WHAT in ("stop-all", "stop-head"):
        say(rank=world.rank, pid=os.getpid())
        world.start("waiter", lambda: (world.stop_requested.wait(), say(rank=world.rank, stopped=True)))
        if world.rank == 0 or WHAT == "stop-all":
            world.start("stopper", lambda: (world.stop_requested.wait(), time.sleep(0.3), done.set()))
        else:
            done.set()
        world.serve(done)
        world.finalize(EXIT_REQUEUE)
        return EXIT_REQUEUE
    elif WHAT in ("slow-init", "loading", "crash"):
        say(rank=world.rank, pid=os.getpid(), joined=True)
        world.start("learner", lambda: load_then_stop(world, done))
        world.serve(done)
        world.finalize(EXIT_REQUEUE)
        return EXIT_REQUEUE
    elif WHAT == "clean":
        shared = world.share({"list": [1, 2], "from": world.rank} if world.rank == 0 else None)
        world.start("worker", lambda: (time.sleep(0.1 if victim else 1.0), done.set()))
        world.serve(done)
        collected = world.collect({"rank": world.rank, "text": "é" * world.rank})
        say(rank=world.rank, shared=shared, collected=collected, hosts=world.num_hosts)
        world.finalize()
        return 0
    elif WHAT == "collect-late":
        if not victim:
            world.collect("here")
        time.sleep(60)
    elif WHAT == "collect-large":
        world.collect("x" * (1 << 20))
    elif WHAT == "stall":
        world.set_thread_phase("engine", "decoding", 2.0)
        world.start("engine", stand_still)
        ticks = itertools.count()
        world.add_watch(ProgressWatch("engine", lambda: (0.0 if victim else next(ticks), True), 2.0))
        world.add_watch(ProgressWatch("idler", lambda: (0.0, False), 0.5))
    elif WHAT == "asked":
        world.set_thread_phase("worker", "waiting for tea", 1800.0, [2])
        world.start("worker", stand_still)
    elif WHAT == "phases":
        world.set_thread_phase("slow", "waiting for rank 1", 30.0, [1])
        world.add_watch(ProgressWatch("watched", lambda: (1.0, True), 60.0))
        world.start("quick", lambda: step_for_ever(world))
    elif WHAT == "hold" and victim:
        world.add_check(hold_the_lock)
    elif WHAT == "stacks":
        world.set_thread_phase("worker", "waiting for tea", on=[2])
        world.start("worker", stand_still)
        if world.rank == 2:
            once = iter((30,))
            world.add_check(lambda: hold_the_lock(next(once, 0)))
        if world.rank == 0:
            world.start("asker", lambda: ask_for_stacks(world))
        world.start("end", lambda: (wait_for(RUN / "asked"), done.set()))
        world.serve(done)
        world.finalize()
        return 0
    elif WHAT == "nodes" and world.rank == 0:
        world.add_check(lambda: tell_what_was_heard(world))
    elif WHAT == "killed-survivor-fails":
        world.start("watcher", lambda: fail_after_peer(world))
    say(rank=world.rank, pid=os.getpid())
    world.serve(done)
    return 0


def load_then_stop(world: World, done: threading.Event) -> None:
    """Looks at the signal when everything is loaded; saves unless the stop is the teardown of a world that failed."""
    time.sleep(1.0)
    world.stop_requested.wait()
    time.sleep(0.5)
    if world.peer_failed():
        say(rank=world.rank, saves=False)
        return
    say(rank=world.rank, saves=True)
    done.set()


def step_for_ever(world: World) -> None:
    for step in itertools.count():
        world.set_thread_phase("quick", f"step {step}")
        time.sleep(0.05)


def ask_for_stacks(world: World) -> None:
    time.sleep(2.5)
    began = time.monotonic()
    stacks = world.stacks_of([0, 1, 2, 1])
    say(stacks=stacks, seconds=time.monotonic() - began)
    (RUN / "asked").touch()


def tell_what_was_heard(world: World) -> None:
    say(heard={rank: heartbeat.counter for rank, heartbeat in world._pulse.newest.items()})


def fail_after_peer(world: World) -> None:
    """Rank 0 raises the moment rank 1 dies, as a collective over a broken connection does."""
    pid = int((RUN / "victim").read_text()) if world.rank == 0 and wait_for(RUN / "victim") else 0
    while world.rank == 0 and Path(f"/proc/{pid}/task").exists():
        time.sleep(0.0005)
    if world.rank == 0:
        raise ConnectionError("peer closed the connection")


def wait_for(path: Path) -> bool:
    while not path.exists():
        time.sleep(0.01)
    return True


if __name__ == "__main__":
    if len(sys.argv) > 3 and sys.argv[3] == "bare":
        sys.exit(rank_program(Reports()))
    supervise(rank_program, environment.read(os.environ).rank)
