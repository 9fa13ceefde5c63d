"""Which jobs a run was submitted as, oldest first. The newest may wait for the end of the one before it.

`RUN/slurm/jobs.json` has them; of an element of a sweep, the first is in the sweep's file, which `run.json` names.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pekoe.launch.sweeps import read_sweep
from pekoe.pipeline import files
from pekoe.pipeline.run_directory import RunDirectory

NAME = "jobs.json"


@dataclass(frozen=True)
class JobEntry:
    """One submission."""

    job_id: str
    """Slurm's, `<array job>_<element>` in an array; of a local job the process id."""
    kind: str
    """`slurm`, or `local`: a process of the host that submitted."""
    folder: str
    """submitit's: pickles, script, output; empty for a job that it did not submit."""
    why: str
    """`submit`, `sweep`, `resume`, `chain`."""
    time: float = field(default_factory=time.time)
    """When, seconds since 1970."""


def note_job(run: RunDirectory, entry: JobEntry) -> None:
    """Adds a job that was accepted."""
    if any(one.job_id == entry.job_id and one.kind == entry.kind for one in jobs_of(run)):
        return
    files.make_folder(run.slurm)
    files.write_json(run.slurm / NAME, {"jobs": [asdict(one) for one in (*_own_jobs(run), entry)]})


def forget_job(run: RunDirectory, job_id: str) -> None:
    """Takes out a job that waited and is not needed any more."""
    kept = [asdict(one) for one in _own_jobs(run) if one.job_id != job_id]
    files.write_json(run.slurm / NAME, {"jobs": kept})


def jobs_of(run: RunDirectory) -> list[JobEntry]:
    """All jobs of the run; empty if it was not submitted."""
    return [*_jobs_of_sweep(run), *_own_jobs(run)]


def newest_job(run: RunDirectory) -> JobEntry | None:
    """The one that was submitted last."""
    jobs = jobs_of(run)
    return jobs[-1] if jobs else None


def _own_jobs(run: RunDirectory) -> list[JobEntry]:
    path = run.slurm / NAME
    if not path.exists():
        return []
    return [JobEntry(**one) for one in files.read_json(path)["jobs"]]


def _jobs_of_sweep(run: RunDirectory) -> list[JobEntry]:
    folder = files.read_json(run.run_json).get("sweep") if run.run_json.exists() else None
    sweep = read_sweep(Path(folder)) if folder else None
    if sweep is None:
        return []
    mine = (one for one in sweep.elements if Path(one.run) == run.path and one.job_id)
    return [JobEntry(one.job_id, one.kind, str(sweep.path / "slurm"), "sweep", 0.0) for one in mine]
