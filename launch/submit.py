"""Submits runs: from the shell by `pekoe submit`, from Python by `submit`.

    from pekoe.launch.submit import submit
    jobs = submit("configs/quickstart.yaml", sweep={"actor.optimizer.lr": [1e-6, 3e-6]}, cluster="slurm_nvidia")
    results = [job.result() for job in jobs]

    check everything ─► prepare run directories ─► one job, or one array for a sweep ─► handles

Nothing is prepared or submitted before every value of every run is checked. A job runs the code that lies in its run
directory (of a sweep: in the sweep's) since the submission. Without Slurm, runs are processes of this machine.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pekoe.launch import slurm_commands, submitted_jobs
from pekoe.launch.attempts import (
    PACKAGE_ROOT,
    RunDirectoryError,
    check_has_ended,
    check_is_begun,
    check_overrides,
    check_teacher,
    prepare_run,
    run_directory,
)
from pekoe.launch.checked_config import load_checked, load_unchecked
from pekoe.launch.claim import LEAVING, living_owner, newest_owner
from pekoe.launch.job_states import read_state
from pekoe.launch.run_jobs import RunJob, current_job
from pekoe.launch.submitted_jobs import JobEntry, note_job
from pekoe.launch.sweeps import Element, Sweep, array_text, open_sweep, plan_elements
from pekoe.pipeline import files
from pekoe.pipeline.run_directory import RunDirectory

if TYPE_CHECKING:
    from pekoe.launch.placement import Placement
    from pekoe.pipeline.config.run import RunConfig

HERE = "laptop"
"""The site whose runs are processes of this machine, Slurm or not."""
ELEMENT_OUTPUT, JOB_OUTPUT = "%A_%a_0_log.out", "%j_0_log.out"
"""Names under which submitit's handles look for what a job said."""


def submit(
    config: str | Path | RunConfig,
    overrides: Sequence[str] = (),
    *,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    seeds: Sequence[int] = (),
    cluster: str | None = None,
    dry_run: bool = False,
    array_parallelism: int | None = None,
) -> list[RunJob]:
    """One run, or one for each combination of a sweep's values and the seeds; their handles, in that order.

    `cluster` is a site (as cluster.site=…); at most `array_parallelism` elements run at once. `dry_run` prints the
    script for sbatch and touches nothing. The same call again submits what of a sweep is not accepted yet.
    ValueError lists what is wrong, SlurmError says why Slurm refused.
    """
    given = [*([f"cluster.site={cluster}"] if cluster is not None else []), *overrides]
    if sweep or seeds:
        return _submit_sweep(config, given, sweep or {}, seeds, dry_run, array_parallelism)
    base, placement = load_checked(config, given, quiet=False)
    run = run_directory(base)
    order = Order(base, placement, run.slurm, run.code, base.trial_name)
    if dry_run:
        print(order.script(None), end="")
        return []
    check_is_free(run)
    prepare_run(base)
    return [_submit_run(run, order, (), "submit")]


def resume(run: RunDirectory, overrides: Sequence[str] = (), *, after: str | None = None) -> RunJob:
    """Submits the next job of a run; `after` is a job whose end it waits for (a chain), the run's own if it is in one.

    RunDirectoryError while another job of the run waits or runs.
    """
    check_overrides(overrides)
    if after is None:
        check_is_begun(run)
        check_is_free(run)
        check_nobody_drives(run)
    config, placement = load_checked(run.config, overrides)
    check_teacher(run, config, overrides)
    code = run.code if (run.code / "pekoe").is_dir() else _code_of_sweep(run)
    order = Order(config, placement, run.slurm, code, config.trial_name, after=after)
    return _submit_run(run, order, tuple(overrides), "chain" if after is not None else "resume")


def check_is_free(run: RunDirectory) -> None:
    """RunDirectoryError while a job of the run waits or runs."""
    if submitted_jobs.newest_job(run) is None:
        return
    entry, state = current_job(run)
    if entry.why == submitted_jobs.SCRIPT and state.state == LEAVING:
        return
    if not state.has_ended:
        how = "is being run by" if entry.why == submitted_jobs.SCRIPT else "is submitted already, as"
        raise RunDirectoryError(
            f"{run.path} {how} job {entry.job_id}; see `pekoe status {run.path}`, end it with `pekoe cancel {run.path}`"
        )


def check_nobody_drives(run: RunDirectory) -> None:
    """RunDirectoryError while a driver may have the run.

    Of a job Slurm says whether it has ended; heartbeats stay young for a while, and the next driver waits for ranks
    that are left.
    """
    last = newest_owner(run)
    if last is None or last.job_id is None:
        check_has_ended(run)
        return
    owner = living_owner(run)
    if owner is not None and read_state(last.job_id).state != LEAVING:
        raise RunDirectoryError(
            f"{run.path} is being run by {owner}; see `pekoe status {run.path}`, end it with `pekoe cancel {run.path}`"
        )


