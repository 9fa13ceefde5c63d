"""The commands of `pekoe` about jobs: submit, attach, resume, cancel, logs. Each loads what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from pekoe.launch.attempts import check_is_run
from pekoe.launch.slurm_commands import SlurmError
from pekoe.launch.stop_signals import EXIT_DONE, EXIT_FAILURE
from pekoe.pipeline.run_directory import RunDirectory

DEFAULT_LINES = 40


def add_commands(commands: Any) -> None:
    """To the parser of `pekoe`."""
    submit = commands.add_parser(
        "submit",
        help="hand a run, a sweep or a rollout array to Slurm",
        description="Checks everything, then submits one job, or one job array for a sweep. The same command again "
        "submits what of a sweep is not accepted yet. Without Slurm the run becomes a process of this machine.",
    )
    submit.add_argument("config", nargs="?", help="YAML file (not with --rollout-array)")
    submit.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    submit.add_argument("--cluster", metavar="SITE", help="preset in configs/clusters, or a YAML file")
    submit.add_argument(
        "--sweep", action="append", default=[], metavar="key=v1,v2", help="one run for each value; may be repeated"
    )
    submit.add_argument("--seeds", metavar="1,2,3", help="one run for each seed")
    submit.add_argument("--limit", type=int, metavar="N", help="at most so many elements at once")
    submit.add_argument("--dry-run", action="store_true", help="print the script for sbatch, touch nothing")
    submit.add_argument("--wait", action="store_true", help="wait for the end; the exit code tells how it was")
    submit.add_argument("--rollout-array", type=Path, metavar="RUN", help="worlds that serve this run; needs --array")
    submit.add_argument("--array", metavar="0-15%4", help="elements of the rollout array, as sbatch takes them")
    submit.set_defaults(command=_submit)

    attach = commands.add_parser("attach", help="serve a running run with rollout ranks of a world of their own")
    from pekoe.launch import attach as attached

    attached.add_arguments(attach)
    attach.set_defaults(command=attached.main)

    resume = commands.add_parser("resume", help="submit the next job of a run")
    _add_run(resume)
    resume.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the run's")
    resume.add_argument("--wait", action="store_true", help="wait for the end; the exit code tells how it was")
    resume.set_defaults(command=_resume)

    cancel = commands.add_parser("cancel", help="stop a run with a checkpoint, and end its jobs")
    _add_run(cancel)
    cancel.add_argument("--now", action="store_true", help="end the jobs at once, without a checkpoint")
    cancel.set_defaults(command=_cancel)

    logs = commands.add_parser("logs", help="what the jobs and the ranks of a run have written")
    _add_run(logs)
    logs.add_argument("--attempt", type=int, help="of this attempt (default: the newest)")
    logs.add_argument("--rank", type=int, help="of this rank (default: what the job printed, and the head's)")
    logs.add_argument("--lines", type=int, default=DEFAULT_LINES, help=f"the last ones (default {DEFAULT_LINES})")
    logs.add_argument("-f", "--follow", action="store_true", help="go on printing until the run has ended")
    logs.set_defaults(command=_logs)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")


def _submit(arguments: argparse.Namespace) -> int:
    if arguments.rollout_array is not None:
        return _submit_rollout_array(arguments)
    if arguments.array is not None:
        raise ValueError("--array: belongs to --rollout-array RUN; the array of a sweep follows from its values")
    if arguments.config is None:
        raise ValueError("submit: neither a configuration nor --rollout-array RUN was given")
    from pekoe.launch.submit import submit
    from pekoe.launch.sweeps import parse_sweep

    if arguments.limit is not None and arguments.limit < 1:
        raise ValueError(f"--limit: {arguments.limit} is not allowed; allowed: >= 1")
    jobs = submit(
        arguments.config, arguments.overrides, sweep=parse_sweep(arguments.sweep), seeds=_seeds(arguments.seeds),
        cluster=arguments.cluster, dry_run=arguments.dry_run, array_parallelism=arguments.limit,
    )  # fmt: skip
    for job in jobs:
        print(f"{job.entry.kind} job {job.job_id}: {job.run.path}", flush=True)
    return _wait(jobs) if arguments.wait else EXIT_DONE


def _submit_rollout_array(arguments: argparse.Namespace) -> int:
    from pekoe.launch.rollout_arrays import submit_rollout_array

    if arguments.array is None:
        raise ValueError("--rollout-array: needs --array, e.g. --array 0-15%4")
    refused = [name for name in ("sweep", "seeds", "limit", "wait") if getattr(arguments, name)]
    if refused:
        raise ValueError(
            f"--rollout-array: --{refused[0]} does not belong to it; allowed: --array, --cluster, --dry-run"
        )
    overrides = [*([arguments.config] if arguments.config is not None else []), *arguments.overrides]
    run = RunDirectory(arguments.rollout_array.absolute())
    job = submit_rollout_array(run, arguments.array, overrides, cluster=arguments.cluster, dry_run=arguments.dry_run)
    if job:
        print(f"slurm job {job}, elements {arguments.array}: attach to {run.path}")
    return EXIT_DONE


def _seeds(text: str | None) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ValueError(f"--seeds: {text!r} is not allowed; allowed: whole numbers, 1,2,3") from None


def _resume(arguments: argparse.Namespace) -> int:
    from pekoe.launch.submit import resume

    run = _run_of(arguments, "resume")
    job = resume(run, arguments.overrides)
    print(f"{job.entry.kind} job {job.job_id}: {run.path}", flush=True)
    return _wait([job]) if arguments.wait else EXIT_DONE


def _wait(jobs: Any) -> int:
    """Tells each end; the worst exit code of all."""
    from pekoe.launch.run_errors import JobEndedError, RunFailedError, RunStoppedError

    code = EXIT_DONE
    for job in jobs:
        try:
            result = job.result()
        except (JobEndedError, RunFailedError, RunStoppedError) as error:
            print(f"pekoe: {error}", file=sys.stderr)
            own = getattr(error, "exit_code", EXIT_FAILURE)
            code = own if code in (EXIT_DONE, own) else EXIT_FAILURE
        else:
            print(f"{result.outcome} after {result.steps} steps: {result.run}", flush=True)
    return code


def _cancel(arguments: argparse.Namespace) -> int:
    from pekoe.launch.cancel import cancel

    print(cancel(_run_of(arguments, "cancel"), now=arguments.now))
    return EXIT_DONE


def _logs(arguments: argparse.Namespace) -> int:
    from pekoe.launch.run_logs import choose_files, follow, print_logs

    run = _run_of(arguments, "logs")
    paths = choose_files(run, arguments.attempt, arguments.rank)
    if not paths:
        print(f"pekoe: {run.path} has written nothing yet", file=sys.stderr)
    positions = print_logs(paths, arguments.lines)
    if arguments.follow:
        follow(lambda: choose_files(run, arguments.attempt, arguments.rank), positions, lambda: _goes_on(run))
    return EXIT_DONE


def _goes_on(run: RunDirectory) -> bool:
    """Whether a job or a driver of the run lives; a Slurm without an answer is no end."""
    from pekoe.launch.claim import living_owner
    from pekoe.launch.run_jobs import RunJob
    from pekoe.launch.submitted_jobs import newest_job

    try:
        return living_owner(run) is not None or (newest_job(run) is not None and not RunJob.of(run).has_ended)
    except SlurmError:
        return True


def _run_of(arguments: argparse.Namespace, command: str) -> RunDirectory:
    from pekoe.launch.jobs_text import check_is_no_sweep

    run = RunDirectory(arguments.run.absolute())
    check_is_no_sweep(run.path, command)
    check_is_run(run)
    return run
