"""An archived environment is unpacked once on a node, survives the death of whoever unpacks it, and is given up where
nobody uses it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import IO

import psutil
import pytest

WRAPPER = Path(__file__).resolve().parents[2] / "launch" / "packed_environment.py"
SHOW = "import sys, os; print(sys.prefix, os.getpid(), os.environ['VIRTUAL_ENV'], *sys.argv[1:])"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "packed", symlinks=True)
    path = folder / "packed.tar"
    subprocess.run(["tar", "-cf", path, "-C", folder, "packed"], check=True)
    return path


def start(archive: Path, node: Path, *command: str, seconds: float = 60.0) -> subprocess.Popen[str]:
    node.mkdir(exist_ok=True)
    arguments = [sys.executable, "-I", "-S", str(WRAPPER), str(archive), "--seconds", str(seconds), "--", *command]
    environ = {"PATH": os.environ["PATH"], "SLURM_TMPDIR": str(node), "TMPDIR": str(node)}
    return subprocess.Popen(arguments, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    return out, err


def environments(node: Path) -> list[Path]:
    return sorted(path for path in next(node.glob("pekoe-*-environments")).iterdir() if path.is_dir())


def test_ranks_of_a_node_unpack_once_and_run_inside(archive: Path, tmp_path: Path) -> None:
    ranks = [start(archive, tmp_path, "python", "-c", SHOW, f"rank {index}") for index in range(6)]
    ended = [end(rank) for rank in ranks]
    (root,) = environments(tmp_path)
    for index, (rank, (out, _)) in enumerate(zip(ranks, ended, strict=True)):
        assert out.split(maxsplit=3) == [f"{root}/packed", str(rank.pid), f"{root}/packed", f"rank {index}\n"]
    assert sum("unpacked in" in err for _, err in ended) == 1
    _, err = end(start(archive, tmp_path, "python", "-c", SHOW))
    assert "unpacked" not in err, "a later job of the node finds it"


def test_the_exit_code_and_the_signal_are_the_programs(archive: Path, tmp_path: Path) -> None:
    end(start(archive, tmp_path, "python", "-c", "raise SystemExit(75)"), 75)
    waiting = start(archive, tmp_path, "python", "-c", "print(1, flush=True); import time; time.sleep(60)")
    assert waiting.stdout is not None
    waiting.stdout.readline()
    waiting.send_signal(signal.SIGTERM)
    end(waiting, -signal.SIGTERM)


def test_whoever_unpacks_may_be_killed(archive: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow.tar"
    os.mkfifo(slow)
    first = start(slow, tmp_path / "node", "python", "-c", SHOW)
    feed = open_when_read(slow)
    (reader,) = psutil.Process(first.pid).children()
    first.kill()
    first.communicate(timeout=60)
    second = start(slow, tmp_path / "node", "python", "-c", SHOW)
    wait_until_it_knows_the_archive(second)
    whole = archive.read_bytes()
    with feed:
        feed.write(whole[:2048])
    psutil.wait_procs([reader], timeout=90)
    assert not reader.is_running() or reader.status() == psutil.STATUS_ZOMBIE
    with open_when_read(slow) as feed:
        feed.write(whole)
    out, _ = end(second)
    assert out.startswith(str(environments(tmp_path / "node")[0]))


def open_when_read(path: Path) -> IO[bytes]:
    """The writing end of a FIFO, when somebody reads it."""
    deadline = time.monotonic() + 30
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        else:
            os.set_blocking(descriptor, True)
            return os.fdopen(descriptor, "wb")


def wait_until_it_knows_the_archive(process: subprocess.Popen[str]) -> None:
    """Writing into a FIFO changes its time, hence its key."""
    deadline = time.monotonic() + 30
    while not any(link.readlink().suffix == ".lock" for link in Path(f"/proc/{process.pid}/fd").iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_waiting_has_a_limit(tmp_path: Path) -> None:
    never = tmp_path / "never.tar"
    os.mkfifo(never)
    first = start(never, tmp_path / "node", "python", "-c", SHOW)
    feed = open_when_read(never)
    _, err = end(start(never, tmp_path / "node", "python", "-c", SHOW, seconds=0.5), 1)
    assert "was not unpacked in time" in err
    first.kill()
    first.communicate(timeout=60)
    feed.close()


def test_an_environment_that_nobody_uses_makes_room(archive: Path, tmp_path: Path) -> None:
    copies = [tmp_path / f"copy-{index}.tar" for index in range(3)]
    for copy in copies:
        copy.write_bytes(archive.read_bytes())
    node = tmp_path / "node"
    used = start(copies[0], node, "python", "-c", "print(1, flush=True); import time; time.sleep(60)")
    assert used.stdout is not None
    used.stdout.readline()
    (first,) = environments(node)
    end(start(copies[1], node, "python", "-c", SHOW))
    end(start(copies[2], node, "python", "-c", SHOW))
    assert first in environments(node)
    assert len(environments(node)) == 2
    used.kill()
    used.communicate(timeout=60)


def test_a_place_that_is_too_small_is_left(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "node").write_text("not a folder")
    environ = {"PATH": os.environ["PATH"], "SLURM_TMPDIR": str(tmp_path / "node"), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(WRAPPER), str(archive), "--", "python3", "-c", SHOW],
        env=environ, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.startswith(str(environments(tmp_path)[0]))


def test_a_place_in_which_nothing_can_be_noted_is_left(archive: Path, tmp_path: Path) -> None:
    """The last file does not fit any more: then nobody may unpack there again and again."""
    node, other = tmp_path / "node", tmp_path / "other"
    rank = start(archive, node, "python", "-c", SHOW)
    end(rank)
    (done,) = next(node.glob("pekoe-*-environments")).glob("*.done")
    done.unlink()
    done.symlink_to("/nowhere/at/all")
    other.mkdir()
    environ = {"PATH": os.environ["PATH"], "SLURM_TMPDIR": str(node), "TMPDIR": str(other)}
    second = subprocess.run(
        [sys.executable, "-I", "-S", str(WRAPPER), str(archive), "--seconds", "20", "--", "python3", "-c", SHOW],
        env=environ, capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    assert second.stdout.startswith(str(environments(other)[0]))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["/nowhere/packed.tar", "--", "python"], "No such file or directory"),
        (["/nowhere/packed.tar", "python"], "is not: packed_environment.py ARCHIVE"),
        (["ARCHIVE", "--seconds", "x", "--", "python"], "is not: packed_environment.py ARCHIVE"),
        (["ARCHIVE", "--", "perl"], "bin/perl is not a program in it"),
    ],
)
def test_mistakes_are_configuration(archive: Path, tmp_path: Path, arguments: list[str], text: str) -> None:
    words = [str(archive) if word == "ARCHIVE" else word for word in arguments]
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(WRAPPER), *words],
        env={"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 78
    assert text in done.stderr


def test_it_needs_the_standard_library_alone() -> None:
    code = (
        f"import runpy, sys; runpy.run_path({str(WRAPPER)!r}); print(*{{name.split('.')[0] for name in sys.modules}})"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert set(done.stdout.split()) <= set(sys.stdlib_module_names) | {"__main__", "sitecustomize"}
