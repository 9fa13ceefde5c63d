"""Which jobs a run has or had, oldest first. The newest may wait for the end of the one before it.

RUN/slurm/jobs/0.json, 1.json, …   a file for each submission; many may submit at once
RUN/claims/                        each driver that had the run, with its job: of a script of the user's, too
SWEEP/sweep.json                   of an element of a sweep, its first job; `run.json` names the sweep
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pekoe.launch import numbered_files
from pekoe.launch.claim import owners
from pekoe.launch.sweeps import read_sweep
from pekoe.pipeline import files
from pekoe.pipeline.run_directory import RunDirectory

SCRIPT = "script"


@dataclass(frozen=True)
class JobEntry:
    """One job."""

    job_id: str
    """Slurm's, `<array job>_<element>` in an array; of a local job the process id."""
    kind: str
    """`slurm`, or `local`: a process of the host that submitted."""
    folder: str
    """submitit's: pickles, script, output. A job that it did not submit has nothing there."""
    why: str
    """`submit`, `sweep`, `resume`, `chain`; `script`: not by `pekoe submit`, but by sbatch or salloc."""
    time: float = field(default_factory=time.time)
    """When it was submitted (of a script: when its driver began), seconds since 1970."""
    printed: str = ""
    """The file that it prints to, of a script; empty for a terminal."""

    @property
    def output(self) -> Path | None:
        """What it has printed; may not be there yet. None for a terminal."""
        if self.why == SCRIPT:
            return Path(self.printed) if self.printed else None
        return Path(self.folder) / f"{self.job_id}_0_log.out"


def note_job(run: RunDirectory, entry: JobEntry) -> None:
    """Adds a job that was accepted."""
    if any((one.job_id, one.kind) == (entry.job_id, entry.kind) for one in submissions_of(run)):
        return
    folder = _folder(run)
    files.make_folder(folder)
    number = max(numbered_files.numbers(folder), default=-1) + 1
    while not numbered_files.create(folder, number, asdict(entry)):
        number += 1


def forget_job(run: RunDirectory, job_id: str) -> None:
    """Takes out a job that waited and is not needed any more."""
    for path, entry in _own_jobs(run):
        if entry.job_id == job_id:
            files.remove(path)


def submissions_of(run: RunDirectory) -> list[JobEntry]:
    """Jobs that `pekoe` submitted."""
    return [*_jobs_of_sweep(run), *(entry for _, entry in _own_jobs(run))]


def jobs_of(run: RunDirectory) -> list[JobEntry]:
    """All jobs of the run; empty if it never had one."""
    jobs = submissions_of(run)
    for script in _jobs_of_scripts(run, {entry.job_id for entry in jobs}):
        # submissions are in order already, whatever the clocks of those who submitted say
        place = max((number + 1 for number, entry in enumerate(jobs) if entry.time <= script.time), default=0)
        jobs.insert(place, script)
    return jobs


def newest_job(run: RunDirectory) -> JobEntry | None:
    """The last one."""
    jobs = jobs_of(run)
    return jobs[-1] if jobs else None


def _folder(run: RunDirectory) -> Path:
    return run.slurm / "jobs"


def _own_jobs(run: RunDirectory) -> Iterator[tuple[Path, JobEntry]]:
    """In the order of their numbers; one that is forgotten meanwhile is left out."""
    for number in numbered_files.numbers(_folder(run)):
        path = numbered_files.path_of(_folder(run), number)
        try:
            yield path, JobEntry(**files.read_json(path, retry_seconds=0.5))
        except FileNotFoundError:
            continue


def _jobs_of_scripts(run: RunDirectory, known: set[str]) -> list[JobEntry]:
    """Jobs whose driver has had the run and that nobody submitted for it; one entry for all restarts of a job."""
    found: dict[str, JobEntry] = {}
    for owner in owners(run):
        job = owner.job_id
        if job is None or job in known:
            continue
        began = found[job].time if job in found else owner.claimed
        found[job] = JobEntry(job, "slurm", str(run.slurm), SCRIPT, began, owner.output)
    return list(found.values())


def _jobs_of_sweep(run: RunDirectory) -> list[JobEntry]:
    folder = files.read_json(run.run_json).get("sweep") if run.run_json.exists() else None
    sweep = read_sweep(Path(folder)) if folder else None
    if sweep is None:
        return []
    mine = (one for one in sweep.elements if Path(one.run) == run.path and one.job_id)
    return [JobEntry(one.job_id, one.kind, str(sweep.path / "slurm"), "sweep", 0.0) for one in mine]
