"""What the doctor tries on a shared filesystem, with two threads as the two ranks, and what it makes of the figures."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pekoe.launch.doctor import filesystem_trial
from pekoe.launch.doctor.filesystem_check import judge
from pekoe.launch.doctor.filesystem_trial import FilesystemFacts, exercise, filesystem_kind
from pekoe.launch.doctor.quota import used_share
from pekoe.launch.doctor.rank_pair import Pair, attempt, seconds_until
from pekoe.pipeline import files
from pekoe.pipeline.runs.finding import Finding

WATCHER = "watcher"
SECONDS = 20.0


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem_trial, "REPLACE_SECONDS", 0.3)


class Meeting:
    """Values that two threads lay down for each other."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=SECONDS)
        self.values: list[Any] = [None, None]

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


class ThreadPeer:
    """One of two ranks."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting = meeting
        self.rank = rank

    def share(self, value: Any, root: int = 0) -> Any:
        return self.meeting.exchange(self.rank, value)[root]

    def collect(self, value: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, value)


def tried(root: Path) -> tuple[FilesystemFacts, list[Finding]]:
    meeting = Meeting()
    found: list[FilesystemFacts] = []

    def work(rank: int) -> None:
        found.append(exercise(Pair(ThreadPeer(meeting, rank), 1), root, root / ".trial", ["n1", "n2"]))

    watcher = threading.Thread(target=work, args=(1,), name=WATCHER)
    watcher.start()
    work(0)
    watcher.join(SECONDS)
    assert len(found) == 2
    return found[0], judge(found[0])


def problems(findings: list[Finding]) -> list[str]:
    return [one.text for one in findings if one.severity == "problem"]


def in_watcher() -> bool:
    return threading.current_thread().name == WATCHER


def test_a_good_filesystem(tmp_path: Path) -> None:
    facts, findings = tried(tmp_path)
    assert [one for one in findings if one.severity != "ok" and not one.text.startswith("locks")] == []
    assert facts.reads > 10
    assert facts.torn == facts.missing == facts.stale == 0
    assert facts.exclusive_twice == facts.claimed_twice == facts.exclusive_lost == facts.claimed_lost == 0
    assert facts.locks["flock"] == "excludes"
    # two threads are one process, which fcntl does not keep out
    assert facts.locks["fcntl"] == "pretends"
    assert facts.shard == ""
    assert facts.small_files_per_second is not None
    assert facts.small_files_per_second > 0
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small filesystem needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no filesystem can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True, timeout=90)


def test_a_full_disk_is_said_and_left_as_it_was(tiny_disk: Path) -> None:
    facts, findings = tried(tiny_disk)
    assert facts.kind == "tmpfs"
    assert problems(findings) == [
        f"{tiny_disk}: writing fails: ENOSPC: No space left on device (0.0 GiB, {facts.free_files:,} files free)"
    ]
    assert list(tiny_disk.iterdir()) == []


def test_a_quota_that_is_exceeded_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Any, data: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(files.disk, "write", refuse)
    monkeypatch.setattr("pekoe.launch.doctor.filesystem_trial._clocks", lambda *_: None)
    _, findings = tried(tmp_path)
    assert len(problems(findings)) == 1
    assert "writing fails: EDQUOT" in problems(findings)[0]
    assert "quota" in next(one.next_step for one in findings if one.severity == "problem")


def test_a_folder_that_cannot_be_made() -> None:
    _, findings = tried(Path("/proc/sys"))
    assert len(problems(findings)) == 1
    assert "cannot be tried" in problems(findings)[0]


def test_a_folder_of_each_node_alone_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda self: not in_watcher() and original(self))
    monkeypatch.setattr(filesystem_trial, "VISIBLE_SECONDS", 0.2)
    _, findings = tried(tmp_path)
    assert len(problems(findings)) == 1
    assert "a folder made on n1 was not seen on n2" in problems(findings)[0]
    assert "cluster.fileroot" in next(one.next_step for one in findings if one.severity == "problem")


def test_names_that_come_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a network filesystem that remembers for a second that a name is not there."""
    looked: dict[str, float] = {}
    original = Path.exists

    def late(self: Path) -> bool:
        if not in_watcher() or self.name != "new-0":
            return original(self)
        return time.monotonic() - looked.setdefault(self.name, time.monotonic()) > 1.2 and original(self)

    monkeypatch.setattr(Path, "exists", late)
    facts, findings = tried(tmp_path)
    assert facts.name_seconds is not None
    assert facts.name_seconds > 1.0
    said = next(one for one in findings if one.text.startswith("late for the other rank: a renamed file after "))
    assert said.severity == "note"
    assert "actimeo" in said.next_step


