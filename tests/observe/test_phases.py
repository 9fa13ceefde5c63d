"""Each thread's phase has its own age; shares of waiting lie in [0, 1]; watches know standing still from no work."""

from __future__ import annotations

import random
import threading
import time

import pytest

from pekoe.pipeline.observe.phases import ThreadPhases
from pekoe.pipeline.observe.progress_watch import LONGEST_GAP, ProgressWatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_change_of_one_thread_leaves_the_age_of_another() -> None:
    clock = Clock()
    phases = ThreadPhases(clock)
    assert phases.set("controller", "waiting for the batch", 60.0, [1, 2]) == "controller: waiting for the batch"
    clock.now += 5
    assert phases.set("learner", "training") == "controller: waiting for the batch; learner: training"
    clock.now += 2
    phases.set("controller", "waiting for the batch", 60.0, [2])
    controller, learner = phases.now()
    assert (controller.who, controller.seconds, controller.limit, controller.on) == ("controller", 7.0, 60.0, (2,))
    assert (learner.phase, learner.seconds, learner.limit, learner.on) == ("training", 2.0, None, ())
    phases.set("controller", "control")
    assert phases.now()[0].seconds == 0.0
    assert phases.now()[0].limit is None
    assert (phases.of("learner"), phases.of("nobody")) == ("training", "")


def test_the_time_without_progress_is_told_beside_the_age() -> None:
    clock = Clock()
    phases = ThreadPhases(clock)
    phases.set("a", "waiting for b", 60.0, moved=clock.now - 500)
    clock.now += 30
    assert (phases.now()[0].seconds, phases.now()[0].quiet) == (30.0, 30.0), "at most the age of the phase"
    phases.set("a", "waiting for b", 60.0, moved=clock.now)
    clock.now += 4
    assert (phases.now()[0].seconds, phases.now()[0].quiet) == (34.0, 4.0)
    phases.set("a", "work")
    assert phases.now()[0].quiet is None


def test_the_share_of_waiting_is_of_the_time_since_it_was_asked_for_last() -> None:
    clock = Clock()
    phases = ThreadPhases(clock)
    phases.set("a", "waiting for b")
    clock.now += 3
    phases.set("a", "work")
    clock.now += 1
    assert phases.waiting_shares() == {"a": 0.75}
    clock.now += 1
    phases.set("a", "waiting for c")
    clock.now += 1
    phases.set("a", "waiting for d")
    clock.now += 2
    assert phases.waiting_shares() == {"a": 0.75}
    clock.now += 10
    assert phases.waiting_shares() == {"a": 1.0}
    assert phases.waiting_shares() == {"a": 0.0}, "no time has gone by"


def test_shares_stay_between_0_and_1_and_add_up_under_stress() -> None:
    """Ten thousand changes by three threads, while a fourth asks."""
    phases = ThreadPhases()
    shares: list[float] = []
    over = threading.Event()

    def live(who: str, seed: int) -> None:
        rng = random.Random(seed)
        for step in range(3400):
            phases.set(who, rng.choice(["waiting for x", "waiting for y", "work", f"step {step}"]))
            if step % 50 == 0:
                time.sleep(rng.random() * 1e-3)

    def ask() -> None:
        while not over.is_set():
            shares.extend(phases.waiting_shares().values())
            time.sleep(1e-3)

    began = time.monotonic()
    asker = threading.Thread(target=ask)
    asker.start()
    workers = [threading.Thread(target=live, args=(name, seed)) for seed, name in enumerate("abc")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    over.set()
    asker.join(60)
    assert time.monotonic() - began < 60
    assert len(shares) > 20
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert any(0.0 < share < 1.0 for share in shares)


def watched(clock: Clock, counters: list[tuple[float, bool]], limit: float = 3.0) -> ProgressWatch:
    return ProgressWatch("engine", lambda: counters[-1], limit, clock)


def look(watch: ProgressWatch, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now += 1
        watch.look()


def test_busy_without_progress_is_stalled_after_the_limit() -> None:
    clock = Clock()
    counters = [(5.0, True)]
    watch = watched(clock, counters)
    look(watch, clock, 4)
    assert watch.stalled_seconds == 3.0, "counted from the first look"
    assert not watch.is_stalled
    assert watch.phase().seconds == 3.0
    look(watch, clock, 1)
    assert watch.is_stalled


@pytest.mark.parametrize("news", [(6.0, True), (5.0, False), (4.0, True)])
def test_progress_or_no_work_starts_the_time_again(news: tuple[float, bool]) -> None:
    clock = Clock()
    counters = [(5.0, True)]
    watch = watched(clock, counters)
    look(watch, clock, 4)
    counters.append(news)
    look(watch, clock, 1)
    assert watch.stalled_seconds == 0.0
    assert watch.phase().phase == ("working, last progress" if news[1] else "idle")


def test_work_that_comes_after_a_long_rest_is_not_stalled_at_once() -> None:
    clock = Clock()
    counters = [(5.0, False)]
    watch = watched(clock, counters)
    look(watch, clock, 100)
    counters.append((5.0, True))
    look(watch, clock, 1)
    assert watch.stalled_seconds == 0.0
    look(watch, clock, 1)
    assert watch.stalled_seconds == 1.0


def test_a_process_that_was_stopped_for_an_hour_is_not_blamed() -> None:
    clock = Clock()
    watch = watched(clock, [(5.0, True)], limit=20.0)
    look(watch, clock, 2)
    clock.now += 3600
    watch.look()
    assert watch.stalled_seconds <= 1.0 + LONGEST_GAP


def test_a_counter_that_cannot_be_read_ends_nothing() -> None:
    clock = Clock()

    def read() -> tuple[float, bool]:
        raise RuntimeError("dictionary changed size during iteration")

    watch = ProgressWatch("engine", read, 1.0, clock)
    look(watch, clock, 10)
    assert not watch.is_stalled
