"""`pekoe logs`: which files, the last lines of huge ones, following until the end."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path

import pytest

from pekoe.launch import run_logs
from pekoe.launch.attempts import RunDirectoryError
from pekoe.launch.run_logs import choose_files, follow, last_lines, print_logs
from pekoe.launch.submitted_jobs import JobEntry, note_job
from pekoe.pipeline.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path)
    for attempt, ranks in ((0, 2), (1, 12)):
        made.logs(attempt).mkdir(parents=True)
        for rank in range(ranks):
            (made.logs(attempt) / f"rank-{rank}.log").write_text(f"attempt {attempt} rank {rank}\n")
    for job in ("7", "8"):
        note_job(made, JobEntry(job, "slurm", str(made.slurm), "submit"))
        (made.slurm / f"{job}_0_log.out").write_text(f"job {job}\n")
    return made


def names(paths: list[Path]) -> list[str]:
    return [f"{path.parent.name}/{path.name}" for path in paths]


def test_which_files(run: RunDirectory) -> None:
    assert names(choose_files(run)) == ["slurm/8_0_log.out", "1/rank-0.log"]
    assert names(choose_files(run, rank=11)) == ["1/rank-11.log"]
    assert names(choose_files(run, attempt=0, rank=1)) == ["0/rank-1.log"]
    (run.logs(0) / "step.out").write_text("srun\n")
    assert names(choose_files(run, attempt=0)) == ["0/step.out", "0/rank-0.log", "0/rank-1.log"]
    assert names(choose_files(run, attempt=1))[-2:] == ["1/rank-10.log", "1/rank-11.log"]
    with pytest.raises(RunDirectoryError, match="no logs of attempt 5; there are: 0, 1"):
        choose_files(run, attempt=5)
    with pytest.raises(RunDirectoryError, match=r"no log of rank 2; there are: rank-0\.log, rank-1\.log"):
        choose_files(run, attempt=0, rank=2)


@pytest.mark.parametrize("block", [7, 1 << 16])
def test_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(run_logs, "BLOCK_BYTES", block)
    path = tmp_path / "log"
    for text, count, expected in (
        ("", 3, ""), ("a", 3, "a"), ("a\nb\nc\n", 2, "b\nc\n"), ("a\nb\nc", 2, "b\nc"), ("\n\n\n", 2, "\n\n"),
        ("x" * 50 + "\nend\n", 1, "end\n"), ("a\n", 0, ""),
    ):  # fmt: skip
        path.write_text(text)
        assert last_lines(path, count) == (expected, len(text)), text


def test_following_shows_what_is_added_also_to_new_files_and_ends_with_the_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_logs, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(run_logs, "POLL_SECONDS", 0.02)
    out = io.StringIO()
    positions = print_logs(choose_files(run), 5, out)
    over = threading.Event()
    thread = threading.Thread(
        target=follow, args=(lambda: choose_files(run), positions, lambda: not over.is_set(), out)
    )
    thread.start()
    with open(run.slurm / "8_0_log.out", "a") as file:
        file.write("more\n")
    note_job(run, JobEntry("9", "slurm", str(run.slurm), "resume"))
    (run.slurm / "9_0_log.out").write_text("job 9\n")
    run.logs(2).mkdir()
    (run.logs(2) / "rank-0.log").write_text("attempt 2\n")
    deadline = time.monotonic() + 10
    while "attempt 2\n" not in out.getvalue() and time.monotonic() < deadline:
        time.sleep(0.02)
    over.set()
    thread.join(60)
    assert not thread.is_alive()
    shown = out.getvalue()
    assert shown.startswith(
        f"==> {run.slurm}/8_0_log.out <==\njob 8\n==> {run.logs(1)}/rank-0.log <==\nattempt 1 rank 0\n"
    )
    for text in ("more\n", "job 9\n", "attempt 2\n"):
        assert shown.count(text) == 1
