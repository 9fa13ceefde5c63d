"""The one error record of an attempt: `RUN/errors/attempt-A.json`. Whoever comes first writes it; all others add
nothing."""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pekoe.launch.stop_signals import EXIT_FAILURE
from pekoe.pipeline import files
from pekoe.pipeline.run_directory import RunDirectory

END_NOTE = "end.json"
"""In the folder of an attempt's logs: the exit code of an attempt that ended in order."""
TEXT_LIMIT = 20_000
ALL_STACKS_LIMIT = 1_000_000
"""Characters of all ranks' stacks in a record."""
RESERVE = ".record-reserve"
"""Name in the run directory: room for the record of an attempt that fails since the disk is full."""
RESERVE_BYTES = 32 * 1024


@dataclass(frozen=True)
class ErrorRecord:
    """Who failed, where, doing what."""

    attempt: int
    rank: int
    """-1: no rank failed, the world was ended from outside."""
    host: str
    role: str
    phase: str
    phase_seconds: float
    error: str
    """One line: type and message, or `killed by signal 9 (SIGKILL)`."""
    traceback: str = ""
    thread: str = ""
    pid: int = 0
    log: str = ""
    """The rank's log, relative to the run directory."""
    time: float = field(default_factory=time.time)
    """When it was noticed, seconds since 1970."""
    stacks: dict[str, str] = field(default_factory=dict)
    """What the threads of ranks that had to do with it were doing: rank -> text."""
    code: int = EXIT_FAILURE
    """Exit code of the failure: 78 where the configuration or the run directory is to blame."""

    def sentence(self) -> str:
        """For people, in one line."""
        if self.rank < 0:
            return self.error
        return (
            f"rank {self.rank} ({self.role or 'no role yet'}, {self.host}) failed in phase {self.phase!r}: {self.error}"
        )


def record_path(run: RunDirectory, attempt: int) -> Path:
    return run.errors / f"attempt-{attempt}.json"


def read_record(run: RunDirectory, attempt: int) -> ErrorRecord | None:
    """The record of the attempt; None if there is none."""
    path = record_path(run, attempt)
    if not path.exists():
        return None
    found = files.read_json(path)
    return ErrorRecord(**{name: found[name] for name in ErrorRecord.__dataclass_fields__ if name in found})


def describe(error: BaseException) -> tuple[str, str]:
    """(one line, traceback) of an exception."""
    line = "".join(traceback.format_exception_only(error)).strip()
    text = "".join(traceback.format_exception(error))
    return line[:TEXT_LIMIT], text[-TEXT_LIMIT:]


def stacks_in(error: BaseException) -> dict[str, str]:
    """The stacks that an exception carries in `stacks` (rank -> text), as a record takes them."""
    kept, room = {}, ALL_STACKS_LIMIT
    for rank, text in dict(getattr(error, "stacks", None) or {}).items():
        kept[str(rank)] = str(text)[:room] or "left out: the record is full"
        room = max(0, room - len(str(text)))
    return kept


def write_record(run: RunDirectory, record: ErrorRecord) -> bool:
    """Claims the attempt's record with this one; False where another one is there already.

    It appears whole or not at all: a hard link of a finished temporary file is refused when the name exists. A
    filesystem without hard links gets an exclusive create instead.
    """
    run.errors.mkdir(parents=True, exist_ok=True)
    final = record_path(run, record.attempt)
    if final.exists():
        return False
    part = final.with_name(f"{final.name}.{record.host}.{os.getpid()}.part")
    data = _encode(record)
    try:
        _write(part, data, "wb")
    except OSError as error:
        part.unlink(missing_ok=True)
        if not files.is_full(error):
            raise
        data = _encode(_shortened(record))
        try:
            os.rename(run.path / RESERVE, part)
        except FileNotFoundError:
            # another rank of this attempt took it
            return False
        _write(part, data, "r+b")
    try:
        os.link(part, final)
    except FileExistsError:
        return False
    except OSError:
        return _create_exclusively(final, data)
    finally:
        part.unlink(missing_ok=True)
    return True


def make_reserve(run: RunDirectory) -> None:
    """At the begin of an attempt: blocks on the disk for its error record. OSError when the disk refuses."""
    path = run.path / RESERVE
    if not path.exists() or path.stat().st_size != RESERVE_BYTES:
        files.write_bytes(path, os.urandom(RESERVE_BYTES))


def _encode(record: ErrorRecord) -> bytes:
    return (json.dumps(asdict(record), indent=1, sort_keys=True) + "\n").encode()


def _shortened(record: ErrorRecord) -> ErrorRecord:
    """So that it fits into the reserve: an escaped character has up to 12 bytes."""
    return replace(record, error=record.error[:1000], traceback=record.traceback[-1000:], stacks={})


def _write(path: Path, data: bytes, mode: str) -> None:
    with open(path, mode) as file:
        file.write(data)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def _create_exclusively(final: Path, data: bytes) -> bool:
    try:
        with open(final, "xb") as file:
            file.write(data)
    except FileExistsError:
        return False
    return True
