"""Status names who stands still and who waits for whom, readable for worlds of four ranks and of a thousand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from pekoe.pipeline.messages import Heartbeat, ThreadPhase
from pekoe.pipeline.observe.status import status
from pekoe.pipeline.observe.waits import ranks_in_words
from pekoe.pipeline.run_directory import RunDirectory

NOW = 1_700_000_000.0


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def put(
    run: RunDirectory, rank: int, *threads: ThreadPhase, age: float = 1.0, ends_at: float | None = None,
    role: str = "", **gauges: float,
) -> None:  # fmt: skip
    beat = Heartbeat(
        rank, role or ("rollout" if rank else "trainer"), f"node-{rank // 2}", 100 + rank, 5, "phase", 1.0, 3,
        {name.replace("__", "/"): value for name, value in gauges.items()}, threads, ends_at,
    )  # fmt: skip
    record = {**msgspec.to_builtins(beat), "attempt": 2, "time": NOW - age}
    (run.heartbeats / f"rank-{rank}.json").write_text(json.dumps(record))


def test_the_chain_of_waits_is_told_in_words(run: RunDirectory) -> None:
    put(
        run, 0, ThreadPhase("controller", "waiting for the training step", 40.0, 1800.0, (0, 1)),
        ThreadPhase("learner", "training", 39.0), ends_at=NOW + 3723,
    )  # fmt: skip
    put(run, 1, ThreadPhase("learner", "waiting for buckets", 38.0, 600.0, (2,)), role="trainer")
    put(run, 2, ThreadPhase("engine", "working, last progress", 350.0, 600.0), age=2.0)
    text = status(run.path, now=NOW)
    assert "attempt 2, 3 ranks (3 alive), the job ends in 1:02:03" in text
    expected = [
        "rank 0 controller waits since 41 s of 1800 s for the training step, on ranks 0-1",
        "  rank 0 learner: training, since 40 s",
        "  rank 1 learner waits since 39 s of 600 s for buckets, on rank 2",
        "    rank 2 engine: working, last progress, since 352 s of 600 s",
        "rank 1 learner waits since 39 s of 600 s for buckets, on rank 2",
        "  rank 2 engine: working, last progress, since 352 s of 600 s",
    ]
    lines = text.splitlines()
    start = lines.index(expected[0])
    assert lines[start : start + len(expected)] == expected
    assert "stalled: rank 2 engine (rollout, node-1): working, last progress, since 352 s of 600 s (over half" in text
    assert re.search(r"5:52 +engine: working, last progress  \(over half of its limit\)", text)
    assert re.search(r"0:41 +controller: waiting for the training step\n +0:40 +learner: training\n", text)


def test_a_silent_rank_is_named_where_somebody_waits_for_it(run: RunDirectory) -> None:
    put(run, 0, ThreadPhase("controller", "waiting for engines to stop", 70.0, 60.0, (1, 7)))
    put(run, 1, ThreadPhase("rollout", "loading weights", 5.0), age=80.0)
    text = status(run.path, now=NOW)
    assert "silent: rank 1 (rollout, node-0) for 80 s" in text
    assert "stalled: rank 0 controller (trainer, node-0): waiting for engines to stop, since 71 s of 60 s (over" in text
    assert "  rank 1 is silent for 80 s; it last said 'phase'" in text
    assert "  no heartbeat of rank 7" in text


def test_waits_in_a_circle_end(run: RunDirectory) -> None:
    put(run, 0, ThreadPhase("a", "waiting for b", 3.0, None, (1,)))
    put(run, 1, ThreadPhase("b", "waiting for a", 3.0, None, (0,)))
    lines = [line.strip() for line in status(run.path, now=NOW).splitlines()]
    assert lines.count("rank 0 a waits since 4 s for b, on rank 1") == 2
    assert lines.count("rank 1 b waits since 4 s for a, on rank 0") == 2


def test_the_oldest_thing_in_flight_and_the_gauges_of_few_ranks(run: RunDirectory) -> None:
    put(run, 0, control__running=12.0)
    put(run, 1, executor__oldest_seconds=41.5, executor__oldest_group=17.0)
    put(run, 2, executor__oldest_seconds=3.25)
    text = status(run.path, now=NOW)
    assert "oldest in flight: group 17 since 42 s, rank 1 executor" in text
    assert re.search(r"control/running +12\n", text)
    assert re.search(r"executor/oldest_seconds +41\.5 +3\.25\n", text)


def test_a_large_world_is_told_in_few_lines(run: RunDirectory) -> None:
    on = tuple(range(1, 1000))
    put(run, 0, ThreadPhase("controller", "waiting for the batch of version 3", 10.0, 1800.0, on))
    for rank in range(1, 1000):
        put(run, rank, ThreadPhase("rollout", "rollout", float(rank)), engine__tokens=float(rank))
    put(run, 500, ThreadPhase("rollout", "publishing a shard", 4.0), age=90.0)
    text = status(run.path, now=NOW)
    assert len(text.splitlines()) < 40
    assert max(map(len, text.splitlines())) <= 140
    assert "attempt 2, 1000 ranks (999 alive, 1 silent)" in text
    assert "and 998 more ranks, not in trouble" in text
    assert "on ranks 1-999" in text
    assert "  rank 500 is silent for 90 s" in text
    assert "  rank 999 rollout: rollout, since 1000 s" in text
    assert "  and 996 more ranks" in text
    assert re.search(r"engine/tokens +998 +1 +\S+ +999 +rank 999", text)


def test_an_error_says_where_its_stacks_are(run: RunDirectory) -> None:
    record = {"attempt": 2, "rank": 0, "role": "trainer", "host": "node-0", "phase": "x", "error": "NoProgress: y"}
    (run.errors / "attempt-2.json").write_text(json.dumps({**record, "stacks": {"0": "a", "3": "b"}}))
    text = status(run.path, now=NOW)
    assert f"see {run.errors / 'attempt-2.json'} (with the stacks of ranks 0, 3)" in text


@pytest.mark.parametrize(
    ("ranks", "words"), [([3], "rank 3"), ([5, 4, 7, 6, 0], "ranks 0, 4-7"), ([1, 1], "rank 1"), ([1, 2], "ranks 1-2")]
)
def test_ranks_are_told_as_spans(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words


def test_a_long_wait_in_which_things_move_is_not_stalled(run: RunDirectory) -> None:
    put(run, 0, ThreadPhase("controller", "waiting for the batch", 4999.0, 1800.0, (1,), 40.0))
    put(run, 1, ThreadPhase("rollout", "rollout", 1.0, None, (), None))
    text = status(run.path, now=NOW)
    assert "waits since 5000 s (41 s of 1800 s without progress) for the batch, on rank 1" in text
    assert "stalled" not in text
    assert "limit" not in text
    put(run, 0, ThreadPhase("controller", "waiting for the batch", 4999.0, 1800.0, (1,), 900.0))
    assert "since 5000 s (901 s of 1800 s without progress) (over half of its limit)" in status(run.path, now=NOW)
