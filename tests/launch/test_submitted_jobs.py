"""Which jobs a run has: noted by many at once, forgotten, and those of scripts that nobody noted."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission

from pekoe.launch.attempts import Attempt, RunDirectoryError, note_end
from pekoe.launch.claim import Owner, claim, newest_owner
from pekoe.launch.cli import main
from pekoe.launch.error_record import ErrorRecord, write_record
from pekoe.launch.heartbeat_files import write_heartbeat
from pekoe.launch.jobs_text import jobs_text
from pekoe.launch.run_errors import JobEndedError, RunFailedError, RunStoppedError
from pekoe.launch.run_jobs import RunJob
from pekoe.launch.run_logs import choose_files
from pekoe.launch.slurm import StateWatcher, SubmittedJob
from pekoe.launch.submit import check_is_free
from pekoe.launch.submitted_jobs import JobEntry, forget_job, jobs_of, note_job
from pekoe.pipeline import files
from pekoe.pipeline.messages import Heartbeat
from pekoe.pipeline.run_directory import RunDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fake_slurm import FakeSlurm


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr(SubmittedJob, "watcher", StateWatcher())
    monkeypatch.setattr("pekoe.launch.run_jobs.FOLLOW_SECONDS", 0.0)
    return FakeSlurm(tmp_path / "bin", monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.create()
    attempts = [{"number": 0, "began": 10.0, "host": "n1", "job": "7"}]
    files.write_json(made.run_json, {"attempts": attempts})
    return made


def entry(job: str, why: str = "submit", at: float = 0.0) -> JobEntry:
    return JobEntry(job, "slurm", "/nowhere", why, at)


def driven_by(
    run: RunDirectory, number: int, job: str, at: float, output: Path | str = "", ended: bool = False
) -> None:
    """A driver had the run in this job."""
    files.make_folder(run.path / "claims")
    owner = Owner("elsewhere", 1, 0.0, at, job, 0, str(output))
    files.write_json(run.path / "claims" / f"{number}.json", asdict(owner))
    if ended:
        (run.path / "claims" / f"{number}.ended").touch()


def test_of_many_that_note_and_forget_at_once_nothing_is_lost(run: RunDirectory) -> None:
    gate = threading.Barrier(8)

    def work(worker: int) -> None:
        gate.wait(60)
        for number in range(5):
            note_job(run, entry(f"{worker}{number}"))
            if number % 2:
                forget_job(run, f"{worker}{number}")

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    expected = {f"{worker}{number}" for worker in range(8) for number in (0, 2, 4)}
    assert sorted(one.job_id for one in jobs_of(run)) == sorted(expected)


def test_jobs_stand_in_the_order_of_their_notes_whatever_the_clocks_say(run: RunDirectory) -> None:
    for job, at in (("1", 50.0), ("2", 40.0), ("2", 60.0), ("3", 70.0)):
        note_job(run, entry(job, at=at))
    assert [one.job_id for one in jobs_of(run)] == ["1", "2", "3"]
    driven_by(run, 0, "9", 65.0)
    driven_by(run, 1, "2", 66.0)
    assert [(one.job_id, one.why) for one in jobs_of(run)] == [
        ("1", "submit"), ("2", "submit"), ("9", "script"), ("3", "submit"),
    ]  # fmt: skip


def test_a_job_of_a_script_is_found_by_its_claim(run: RunDirectory, slurm: FakeSlurm, tmp_path: Path) -> None:
    printed = tmp_path / "pekoe-7.log"
    printed.write_text("said\n")
    driven_by(run, 0, "7", 20.0, printed)
    slurm.command("squeue", "echo '7|RUNNING|n1|None'")
    job = RunJob.of(run)
    assert (job.job_id, job.state, job.has_ended, job.wait(0.0)) == ("7", "RUNNING", False, False)
    assert choose_files(run) == job.logs() == [printed]
    assert "job 7 (script): RUNNING on n1\n" in jobs_text(run)
    with pytest.raises(RunDirectoryError, match=r"is being run by job 7; .*pekoe cancel"):
        check_is_free(run)


@pytest.mark.parametrize("seen", ["FAILED", "forgotten"])
def test_the_end_of_a_script_is_read_from_the_run(
    run: RunDirectory, slurm: FakeSlurm, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pekoe.launch.slurm.SETTLE_SECONDS", 0.0)
    if seen == "FAILED":
        slurm.command("squeue", "echo '7|FAILED|n1|NonZeroExitCode'")
    driven_by(run, 0, "7", 20.0, ended=True)
    with pytest.raises(JobEndedError, match=f"job 7 of .* ended as {'GONE' if seen == 'forgotten' else seen}"):
        RunJob.of(run).result(timeout=60)
    run.logs(0).mkdir(parents=True)
    note_end(Attempt(run, 0), 75, 12)
    with pytest.raises(RunStoppedError, match="pekoe resume"):
        RunJob.of(run).result(timeout=60)
    assert "ended with code 75" in jobs_text(run)
    write_record(run, ErrorRecord(0, 1, "n1", "rollout", "waiting", 0.0, "killed by signal 9 (SIGKILL)"))
    with pytest.raises(RunFailedError, match=r"rank 1 .* killed by signal 9"):
        RunJob.of(run).result(timeout=60)
    assert "ended with code 1" in jobs_text(run), "the record weighs more than the note"


def test_an_allocation_that_goes_on_does_not_hold_a_run_that_has_left_it(run: RunDirectory, slurm: FakeSlurm) -> None:
    slurm.command("squeue", "echo '7|RUNNING|n1|None'")
    driven_by(run, 0, "7", 20.0)
    assert not RunJob.of(run).has_ended
    driven_by(run, 0, "7", 20.0, ended=True)
    run.logs(0).mkdir(parents=True)
    note_end(Attempt(run, 0), 0, None)
    job = RunJob.of(run)
    assert (job.state, job.has_ended) == ("COMPLETED", True)
    assert job.result(timeout=60).outcome == "done"
    check_is_free(run)


def test_a_claim_names_the_file_that_the_driver_prints_to(run: RunDirectory, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pekoe.launch.claim import claim\n"
        "from pekoe.pipeline.run_directory import RunDirectory\n"
        "claim(RunDirectory(Path(sys.argv[1])), '7')"
    )
    with open(tmp_path / "out", "wb") as out:
        subprocess.run([sys.executable, "-c", code, str(run.path)], stdout=out, check=True, timeout=60)
    owner = newest_owner(run)
    assert owner is not None
    assert owner.output == str(tmp_path / "out")
    assert time.time() - owner.claimed < 60
    again = claim(run, "7", restarts=1)
    assert again is not None
    again.release()
    assert [one.job_id for one in jobs_of(run)] == ["7"], "one entry for all restarts"


def test_what_slurm_knows_to_be_dead_is_not_called_alive(
    run: RunDirectory, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """Right after a kill the heartbeats are seconds old."""
    driven_by(run, 0, "7", 20.0)
    files.make_folder(run.heartbeats)
    write_heartbeat(run, 0, Heartbeat(0, "trainer", "n1", 4711, 1, "training", 0.0, 3))
    for state, ranks in (("RUNNING", "1 alive"), ("COMPLETING", "1 alive"), ("FAILED", "1 gone")):
        slurm.command("squeue", f"echo '7|{state}|n1|None'")
        assert main(["status", str(run.path)]) == 0
        said = capsys.readouterr().out
        assert f"1 ranks ({ranks})" in said
        assert f"job 7 (script): {state} on n1" in said
    slurm.command("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    assert main(["status", str(run.path)]) == 0
    assert "1 ranks (1 alive)" in capsys.readouterr().out, "no answer is no end"


@pytest.mark.parametrize(
    ("state", "said", "kind"),
    [
        ("CANCELLED", "attempt 0 failed: srun ended with 1 before any rank was heard", JobEndedError),
        ("TIMEOUT", "attempt 0 failed: srun ended with 1 before any rank was heard", JobEndedError),
        ("FAILED", "attempt 0 failed: srun ended with 1 before any rank was heard", RunFailedError),
        ("CANCELLED", "attempt 0 failed: rank 1: ValueError: no", RunFailedError),
    ],
)
def test_a_job_that_went_while_its_ranks_were_started_ended_by_slurms_word(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, said: str, kind: type[Exception]
) -> None:
    """The driver sees only that srun failed, and says so in its result."""
    job = SubmittedJob(tmp_path, "84")
    DelayedSubmission(print, str(run.path)).dump(job.paths.submitted_pickle)
    trace = f"Traceback …\npekoe.launch.run_errors.RunFailedError: {run.path}: {said}\n"
    job.paths.result_pickle.write_bytes(pickle.dumps(("error", trace)))
    monkeypatch.setattr(SubmittedJob, "done", lambda self, force_check=False: True)
    monkeypatch.setattr(SubmittedJob, "state", state)
    error = job.exception()
    assert type(error) is kind
    assert ("pekoe resume" in str(error)) == (kind is JobEndedError)
