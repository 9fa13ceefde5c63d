"""kill -9 of a rank, of its nursery, of both: nothing that the engine had is left, and nobody else is hurt."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from child_worlds import alive, eventually, settings

from pekoe.pipeline.rollout.child import nursery as nursery_module
from pekoe.pipeline.rollout.child.child_engine import ChildEngine
from pekoe.pipeline.rollout.child.nursery import EngineNursery
from pekoe.pipeline.rollout.engine import EngineFailedError, GenerationRequest

HERE = Path(__file__).resolve().parent
GONE_SECONDS = 30.0


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process like the one that the engine starts, but not its own."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, str(HERE / "child_rank.py"), str(tmp_path), "grandchild"], cwd=HERE)
    yield process
    process.kill()
    process.wait()


def listening(pids: list[int]) -> set[str]:
    """Inodes of the listening TCP sockets that these processes hold."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    open_now = {fields[9] for fields in lines if fields[3] == "0A"}
    held = set()
    for pid in pids:
        for link in Path("/proc", str(pid), "fd").iterdir():
            held.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    return open_now & held


def shared_files(pid: int) -> set[str]:
    """What a process has mapped of the node's memory, named or not."""
    lines = Path("/proc", str(pid), "maps").read_text().splitlines()
    paths = {line.split(None, 5)[5] for line in lines if len(line.split(None, 5)) == 6}
    return {path for path in paths if path.startswith(("/dev/shm/", "/memfd:"))}


@pytest.mark.parametrize("victims", ["rank", "rank and nursery", "stopped nursery"])
def test_a_killed_rank_leaves_nothing(
    rank: subprocess.Popen[bytes], stranger: int, tmp_path: Path, victims: str
) -> None:
    assert eventually((tmp_path / "pids").exists, 60)
    me, nursery, child, *others = map(int, (tmp_path / "pids").read_text().split())
    assert me == rank.pid
    assert len(others) == 2
    assert alive(nursery, child, *others) == {nursery, child, *others}
    assert listening([nursery, child]) == set()
    shared = shared_files(child)
    assert any(name.startswith("/memfd:pekoe-weights") for name in shared)
    named = [name for name in shared if not name.endswith(" (deleted)")]
    if victims == "stopped nursery":
        os.kill(nursery, signal.SIGSTOP)
    os.kill(rank.pid, signal.SIGKILL)
    if victims == "rank and nursery":
        os.kill(nursery, signal.SIGKILL)
        assert eventually(lambda: not alive(nursery, child), GONE_SECONDS)
        for pid in others:  # they have lost both who would have ended them
            os.kill(pid, signal.SIGKILL)
    if victims == "stopped nursery":
        assert eventually(lambda: not alive(child, *others), GONE_SECONDS)
        os.kill(nursery, signal.SIGCONT)
    assert eventually(lambda: not alive(nursery, child, *others), GONE_SECONDS)
    assert alive(stranger) == {stranger}
    assert [name for name in named if os.path.exists(name)] == []


def test_a_killed_nursery_takes_the_engine_along(stranger: int, tmp_path: Path) -> None:
    heard: list[BaseException] = []
    with EngineNursery() as nursery:
        engine = ChildEngine(nursery, "child_worlds:EchoEngine", settings("grandchild"), on_failure=heard.append)
        engine.load_adapter("notes", tmp_path, 0)
        others = [int(pid) for pid in (tmp_path / "notes").read_text().split("\n")[1].split()]
        os.kill(nursery.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(EngineFailedError):
            asyncio.run(engine.generate(GenerationRequest((1,), seed=60_000)))
        assert time.monotonic() - started < GONE_SECONDS
        assert heard == [engine.failure]
        assert eventually(lambda: not alive(engine.pid, *others), GONE_SECONDS)
        assert alive(stranger) == {stranger}
        with pytest.raises(EngineFailedError, match="was not started: its nursery has ended"):
            ChildEngine(nursery, "child_worlds:EchoEngine", settings())
        engine.close()


def test_a_stopped_nursery_does_not_save_a_stalled_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nursery_module, "KILL_SECONDS", 1.0)
    with EngineNursery() as nursery:
        engine = ChildEngine(nursery, "child_worlds:EchoEngine", settings())
        os.kill(nursery.pid, signal.SIGSTOP)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineFailedError):
            asyncio.run(engine.generate(GenerationRequest((1,), seed=60_000)))
        assert eventually(lambda: not alive(nursery.pid, engine.pid))
        engine.close()


def test_the_nursery_is_light_and_idle() -> None:
    with EngineNursery() as nursery:
        assert eventually(lambda: "nursery_process" in Path(f"/proc/{nursery.pid}/cmdline").read_text())
        engine = ChildEngine(nursery, "child_worlds:EchoEngine", settings())
        maps = Path(f"/proc/{nursery.pid}/maps").read_text()
        assert "libtorch" not in maps
        assert "numpy" not in maps
        before = cpu_seconds(nursery.pid) + cpu_seconds(engine.pid)
        time.sleep(1.5)
        assert cpu_seconds(nursery.pid) + cpu_seconds(engine.pid) - before < 0.1
        engine.close()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
