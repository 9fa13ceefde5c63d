"""Caches on the node's disk: of this user, job and array task; other places when one is full or not to be written;
what a dead rank left behind holds nobody up."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from pekoe.launch import node_cache
from pekoe.launch.environment import Facts, read

FACTS = read({}, "h")


def of_job(job: str) -> Facts:
    return read({"SLURM_JOB_ID": job}, "h")


def test_cache_is_of_the_job_and_falls_back(tmp_path: Path) -> None:
    in_array = read({"SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "13"}, "h")
    (tmp_path / "ok").mkdir()
    (tmp_path / "file").write_text("not a folder")
    environ = {"SLURM_TMPDIR": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "ok")}
    cache = node_cache.find(environ, in_array)
    assert cache == tmp_path / "ok" / f"pekoe-{os.getuid()}-10_3"
    assert node_cache.find(environ, in_array) == cache
    assert cache.stat().st_mode & 0o777 == 0o700
    again = read({"SLURM_JOB_ID": "13", "SLURM_RESTART_COUNT": "4"}, "h")
    assert node_cache.find(environ, again) == node_cache.find(environ, of_job("13"))


def test_a_full_disk_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, free = tmp_path / "full", tmp_path / "free"
    full.mkdir()
    free.mkdir()
    whole = tempfile.TemporaryFile

    def temporary_file(dir: Path) -> Any:
        if dir.is_relative_to(full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", temporary_file)
    environ = {"SLURM_TMPDIR": str(full), "TMPDIR": str(free)}
    assert node_cache.find(environ, FACTS).parent == free


def test_a_nearly_full_disk_is_taken_only_without_a_better_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tight, roomy = tmp_path / "tight", tmp_path / "roomy"
    tight.mkdir()
    roomy.mkdir()
    usage = shutil.disk_usage(tmp_path)

    def disk_usage(path: Path) -> Any:
        return usage._replace(free=1 << 20 if not path.is_relative_to(roomy) else 1 << 40)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    environ = {"SLURM_TMPDIR": str(tight), "TMPDIR": str(roomy)}
    assert node_cache.find(environ, FACTS).parent == roomy
    shutil.rmtree(roomy)
    assert node_cache.find(environ, FACTS).parent == tight


def test_no_place_for_caches_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OSError, match="set TMPDIR"):
        node_cache.find({"TMPDIR": str(tmp_path)}, FACTS)


def test_a_link_or_a_strangers_folder_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap, good = tmp_path / "trap", tmp_path / "good"
    (tmp_path / "elsewhere").mkdir()
    trap.mkdir()
    good.mkdir()
    (trap / f"pekoe-{os.getuid()}-cache").symlink_to(tmp_path / "elsewhere")
    assert node_cache.find({"SLURM_TMPDIR": str(trap), "TMPDIR": str(good)}, FACTS).parent == good
    if os.geteuid() == 0:
        strange = tmp_path / "strange"
        (strange / f"pekoe-{os.getuid()}-cache").mkdir(parents=True)
        os.chown(strange / f"pekoe-{os.getuid()}-cache", 12345, 12345)
        assert node_cache.find({"SLURM_TMPDIR": str(strange), "TMPDIR": str(good)}, FACTS).parent == good


HOLDER = """
import sys
from pathlib import Path
from pekoe.launch import node_cache
folder = Path(sys.argv[1])
node_cache.hold(folder)
print(node_cache.own_folder(folder, 0).name, flush=True)
input()
"""


def test_ranks_have_a_folder_each_and_stale_locks_of_the_dead_are_gone(tmp_path: Path) -> None:
    def start() -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    first, its = start()
    second, other = start()
    assert (its, other) == ("own-0", "own-1")
    lock = tmp_path / "own-0" / "extensions" / "fused" / "lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("")
    kernel = lock.with_name("fused.so")
    kernel.write_text("built")
    first.kill()
    first.communicate(timeout=60)
    third, its = start()
    assert its == "own-0"
    assert not lock.exists(), "a lock file that nobody holds would be waited for without end"
    assert kernel.exists()
    for process in (second, third):
        process.communicate("", timeout=60)


def test_caches_of_jobs_that_ended_are_deleted_after_a_day(tmp_path: Path) -> None:
    mine, ended, fresh, used = (tmp_path / f"pekoe-{os.getuid()}-{job}" for job in ("1", "2", "3", "4"))
    stranger = tmp_path / f"pekoe-{os.getuid()}-environments"
    for folder in (mine, ended, fresh, used, stranger):
        folder.mkdir()
    for folder in (mine, ended, fresh, used):
        (folder / ".held").touch()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(used)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    long_ago = time.time() - 2 * node_cache.UNUSED_SECONDS
    for folder in (mine, ended, used):
        os.utime(folder / ".held", (long_ago, long_ago))
    assert node_cache.delete_unused(mine) == [ended]
    assert [folder.exists() for folder in (mine, ended, fresh, used, stranger)] == [True, False, True, True, True]
    holder.communicate("", timeout=60)
