"""A killed world leaves no memory behind on its node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pekoe.launch.shared_memory import LIBRARIES, MEMORY, mapped_files, remove_files

PROGRAM = Path(__file__).resolve().parent / "shared_memory_program.py"


@pytest.mark.parametrize("victim", [0, 1])
def test_what_mpi_mapped_is_gone_after_a_kill(victim: int, tmp_path: Path) -> None:
    mpiexec = Path(sys.prefix) / "bin" / "mpiexec"
    process = subprocess.Popen(
        [str(mpiexec), "-n", "2", sys.executable, str(PROGRAM), str(tmp_path)], stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"{rank}.joined").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    pid, *files = (tmp_path / f"{victim}.joined").read_text().split()
    assert files
    assert all(path.startswith(MEMORY) and Path(path).exists() for path in files)
    os.kill(int(pid), signal.SIGKILL)
    process.wait(timeout=90)
    assert not [path for path in files if Path(path).exists()]


def test_only_memory_of_mpi_libraries_is_removed(tmp_path: Path) -> None:
    other = tmp_path / "mpich_shm_other"
    other.write_bytes(b"")
    remove_files([str(other), f"{MEMORY}mpich_shm_that_is_not_there"])
    assert other.exists()
    assert mapped_files() == []
    assert all("/" not in name for name in LIBRARIES)