@dataclass(frozen=True)
class Order:
    """A job, or an array of the same job, to be."""

    config: RunConfig
    placement: Placement
    folder: Path
    """submitit's."""
    code: Path
    """For PYTHONPATH: where the job finds Pekoe."""
    name: str
    after: str | None = None
    limit: int | None = None
    """Elements that run at once."""

    @property
    def is_local(self) -> bool:
        """Whether it runs as a process of this machine."""
        return self.config.cluster.site == HERE or not slurm_commands.is_there()

    @property
    def variables(self) -> dict[str, str]:
        """Where Python looks: the frozen code, then what the submitter's Python sees."""
        parts = [str(self.code), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(part for part in parts if part))}

    def script(self, num_elements: int | None) -> str:
        """The exact text for sbatch."""
        from pekoe.launch.batch_script import BatchJob, batch_script

        job = BatchJob(
            name=self.name,
            command=("env", "SUBMITIT_EXECUTOR=slurm", *submitit_command(self.folder)),
            output=str(self.folder / (JOB_OUTPUT if num_elements is None else ELEMENT_OUTPUT)),
            array=None if num_elements is None else array_text(num_elements, self.limit),
            dependency=None if self.after is None else f"afterany:{self.after}",
        )
        return batch_script(job, self.config, self.placement, {**os.environ, **self.variables})


def submitit_command(folder: Path) -> tuple[str, ...]:
    """What looks for its pickle in `folder`, runs it and leaves the result there."""
    return (sys.executable, "-u", "-m", "submitit.core._submit", str(folder))


def _submit_run(run: RunDirectory, order: Order, overrides: tuple[str, ...], why: str) -> RunJob:
    from pekoe.launch.slurm import ProcessExecutor, ScriptExecutor, run_submitted

    executor: ProcessExecutor | ScriptExecutor
    if order.is_local:
        executor = ProcessExecutor(order.folder, order.variables)
    else:
        executor = ScriptExecutor(order.folder, order.script)
    job = executor.submit(run_submitted, str(run.path), overrides)
    kind = "local" if order.is_local else "slurm"
    note_job(run, JobEntry(job.job_id, kind, str(order.folder), why))
    return RunJob(run, job.job_id)


def _submit_sweep(
    source: str | Path | RunConfig,
    overrides: Sequence[str],
    values: Mapping[str, Sequence[Any]],
    seeds: Sequence[int],
    dry_run: bool,
    limit: int | None,
) -> list[RunJob]:
    base = load_unchecked(source, overrides)
    planned = plan_elements(base.trial_name, values, seeds)
    checked = [
        load_checked(source, [*overrides, *one.overrides, f"trial_name={one.trial_name}"], quiet=number > 0)
        for number, one in enumerate(planned)
    ]
    _check_same_job(planned, checked)
    elements = [
        replace(element, run=str(run_directory(config).path))
        for element, (config, _) in zip(planned, checked, strict=True)
    ]
    folder = Path(checked[0][0].cluster.fileroot) / base.experiment_name / "sweeps" / base.trial_name
    order = Order(
        checked[0][0], checked[0][1], folder / "slurm", folder / "code", f"{base.trial_name}-sweep", limit=limit
    )
    if dry_run:
        print(order.script(len(elements)), end="")
        return []
    sweep = open_sweep(folder, _flat(asdict(base)), elements)
    _prepare_elements(sweep, {element.run: config for element, (config, _) in zip(elements, checked, strict=True)})
    from pekoe.launch.arrays import run_rest_here, submit_rest

    if order.is_local:
        run_rest_here(sweep, limit or 1, order.variables)
    else:
        submit_rest(sweep, order.script, limit)
    return [RunJob.of(RunDirectory(Path(element.run))) for element in elements]


def _check_same_job(elements: Sequence[Element], checked: Sequence[tuple[RunConfig, Placement]]) -> None:
    """All elements of an array have the script of the first."""
    first, placement = checked[0]
    for element, (config, own) in zip(elements, checked, strict=True):
        if config.cluster != first.cluster or str(own) != str(placement):
            raise ValueError(
                f"sweep: {', '.join(element.overrides)} needs another job than {', '.join(elements[0].overrides)} "
                "(cluster.* or allocation differ), but an array is one job many times; submit such runs one by one"
            )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def _prepare_elements(sweep: Sweep, configs: Mapping[str, RunConfig]) -> None:
    """Run directories of those that are not submitted yet: configuration only. What else a run needs is made when it
    begins, and its code comes from the sweep's: thousands of elements are no burden for a filesystem."""
    from pekoe.pipeline.config.snapshot import snapshot_code, write_run_config

    snapshot_code(RunDirectory(sweep.path), PACKAGE_ROOT)
    sweep.write()
    for element in sweep.rest:
        run = RunDirectory(Path(element.run))
        if element.run not in configs:
            continue
        if run.run_json.exists() and files.read_json(run.run_json).get("sweep") != str(sweep.path):
            raise RunDirectoryError(f"{run.path} holds another run already; give another trial_name=…")
        files.make_folder(run.path, mode=0o700)
        write_run_config(run, configs[element.run])
        record = {"id": uuid.uuid4().hex, "began": time.time(), "attempts": [], "directory": os.getcwd()}
        files.write_json(run.run_json, {**record, "sweep": str(sweep.path)})


def _code_of_sweep(run: RunDirectory) -> Path:
    """Of an element that has not begun: its sweep's code; else Pekoe as it is installed here."""
    folder = files.read_json(run.run_json).get("sweep")
    return Path(folder) / "code" if folder else PACKAGE_ROOT.parent
