"""Begins an attempt of a run: makes or finds the run directory, counts the attempt in `run.json`, freezes config
and code."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pekoe.launch.error_record import END_NOTE, make_reserve
from pekoe.launch.fence import REMOTE_SILENCE_SECONDS, process_lives
from pekoe.launch.stop_signals import EXIT_CONFIGURATION
from pekoe.pipeline import files
from pekoe.pipeline.observe.heartbeat_files import read_heartbeats
from pekoe.pipeline.run_directory import RunDirectory

if TYPE_CHECKING:
    from pekoe.pipeline.config.run import RunConfig

PACKAGE_ROOT = Path(__file__).resolve().parents[1]
"""Where `pipeline/` and `launch/` lie: what the snapshot copies."""
FIXED_KEYS = (
    "experiment_name", "trial_name", "cluster.fileroot", "task", "seed", "train_dataset", "actor.path",
    "tokenizer_path", "gconfig.n_samples", "gconfig.temperature", "workflow", "reward.name", "reward.args",
)  # fmt: skip
"""What a resumed run must not change: shards, ledger and checkpoints of earlier attempts were made under it."""

TEACHER_KEYS = ("path", "dtype", "place")
"""What also must not change of a teacher on the engines: its log-probs lie in the shards."""


class RunDirectoryError(ValueError):
    """The run directory cannot be used as asked; the text says the next step."""

    exit_code = EXIT_CONFIGURATION


@dataclass(frozen=True)
class Attempt:
    """One start of a run."""

    run: RunDirectory
    number: int


def note_end(attempt: Attempt, code: int, signal: int | None) -> None:
    """The head, before it leaves an attempt that ends in order: what `pekoe doctor` tells of it later.

    `signal` stopped it; None with code 75: the job's time was over. A full disk costs the note only.
    """
    try:
        files.write_json(
            attempt.run.logs(attempt.number) / END_NOTE, {"code": code, "signal": signal, "time": time.time()}
        )
    except OSError as error:
        if not files.is_full(error):
            raise


def attempt_began(attempt: Attempt) -> float:
    """When it was begun, seconds since 1970."""
    return float(files.read_json(attempt.run.run_json)["attempts"][attempt.number]["began"])


def run_directory(config: RunConfig) -> RunDirectory:
    """fileroot / experiment_name / trial_name."""
    return RunDirectory(Path(config.cluster.fileroot) / config.experiment_name / config.trial_name)


def begin_fresh(config: RunConfig, launcher: str, overrides: Sequence[str] = ()) -> Attempt:
    """The first attempt of a run. RunDirectoryError if the directory holds one that got somewhere."""
    run = run_directory(config)
    remains = _remains(run)
    if remains:
        raise RunDirectoryError(
            f"{run.path} holds a run already ({remains}). Continue it with `pekoe run --resume {run.path}`, "
            "or give another trial_name=…, or remove the folder"
        )
    files.put_away(run.code)
    return _begin(run, config, launcher, overrides, os.getcwd())


def prepare_run(config: RunConfig) -> RunDirectory:
    """A run that a job will begin: its folder with configuration and code, and no attempt yet.

    RunDirectoryError if the directory holds a run that got somewhere.
    """
    run = run_directory(config)
    remains = _remains(run)
    if remains:
        raise RunDirectoryError(
            f"{run.path} holds a run already ({remains}). Continue it with `pekoe resume {run.path}`, "
            "or give another trial_name=…, or remove the folder"
        )
    from pekoe.pipeline.config.snapshot import snapshot_code, write_run_config

    files.put_away(run.code)
    run.create()
    make_reserve(run)
    write_run_config(run, config)
    snapshot_code(run, PACKAGE_ROOT)
    record = {"id": uuid.uuid4().hex, "began": time.time(), "attempts": [], "directory": os.getcwd()}
    files.write_json(run.run_json, record)
    return run


def begin_resumed(run: RunDirectory, config: RunConfig, launcher: str, overrides: Sequence[str] = ()) -> Attempt:
    """The next attempt of a run, with the code of the first."""
    check_resumable(run)
    check_overrides(overrides)
    check_teacher(run, config, overrides)
    return _begin(run, config, launcher, overrides)


def begin_next(
    run: RunDirectory, config: RunConfig, launcher: str, overrides: Sequence[str], notes: Mapping[str, Any]
) -> Attempt:
    """As `begin_resumed`, by a driver that has seen to it that no earlier attempt lives (see `fence`). `notes` stand in
    the attempt's entry of `run.json`."""
    check_overrides(overrides)
    check_teacher(run, config, overrides)
    return _begin(run, config, launcher, overrides, notes=notes)


def check_resumable(run: RunDirectory) -> None:
    """RunDirectoryError unless this is the directory of a run that has begun, and no attempt of it lives."""
    check_is_begun(run)
    check_has_ended(run)


