"""`pekoe logs RUN`: what the jobs and the ranks of a run have written, found by the run directory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from pekoe.launch.attempts import RunDirectoryError
from pekoe.launch.submitted_jobs import jobs_of
from pekoe.pipeline.run_directory import RunDirectory

MOST_FILES = 16
BLOCK_BYTES = 1 << 16
POLL_SECONDS = 0.5
LOOK_SECONDS = 5.0
"""Between two looks at whether the run goes on."""


def choose_files(run: RunDirectory, attempt: int | None = None, rank: int | None = None) -> list[Path]:
    """With a rank, its log; with an attempt, all of it; with neither, what the newest job printed and the head's log.

    RunDirectoryError says what there is, when the file asked for is not there.
    """
    attempts = sorted(int(path.name) for path in run.path.glob("logs/*") if path.name.isdigit())
    if attempt is not None and attempt not in attempts:
        raise RunDirectoryError(f"{run.path} has no logs of attempt {attempt}; there are: {_listed(attempts)}")
    folder = run.logs(attempt if attempt is not None else attempts[-1]) if attempts else None
    ranks = sorted(folder.glob("rank-*.log"), key=_rank) if folder is not None else []
    if rank is not None:
        found = [path for path in ranks if _rank(path) == rank]
        if not found:
            raise RunDirectoryError(f"{folder or run.path} has no log of rank {rank}; there are: {_listed(ranks)}")
        return found
    if attempt is not None and folder is not None:
        return [*_others(folder), *ranks][:MOST_FILES]
    printed = [path for path in _outputs(run)[-1:] if path.exists()]
    return [*printed, *(_others(folder) if folder else []), *ranks[:1]]


def print_logs(paths: Sequence[Path], lines: int, out: TextIO | None = None) -> dict[Path, int]:
    """The last lines of each, with its name above where there are several; returns how far each was read, in bytes."""
    out = out or sys.stdout
    positions = {}
    for path in paths:
        text, size = last_lines(path, lines)
        if len(paths) > 1:
            print(f"==> {path} <==", file=out)
        out.write(text if not text or text.endswith("\n") else f"{text}\n")
        positions[path] = size
    out.flush()
    return positions


def follow(
    choose: Callable[[], Sequence[Path]],
    positions: dict[Path, int],
    goes_on: Callable[[], bool],
    out: TextIO | None = None,
) -> None:
    """Prints what is added, to files that `choose` names later, too, until the run no longer goes on and all is
    printed."""
    out = out or sys.stdout
    shown = next(reversed(positions), None)
    ending, looked = False, time.monotonic()
    while True:
        added = False
        for path in {**positions, **dict.fromkeys(choose())}:
            text, positions[path] = _read_from(path, positions.get(path, 0))
            if not text:
                continue
            added = True
            if path != shown:
                print(f"==> {path} <==", file=out)
                shown = path
            out.write(text)
        out.flush()
        if not added and ending:
            return
        if not added and time.monotonic() - looked > LOOK_SECONDS:
            ending, looked = not goes_on(), time.monotonic()
        time.sleep(0.0 if added else POLL_SECONDS)


def last_lines(path: Path, lines: int) -> tuple[str, int]:
    """The last lines of a file that may be huge, and its size."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        position, data = size, b""
        while position > 0 and data.count(b"\n") <= lines:
            step = min(BLOCK_BYTES, position)
            position -= step
            file.seek(position)
            data = file.read(step) + data
    kept = data.splitlines(keepends=True)[-lines:] if lines > 0 else []
    return b"".join(kept).decode(errors="replace"), size


def _read_from(path: Path, position: int) -> tuple[str, int]:
    with open(path, "rb") as file:
        file.seek(position)
        data = file.read(BLOCK_BYTES)
    return data.decode(errors="replace"), position + len(data)


def _outputs(run: RunDirectory) -> list[Path]:
    """What the jobs of the run print to, oldest first."""
    return [entry.output for entry in jobs_of(run) if entry.output is not None]


def _others(folder: Path) -> list[Path]:
    """What is no rank's: of srun, of the launcher."""
    names = ("*.log", "*.out", "*.txt")
    found = {path for pattern in names for path in folder.glob(pattern)}
    return sorted(path for path in found if not path.name.startswith("rank-"))


def _rank(path: Path) -> int:
    text = path.stem.partition("-")[2]
    return int(text) if text.isdigit() else -1


def _listed(found: Sequence[int] | Sequence[Path]) -> str:
    names = [str(one) if isinstance(one, int) else one.name for one in found]
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "none"