def test_a_filesystem_whose_exclusive_names_and_renames_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims that both win; a replacement that a reader sees in the middle."""
    monkeypatch.setattr("pekoe.launch.doctor.filesystem_trial._create", lambda names: list(range(len(names))))
    original = files.write_bytes

    def in_place(path: Path, data: bytes) -> None:
        if path.name != "pointer":
            original(path, data)
            return
        with open(path, "wb") as file:
            for start in range(0, len(data), 512):
                file.write(data[start : start + 512])
                file.flush()
                time.sleep(0)

    monkeypatch.setattr(files, "write_bytes", in_place)
    facts, findings = tried(tmp_path)
    assert facts.torn > 0
    said = problems(findings)
    assert any("both ranks won the same claim: 40 times by O_EXCL, 0 times by rename" in text for text in said)
    assert any("of a file under replacement gave a mixture" in text for text in said)


def fact(**values: Any) -> FilesystemFacts:
    good: dict[str, Any] = {
        "root": "/scratch", "writer": "n1", "watcher": "n2", "kind": "lustre", "mode": "0o700", "folder_seconds": 0.01,
        "name_seconds": 0.01, "list_seconds": 0.01, "replaced_seconds": 0.01, "reads": 100,
        "locks": {"flock": "excludes", "fcntl": "excludes"}, "skew": {"n1": 0.0, "n2": 0.01}, "skew_error": 0.001,
        "server_skew": 0.0, "free_bytes": 1 << 42, "free_files": 1 << 30, "bulk_bytes_per_second": 1e9,
        "small_files_per_second": 300.0,
    }  # fmt: skip
    return FilesystemFacts(**{**good, **values})


@pytest.mark.parametrize(
    ("values", "severity", "text"),
    [
        ({}, "ok", "clocks agree within 0.01 s"),
        ({"sync_folder": "EINVAL"}, "ok", "folders cannot be fsynced (EINVAL)"),
        ({"sync_folder": "EIO"}, "problem", "fsync of a folder fails: EIO"),
        ({"mode": "0o755"}, "note", "others may read run directories"),
        ({"whole": False}, "problem", "seen before all of its content"),
        ({"replaced_seconds": None}, "problem", "not seen by the other rank within 6 s: the new content"),
        ({"list_seconds": 3.2}, "note", "a new name in a listing after 3.2 s"),
        ({"stale": 3}, "note", "3 of 100 reads of a file under replacement found none (0 ENOENT, 3 ESTALE)"),
        ({"claimed_twice": 1}, "problem", "0 times by O_EXCL, 1 times by rename"),
        ({"claimed_lost": 2}, "problem", "nobody won 2 claims"),
        ({"locks": {"flock": "pretends", "fcntl": "excludes"}}, "note", "a lock that pretends lets both in"),
        ({"shard": "BadShard: cut"}, "problem", "a shard written on n1 is not read on n2: BadShard: cut"),
        ({"skew": {"n1": 0.0, "n2": -7.0}}, "note", "the clock of n2 is -7.0 s from n1's"),
        ({"skew": {"n1": 0.0, "n2": 90.0}}, "problem", "the clock of n2 is +90.0 s"),
        ({"server_skew": 12.0}, "note", "the file server's clock is +12.0 s"),
        ({"small_files_per_second": 4.0}, "note", "4 small files a second"),
        ({"free_files": 500}, "note", "500 files free"),
        ({"quota": " /scratch 95 0 100 - 10 0 0 -"}, "note", "95% of a quota are used"),
        ({"error": "EACCES: Permission denied"}, "problem", "cannot be tried: EACCES"),
    ],
)
def test_what_figures_mean(values: dict[str, Any], severity: str, text: str) -> None:
    matching = [one for one in judge(fact(**values)) if text in one.text]
    assert [one.severity for one in matching] == [severity]
    if severity == "problem":
        assert matching[0].next_step
    assert all(one.severity == "ok" for one in judge(fact()))


@pytest.mark.parametrize(
    ("words", "share"),
    [
        (" /mnt/lustre 900* 500 1000 6d23h59m 10 0 0 -", 900 / 500),
        ("  /a/very/long/path\n   90 0 100 - 5 0 10 -", 0.9),
        ("/dev/sda1 10 20 0 0 80 100 90 0", 80 / 90),
        (" /mnt/lustre 900 0 0 - 10 0 0 -", None),
        ("none", None),
    ],
)
def test_quota_of_lfs_and_quota(words: str, share: float | None) -> None:
    assert used_share(words) == (pytest.approx(share) if share is not None else None)


def test_errors_of_one_rank_are_answers() -> None:
    def refuse() -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    assert attempt(refuse).code == "ENOLCK"
    assert attempt(lambda: [][0]).error == "IndexError: list index out of range"
    assert seconds_until(lambda: False, 0.05) is None
    assert filesystem_kind(Path("/proc/self")) == "proc"