def check_is_begun(run: RunDirectory) -> None:
    """RunDirectoryError unless this is the directory of a run that has begun, or is prepared."""
    missing = [path.name for path in (run.run_json, run.config) if not path.exists()]
    if missing:
        raise RunDirectoryError(
            f"{run.path} cannot be resumed: {' and '.join(missing)} missing; "
            "give the run directory that `pekoe run CONFIG` made"
        )


def check_is_run(run: RunDirectory) -> None:
    """RunDirectoryError for a folder that no run has made."""
    if not (run.run_json.exists() or run.config.exists() or run.metrics.is_dir() or run.shards.is_dir()):
        raise RunDirectoryError(f"{run.path}: not a run directory (no run.json, config.yaml, metrics/ or shards/)")


def first_directory(run: RunDirectory) -> str | None:
    """The directory that the run was first started from; None if that is not known or the directory is gone."""
    if not run.run_json.exists():
        return None
    directory = files.read_json(run.run_json).get("directory")
    return str(directory) if directory and Path(directory).is_dir() else None


def check_has_ended(run: RunDirectory) -> None:
    """RunDirectoryError while a rank of an earlier attempt lives: two attempts would take each other's files away.

    On this host the process is looked for; another host counts as alive while its last heartbeat is young.
    """
    now = time.time()
    for found in read_heartbeats(run):
        beat = found.heartbeat
        if beat.phase == "ended":
            continue
        here = beat.host == socket.gethostname()
        if process_lives(beat.pid) if here else found.age_seconds(now) < REMOTE_SILENCE_SECONDS:
            raise RunDirectoryError(
                f"{run.path}: attempt {found.attempt} still runs: rank {beat.rank} on {beat.host}, pid {beat.pid}, "
                f"heard {found.age_seconds(now):.0f} s ago; stop it (SIGTERM), then resume"
            )


def check_overrides(overrides: Sequence[str]) -> None:
    """RunDirectoryError for a key that a resumed run must keep."""
    names = [override.partition("=")[0] for override in overrides]
    fixed = [
        name
        for name in names
        if any(f"{name}.".startswith(f"{key}.") or key.startswith(f"{name}.") for key in FIXED_KEYS)
    ]
    _refuse(fixed)


def check_teacher(run: RunDirectory, config: RunConfig, overrides: Sequence[str]) -> None:
    """RunDirectoryError where `overrides`, which are in `config`, give the resumed run another teacher, and the engines
    ask the old one or the new one."""
    if not any(override.partition("=")[0].partition(".")[0] == "teacher" for override in overrides):
        return
    from pekoe.pipeline.config.load import load

    before, after = load(run.config).teacher, config.teacher
    if any(teacher is not None and teacher.place == "engine" for teacher in (before, after)):
        _refuse(
            [f"teacher.{key}" for key in TEACHER_KEYS if getattr(before, key, None) != getattr(after, key, None)],
        )


def _refuse(fixed: Sequence[str]) -> None:
    """RunDirectoryError if there are any."""
    if fixed:
        raise RunDirectoryError(
            f"{', '.join(fixed)}: cannot change when a run is resumed, since its data was made under the old value; "
            f"keep {'it' if len(fixed) == 1 else 'them'}, or start a new run with another trial_name"
        )


def _begin(
    run: RunDirectory,
    config: RunConfig,
    launcher: str,
    overrides: Sequence[str],
    directory: str | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Attempt:
    """`directory`: where a fresh run is started from."""
    from pekoe.pipeline.config.snapshot import snapshot_code, write_run_config

    run.create()
    make_reserve(run)
    record: dict[str, Any] = {"id": uuid.uuid4().hex, "began": time.time(), "attempts": []}
    if run.run_json.exists():
        record = files.read_json(run.run_json)
    if directory is not None:
        record["directory"] = directory
    number = len(record["attempts"])
    record["attempts"].append(
        {
            "number": number,
            "began": time.time(),
            "host": socket.gethostname(),
            "launcher": launcher,
            "overrides": list(overrides),
            **(notes or {}),
        }
    )
    before = run.path / f"config-before-{number}.yaml"
    if number > 0 and run.config.exists() and not before.exists():
        # a begin that was killed has kept the true one already
        files.write_bytes(before, run.config.read_bytes())
    write_run_config(run, config)
    snapshot_code(run, PACKAGE_ROOT)
    files.write_json(run.run_json, record)
    return Attempt(run, number)


def _remains(run: RunDirectory) -> str:
    """What is there of a run that got somewhere, in words; empty if nothing."""
    folders = (
        ("checkpoints", run.checkpoints),
        ("metrics", run.metrics),
        ("shards", run.shards),
        ("ledger", run.ledger),
    )
    return ", ".join(name for name, folder in folders if folder.is_dir() and any(folder.iterdir()))
