"""The `pekoe` command. Imports nothing heavy: each subcommand loads what it needs when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pekoe.launch import cli_jobs, environment
from pekoe.launch.attempts import (
    Attempt,
    begin_fresh,
    begin_resumed,
    check_is_begun,
    check_is_run,
    check_overrides,
    check_resumable,
)
from pekoe.launch.checked_config import load_checked
from pekoe.launch.environment import Facts
from pekoe.launch.stop_signals import EXIT_CONFIGURATION
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory import inspect_shards

if TYPE_CHECKING:
    from pekoe.pipeline.config.run import RunConfig

EXIT_USAGE = 2
"""What argparse ends with, too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; the exit code: 0 done, 75 stopped by a signal (resume it), 78 wrong configuration, 1
    failure."""
    arguments = _parse(_parser(), argv)
    if arguments.version:
        print(f"pekoe {_version()}")
        return 0
    if arguments.command is None:
        _parser().print_help(sys.stderr)
        return EXIT_USAGE
    try:
        return int(arguments.command(arguments))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        if os.environ.get("PEKOE_TRACEBACK"):
            raise
        print(f"pekoe: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """key=value may stand behind flags, too: argparse by itself takes them in one place only."""
    arguments, left = parser.parse_known_args(argv)
    wrong = [text for text in left if text.startswith("-") or "=" not in text]
    if wrong or (left and not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(wrong or left)}")
    if left:
        arguments.overrides = [*arguments.overrides, *left]
    return arguments


def _version() -> str:
    from importlib.metadata import version

    return version("pekoe")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pekoe", description="Asynchronous reinforcement learning of language models."
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    run = commands.add_parser("run", help="start a run, or continue one with --resume")
    run.add_argument("config", nargs="?", help="YAML file (not with --resume)")
    run.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    run.add_argument("--resume", type=Path, metavar="RUN", help="run directory to continue")
    run.set_defaults(command=_run)

    cli_jobs.add_commands(commands)

    config = commands.add_parser("config", help="show, check or import a configuration").add_subparsers(
        required=True, metavar="ACTION"
    )
    for name, command, meaning in (
        ("show", _config_show, "print the resolved tree with each key's meaning"),
        ("check", _config_check, "check every value, start nothing"),
    ):
        one = config.add_parser(name, help=meaning)
        one.add_argument("config")
        one.add_argument("overrides", nargs="*", metavar="key=value")
        one.set_defaults(command=command)
    areal = config.add_parser("import", help="turn an AReaL YAML into ours; notes go to standard error")
    areal.add_argument("file")
    areal.set_defaults(command=_config_import)

    status = commands.add_parser("status", help="what the jobs and each rank of a run are doing")
    status.add_argument("run", type=Path, metavar="RUN", help="run directory, or the folder of a sweep")
    status.add_argument("--stacks", action="store_true", help="also ask all ranks for the stacks of their threads")
    status.set_defaults(command=_status)

    doctor = commands.add_parser(
        "doctor",
        help="what happened to a run, or whether this cluster is fit for runs, and what to do next",
        description="Examines a run by its files alone and changes nothing; or, without a run directory, this machine "
        "and the cluster that a site describes; or the kernels of this machine. Exit code 0: nothing is wrong; 1: "
        "there are problems; 78: neither a run directory nor a site.",
    )
    doctor.add_argument(
        "target", nargs="?", metavar="RUN|SITE", help="run directory, or a site (default: this machine and its cluster)"
    )
    doctor.add_argument("--config", metavar="YAML", help="of a run that is to run here: its models and MPI, too")
    doctor.add_argument("--deep", action="store_true", help="read every byte: hashes of checkpoints, all shards")
    doctor.add_argument(
        "--kernels",
        action="store_true",
        help="instead: which kernels can be used here, and whether they are right",
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(command=_doctor)

    shards = commands.add_parser("shards", help="list, show or verify trajectories")
    inspect_shards.add_arguments(shards)
    shards.set_defaults(command=_shards)

    export = commands.add_parser("export", help="write a checkpoint as a Hugging Face folder")
    export.add_argument("run", type=Path, metavar="RUN", help="run directory")
    export.add_argument("out", type=Path, metavar="OUT", help="folder to write, in Hugging Face format")
    export.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    export.set_defaults(command=_export)

    report = commands.add_parser("report", help="draw the curves of a run")
    report.add_argument("run", type=Path, metavar="RUN", help="run directory; report.html is written into it")
    report.set_defaults(command=_report)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    facts = environment.read(os.environ)
    overrides: list[str] = list(arguments.overrides)
    resumed: RunDirectory | None = None
    if arguments.resume is not None:
        if arguments.config is not None:
            overrides.insert(0, arguments.config)
        resumed = RunDirectory(arguments.resume.absolute())
        (check_is_begun if facts.in_allocation else check_resumable)(resumed)
        check_overrides(overrides)
    elif arguments.config is None:
        raise ValueError("run: neither a configuration nor --resume RUN was given")
    source = str(resumed.config) if resumed else arguments.config
    if facts.in_world and facts.size > 1:
        _join(source, overrides, resumed, facts)
    config, placement = load_checked(source, overrides, quiet=False)
    from pekoe.launch.step_command import choose_launcher

    if choose_launcher(config, facts, placement.world_size) == "join":
        _join(source, overrides, resumed, facts)
    from pekoe.launch.job import run_job, run_of_job

    return run_job(resumed, overrides) if resumed is not None else run_job(run_of_job(config, facts))


def begin(config: RunConfig, resumed: RunDirectory | None, launcher: str, overrides: Sequence[str]) -> Attempt:
    """Fresh, or the next attempt of `resumed`."""
    if resumed is None:
        return begin_fresh(config, launcher, overrides)
    return begin_resumed(resumed, config, launcher, overrides)


def _join(source: str, overrides: Sequence[str], resumed: RunDirectory | None, facts: Facts) -> None:
    """Becomes a rank of the world that this process was started in; does not return."""
    from pekoe.launch.rank import Origin, run_rank

    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())

    def load() -> RunConfig:
        return load_checked(source, overrides, quiet=facts.rank != 0)[0]

    run_rank(Origin(load, None, lambda config: begin(config, resumed, facts.launcher, overrides)))


def _config_show(arguments: argparse.Namespace) -> int:
    from pekoe.pipeline.config.load import load
    from pekoe.pipeline.config.show import show

    print(show(load(arguments.config, arguments.overrides)), end="")
    return 0


def _config_check(arguments: argparse.Namespace) -> int:
    _, placement = load_checked(arguments.config, arguments.overrides, quiet=False)
    print(f"ok: {placement.world_size} ranks, {placement}")
    return 0


def _config_import(arguments: argparse.Namespace) -> int:
    from pekoe.pipeline.config.areal_import import import_areal

    text, notes = import_areal(arguments.file)
    print(text, end="")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from pekoe.launch.claim import is_over
    from pekoe.launch.jobs_text import jobs_text, sweep_text
    from pekoe.launch.sweeps import read_sweep
    from pekoe.pipeline.leases.describe_worlds import describe_worlds
    from pekoe.pipeline.observe.status import status

    sweep = read_sweep(arguments.run)
    if sweep is not None:
        print(sweep_text(sweep))
        return 0
    run = RunDirectory(arguments.run.absolute())
    print(status(arguments.run, over=is_over(run)))
    for text in (jobs_text(run), describe_worlds(run)):
        if text:
            print(text)
    if arguments.stacks:
        from pekoe.pipeline.observe.stack_request import request_stacks

        print(f"\n{request_stacks(arguments.run)}")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    target = arguments.target
    if arguments.kernels:
        if target is not None or arguments.config is not None or arguments.deep:
            raise ValueError("doctor --kernels: looks at this machine alone; it takes no RUN, SITE, --config or --deep")
        from pekoe.launch.doctor.kernels_check import diagnose_kernels

        kernels = diagnose_kernels()
        print(kernels.json() if arguments.json else kernels.text())
        return kernels.exit_code
    if target is None or (not Path(target).is_dir() and _is_site(target)):
        from pekoe.launch.doctor.doctor import diagnose_cluster

        text, code = diagnose_cluster(target, config=arguments.config, as_json=arguments.json)
        print(text)
        return code
    from pekoe.launch.allocation import place
    from pekoe.launch.jobs_text import check_is_no_sweep
    from pekoe.pipeline.runs.doctor import diagnose

    run = RunDirectory(Path(target))
    check_is_no_sweep(run.path, "doctor")
    check_is_run(run)
    found = diagnose(run, deep=arguments.deep, place=place)
    print(found.json() if arguments.json else found.text())
    return found.exit_code


def _is_site(name: str) -> bool:
    """A preset, or a YAML file."""
    from pekoe.pipeline.config.load import site_names

    return name.endswith((".yaml", ".yml")) or name in site_names()


def _shards(arguments: argparse.Namespace) -> int:
    check_is_run(RunDirectory(arguments.run))
    return inspect_shards.main(arguments)


def _export(arguments: argparse.Namespace) -> int:
    from pekoe.launch.allocation import place
    from pekoe.pipeline.config.snapshot import read_run_config
    from pekoe.pipeline.runs.export import export

    run = RunDirectory(arguments.run)
    check_is_run(run)
    config = read_run_config(run)
    print(export(run, config, place(config).actor.engine, arguments.out, arguments.step))
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from pekoe.pipeline.observe.report import report

    run = RunDirectory(arguments.run)
    check_is_run(run)
    print(report(run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
