"""Where start-up goes, phase by phase."""

from __future__ import annotations

import logging
import time

import pytest

from pekoe.launch import start_up_times
from pekoe.launch.rank_state import RankState
from pekoe.launch.start_up_times import StartUpTimes


def test_phases_add_up_from_the_start_of_the_process() -> None:
    times = StartUpTimes(began=100.0)
    for phase, now in (("configuration", 101.5), ("mpi init", 102.0), ("configuration", 105.0), ("joined", 105.25)):
        times.enter(phase, now)
    assert times.sentence(105.26) == (
        "start-up took 5.3 s: interpreter and imports 1.5, configuration 0.8, mpi init 3.0"
    )


def test_loads_of_threads_are_timed() -> None:
    times = StartUpTimes(began=0.0)
    assert times.thread_enters("learner", "loading the model", 10.0) is None
    assert times.thread_enters("rollout", "loading the engine", 11.0) is None
    assert times.thread_enters("learner", "loading the model", 12.0) is None
    assert times.thread_enters("learner", "waiting for the head", 14.5) == "learner: loading the model took 4.5 s"
    assert times.thread_enters("learner", "training", 20.0) is None
    assert times.thread_enters("rollout", "rollout", 11.2) is None, "too short to be told"


def test_the_process_has_begun_before() -> None:
    assert 0 < StartUpTimes().began <= time.time()


def test_a_rank_tells_its_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up_times, "SHORT_SECONDS", 0.0)
    state = RankState(0, "h")
    state.set_phase("mpi init")
    assert "interpreter and imports" in state.start_up.sentence()
    with caplog.at_level(logging.INFO):
        state.set_thread_phase("learner", "loading the model", None, (), None)
        state.set_thread_phase("learner", "training", None, (), None)
    assert [record.getMessage() for record in caplog.records] == ["learner: loading the model took 0.0 s"]
