"""What a rank says when its disk is full: prints cost nothing, the error record has room kept for it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from pekoe.launch.error_record import RESERVE, RESERVE_BYTES, ErrorRecord, make_reserve, record_path, write_record
from pekoe.launch.rank_log import LogFile, _open_stream
from pekoe.pipeline import files
from pekoe.pipeline.run_directory import RunDirectory

PRINTS = """
import logging, os, sys
from pathlib import Path
from pekoe.launch.rank_log import open_log
open_log(Path(sys.argv[1]), 1, is_head=False)
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
for stream in (sys.stdout, sys.stderr):
    print("no room for this" * 10_000, file=stream, flush=True)
logging.error("nor for this")
Path(sys.argv[2]).write_text("went on")
"""


def test_who_prints_into_a_full_log_goes_on(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    done = subprocess.run([sys.executable, "-c", PRINTS, str(tmp_path / "rank-1.log"), str(mark)], timeout=60)
    assert done.returncode == 0
    assert mark.read_text() == "went on"


def test_other_errors_of_a_log_are_errors(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "log", os.O_RDONLY | os.O_CREAT)
    with pytest.raises(OSError, match="Bad file descriptor"):
        LogFile(descriptor, "w", closefd=False).write(b"text")
    stream = _open_stream(os.open(tmp_path / "log", os.O_WRONLY))
    print("ä line", file=stream)
    assert (tmp_path / "log").read_text() == "ä line\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def no_room_for_new_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk: what is there can be written over, nothing can be made."""
    import builtins

    original = builtins.open

    def refusing(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> BinaryIO:
        if "w" in mode or "x" in mode:
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        return original(file, mode, *arguments, **named)

    monkeypatch.setattr(builtins, "open", refusing)


def test_the_record_takes_the_room_that_was_kept_for_it(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    make_reserve(run)
    assert (run.path / RESERVE).stat().st_size == RESERVE_BYTES
    long = "\N{GRINNING FACE}" * 20_000
    record = ErrorRecord(3, 0, "here", "trainer", "waiting", 1.0, f"DiskFull: {long}", long, stacks={"1": long})
    no_room_for_new_files(monkeypatch)
    assert write_record(run, record)
    assert not write_record(run, record), "the first one counts"
    monkeypatch.undo()
    written = json.loads(record_path(run, 3).read_text())
    assert written["error"].startswith("DiskFull: ")
    assert written["rank"] == 0
    assert [path.name for path in run.errors.iterdir()] == ["attempt-3.json"]
    assert not (run.path / RESERVE).exists()
    make_reserve(run)
    assert (run.path / RESERVE).exists(), "the next attempt keeps room again"


def test_a_second_rank_without_room_leaves_it_to_the_first(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    no_room_for_new_files(monkeypatch)
    assert not write_record(run, ErrorRecord(0, 1, "here", "rollout", "idle", 1.0, "no room"))
    assert not list(run.errors.iterdir())


def test_without_need_the_reserve_stays(run: RunDirectory) -> None:
    make_reserve(run)
    before = (run.path / RESERVE).stat().st_ino
    assert write_record(run, ErrorRecord(0, 1, "here", "rollout", "idle", 1.0, "something else"))
    make_reserve(run)
    assert (run.path / RESERVE).stat().st_ino == before
    assert files.read_json(record_path(run, 0))["error"] == "something else"
