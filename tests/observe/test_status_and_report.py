"""What people read of a run from its files: status and report."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pekoe.pipeline.messages import Heartbeat
from pekoe.pipeline.observe import stack_request
from pekoe.pipeline.observe.heartbeat_files import read_heartbeats
from pekoe.pipeline.observe.metrics import MetricsWriter
from pekoe.pipeline.observe.report import report
from pekoe.pipeline.observe.stack_request import request_stacks
from pekoe.pipeline.observe.status import status
from pekoe.pipeline.run_directory import RunDirectory

NOW = 1_700_000_000.0


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "experiment" / "trial")
    directory.create()
    return directory


def beat(rank: int, role: str, phase: str, **more: float) -> Heartbeat:
    return Heartbeat(rank, role, f"node-{rank}", 4000 + rank, 7, phase, 12.0, 3, dict(more))


def put(run: RunDirectory, heartbeat: Heartbeat, time: float, attempt: int = 0) -> None:
    record = {**msgspec.to_builtins(heartbeat), "attempt": attempt, "time": time}
    (run.heartbeats / f"rank-{heartbeat.rank}.json").write_text(json.dumps(record))


def test_heartbeats_come_back_by_rank_and_damaged_ones_are_left_out(run: RunDirectory) -> None:
    written = [
        beat(2, "rollout", "decode", running=3.0),
        beat(0, "trainer", "wait for rows"),
        beat(10, "rollout", "done"),
    ]
    for item in written:
        put(run, item, NOW)
    (run.heartbeats / "rank-5.json").write_text('{"rank": 5, "ro')
    (run.heartbeats / "rank-6.json").write_text("{}")
    (run.heartbeats / "rank-7.json").write_text("[]")
    found = read_heartbeats(run)
    assert [item.heartbeat for item in found] == [written[1], written[0], written[2]]
    assert {item.time for item in found} == {NOW}
    assert found[0].age_seconds(NOW + 2.5) == 2.5
    assert found[0].age_seconds(NOW - 5) == 0, "clocks that disagree give no negative age"


def test_ranks_of_a_run_that_is_over_are_gone_however_young_their_heartbeats(run: RunDirectory) -> None:
    put(
        run,
        msgspec.structs.replace(beat(0, "trainer", "wait for rows", oldest_seconds=5.0), ends_at=NOW + 600),
        NOW - 1,
    )
    put(run, beat(1, "rollout", "ended"), NOW - 1)
    assert "(1 alive, 1 ended), the job ends in" in status(run.path, now=NOW)
    said = status(run.path, now=NOW, over=True)
    assert "(1 ended, 1 gone)\n" in said
    assert "alive" not in said


def test_only_the_newest_attempt_counts_and_an_orderly_end_is_told(run: RunDirectory) -> None:
    put(run, beat(0, "trainer", "ended"), NOW - 900, attempt=3)
    put(run, beat(1, "rollout", "decode"), NOW - 5000, attempt=2)
    assert [(item.heartbeat.rank, item.attempt) for item in read_heartbeats(run)] == [(0, 3)]
    text = status(run.path, now=NOW)
    assert "attempt 3" in text
    assert "ended" in row_of(text, "trainer")
    assert "silent" not in text
    assert "node-1" not in text


def row_of(text: str, role: str) -> str:
    return next(line for line in text.splitlines() if f" {role} " in line)


def test_status_shows_ranks_figures_files_and_errors(run: RunDirectory) -> None:
    put(run, beat(0, "trainer", "wait for rows", ready=2.0), NOW - 3)
    put(run, beat(1, "rollout", "decode", oldest_seconds=41.5), NOW - 300)
    with MetricsWriter(run, 0, tensorboard=False) as writer:
        writer.write(4, {"reward/mean": 0.5, "staleness/max": 2, "eval/accuracy": 0.7})
        writer.write(5, {"reward/mean": 0.75, "staleness/max": 3})
    (run.shards / "0-rank-1").mkdir()
    (run.shards / "0-rank-1" / "000000.h5").touch()
    (run.checkpoints / "step-9").mkdir()
    (run.checkpoints / "step-10").mkdir()
    (run.checkpoints / "step-11.attempt-0.part").mkdir()
    error = {
        "attempt": 0,
        "rank": 1,
        "role": "rollout",
        "host": "node-1",
        "phase": "decode",
        "error": "killed by signal 9",
    }
    (run.errors / "attempt-0.json").write_text(json.dumps(error))
    text = status(run.path, now=NOW)
    trainer, rollout = row_of(text, "trainer"), row_of(text, "rollout")
    for word in ("node-0", "4000", "alive", "3 s ago", "wait for rows", "0:15"):
        assert word in trainer
    for word in ("silent", "300 s ago", "decode", "5:12"):
        assert word in rollout
    assert "silent: rank 1 (rollout, node-1) for 300 s" in text
    assert re.search(r"ready +2\n", text)
    assert re.search(r"oldest_seconds +41\.5\n", text)
    assert "last step 5: reward/mean 0.75, eval/accuracy 0.7 (step 4), staleness/max 3" in text
    assert "1 shards, 2 checkpoints (newest step-10), 0 files set aside" in text
    assert "rank 1 (rollout, node-1) in phase 'decode': killed by signal 9" in text


def test_status_of_a_run_that_has_just_begun(run: RunDirectory) -> None:
    text = status(run.path)
    assert "no heartbeats yet" in text
    assert "no training step yet" in text


def test_status_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a run directory"):
        status(tmp_path / "nowhere")


BEATING = """
import sys
from pathlib import Path
from pekoe.pipeline.messages import Heartbeat
from pekoe.launch.heartbeat_files import write_heartbeat
from pekoe.pipeline.run_directory import RunDirectory
run = RunDirectory(Path(sys.argv[1]))
for counter in range(100_000):
    heartbeat = Heartbeat(0, "trainer", "here", 1, counter, "train", 0.0, 1, {"x": float(counter)})
    write_heartbeat(run, 2, heartbeat)
    print(counter, flush=True)
"""


def test_a_stopped_or_killed_rank_still_has_its_last_heartbeat(run: RunDirectory) -> None:
    process = subprocess.Popen([sys.executable, "-c", BEATING, str(run.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for _ in range(50):
            process.stdout.readline()
        for kind in (signal.SIGSTOP, signal.SIGKILL):
            os.kill(process.pid, kind)
            (item,) = read_heartbeats(run)
            assert item.attempt == 2
            assert item.heartbeat.counter >= 49
            assert item.heartbeat.gauges == {"x": float(item.heartbeat.counter)}
            assert "trainer" in status(run.path)
    finally:
        process.kill()
        process.wait(timeout=60)


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize("num_steps", [1, 8, 60])
def test_a_report_has_curves_key_figures_and_places(run: RunDirectory, num_steps: int) -> None:
    run.config.write_text("seed: 1\nname: <script>\n")
    (run.exports / "step-9").mkdir()
    (run.exports / "step-10").mkdir()
    with MetricsWriter(run, 0, tensorboard=False) as writer:
        for step in range(1, num_steps + 1):
            writer.write(step, {"reward/mean": step / num_steps, "train/loss": float("nan")}, wall=NOW + step)
        writer.write(0, {"eval/accuracy": 0.25}, wall=NOW)
        writer.write(num_steps, {"eval/accuracy": 0.875}, wall=NOW + num_steps)
    text = report(run)
    assert "reward" in text
    assert "held-out accuracy, first -> last: 0.250 -> 0.875" in text
    assert f"training steps: {num_steps}" in text
    assert str(run.path / "report.html") in text
    assert str(run.exports / "step-10") in text
    assert "\x1b" not in text, "the terminal plot is plain characters"
    for name in ("reward.png", "accuracy.png"):
        assert png_size(run.path / "report" / name) > (400, 200)
    assert not (run.path / "report" / "train-loss.png").exists(), "a figure that was never finite has no curve"
    page = (run.path / "report.html").read_text()
    assert len(re.findall(r"data:image/png;base64,[A-Za-z0-9+/=]{1000,}", page)) == 2
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert not re.search(r'(src|href)="(?!data:)', page), "the page needs nothing from outside"


def test_a_report_of_no_figures_says_so(run: RunDirectory) -> None:
    assert "no figures yet" in report(run)
    assert not (run.path / "report.html").exists()


def test_report_says_when_nothing_was_learned_and_completions_were_cut(run: RunDirectory) -> None:
    with MetricsWriter(run, 0, tensorboard=False) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"reward/mean": 0.0, "train/grad_norm": 0.0, "truncated/share": 0.9})
    text = report(run)
    assert "no update was made" in text
    assert "90% of the completions were cut" in text


def test_report_of_a_sound_run_has_no_notes(run: RunDirectory) -> None:
    with MetricsWriter(run, 0, tensorboard=False) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"reward/mean": 0.1 * step, "train/grad_norm": 0.5, "truncated/share": 0.1})
    assert "note:" not in report(run)


def test_the_newest_of_many_error_records_are_shown(run: RunDirectory) -> None:
    put(run, beat(0, "trainer", "step"), NOW)
    for attempt in range(12):
        (run.errors / f"attempt-{attempt}.json").write_text(json.dumps({"attempt": attempt, "rank": 0, "error": "no"}))
    lines = [line for line in status(run.path, now=NOW).splitlines() if line.startswith("error in attempt")]
    assert [line.split(":")[0] for line in lines] == [f"error in attempt {attempt}" for attempt in range(7, 12)]
    assert f"7 older error records in {run.errors}" in status(run.path, now=NOW)


def test_a_request_for_stacks_looks_rarely_for_the_answers_of_many_ranks(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Path] = []
    monkeypatch.setattr(stack_request, "_read", lambda path: looks.append(path) or "")
    monkeypatch.setattr(stack_request, "LOOKS_PER_SECOND", 400)
    for rank in range(200):
        put(run, beat(rank, "rollout", "decode"), NOW)
    assert "no answer within 0.9 s" in request_stacks(run.path, 0.9)
    assert len(looks) <= 3 * 200, "at the begin, after half a second, and at the end"
