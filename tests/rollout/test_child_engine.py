"""An engine in a child process: its calls, its errors, its weights, and what becomes of it when it dies or stalls."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from child_worlds import alive, eventually, settings

from pekoe.pipeline.framed_stream import frame
from pekoe.pipeline.rollout.child import silence_watch
from pekoe.pipeline.rollout.child.buckets import DeviceBucket, ReceivedBucket
from pekoe.pipeline.rollout.child.child_engine import ChildEngine
from pekoe.pipeline.rollout.child.nursery import EngineNursery
from pekoe.pipeline.rollout.child.silence_watch import ChildLimits, SilenceWatch
from pekoe.pipeline.rollout.engine import EngineClosedError, EngineFailedError, GenerationRequest, Response

ECHO = "child_worlds:EchoEngine"
SECONDS = 30.0
LIMITS = ChildLimits(start=60, answer=20, drain=20, bucket=20, silence=20, progress=20, close=5)

Build = Callable[..., ChildEngine]


@pytest.fixture(scope="module")
def nursery() -> Iterator[EngineNursery]:
    with EngineNursery() as made:
        yield made


@pytest.fixture
def build(nursery: EngineNursery) -> Iterator[Build]:
    engines = []

    def make(words: str = "", limits: ChildLimits = LIMITS, **options: Any) -> ChildEngine:
        engines.append(ChildEngine(nursery, ECHO, settings(words), limits=limits, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def echo(nursery: EngineNursery) -> Iterator[ChildEngine]:
    """For tests that do it no harm."""
    engine = ChildEngine(nursery, ECHO, settings(), limits=LIMITS, bucket_bytes=4096)
    yield engine
    engine.close()


def request(*tokens: int, milliseconds: int = 0, group: int = -1) -> GenerationRequest:
    return GenerationRequest(tuple(tokens), seed=milliseconds, group=group)


def ask(engine: ChildEngine, *requests: GenerationRequest) -> list[Any]:
    """All at the same time; exceptions are results."""

    async def work() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests), return_exceptions=True), SECONDS)

    return asyncio.run(work())


def notes(engine: ChildEngine, folder: Path) -> list[str]:
    engine.load_adapter("notes", folder, 0)
    return (folder / "notes").read_text().split("\n")


def test_many_requests_at_once_from_several_threads(echo: ChildEngine) -> None:
    found: list[list[Response]] = []
    requests = [request(n, n + 1, milliseconds=n % 7) for n in range(200)]
    threads = [threading.Thread(target=lambda: found.append(ask(echo, *requests))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(found) == 3
    for responses in found:
        assert [r.tokens.tolist() for r in responses] == [[n, n + 1] for n in range(200)]
        assert responses[3].logprobs.dtype == np.float32
    assert echo.gauges()["tokens"] >= 1200


def test_a_cancelled_request_is_cancelled_there(echo: ChildEngine) -> None:
    before = echo.gauges().get("cancelled", 0)

    async def work() -> None:
        task = asyncio.create_task(echo.generate(request(1, milliseconds=60_000)))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    assert eventually(lambda: echo.gauges()["cancelled"] == before + 1)
    assert ask(echo, request(5))[0].tokens.tolist() == [5]


def test_exceptions_keep_their_type_and_text(echo: ChildEngine) -> None:
    refused, strange, fine = ask(echo, request(1, group=-2), request(1, group=-3), request(1))
    assert type(refused) is ValueError
    assert str(refused) == "request.group: -2; allowed: -1 or more"
    assert "child_worlds.py" in "".join(refused.__notes__)
    assert type(strange) is KeyError
    assert isinstance(fine, Response)
    with pytest.raises(TypeError, match="temperature"):
        echo.logprobs([np.zeros(1, np.int32)], None)  # type: ignore[arg-type]


def test_verbs_arrive_in_order_with_what_they_carry(echo: ChildEngine, tmp_path: Path) -> None:
    echo.pause(drain=True)
    echo.sleep()
    echo.wake()
    echo.resume()
    assert notes(echo, tmp_path)[-4:] == ["pause True", "sleep", "wake", "resume"]
    (found,) = echo.logprobs([np.arange(3, dtype=np.int32)], 2.0)
    np.testing.assert_array_equal(found, np.array([0, 0.5, 1], np.float32))


def tensors() -> dict[str, torch.Tensor]:
    """Of many kinds; for buckets of 4096 bytes: some of exactly that size, one of more."""
    made = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "half": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
        "whole": torch.arange(1024, dtype=torch.float32),
        "exact": torch.ones(1024),
        "large": torch.arange(5000, dtype=torch.float64),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "flags": torch.tensor([True, False, True]),
        "after": torch.full((7,), 2, dtype=torch.int64),
    }
    return made | {f"many.{n}": torch.full((100,), float(n)) for n in range(60)}


def test_weights_arrive_as_they_are(echo: ChildEngine, tmp_path: Path) -> None:
    made = tensors()
    for version in (4, 5):
        before = len(notes(echo, tmp_path))
        echo.load_weights(iter(made.items()), version)
        lines = notes(echo, tmp_path)[before:]
        expected = [
            f"{name} {str(t.dtype)[6:]} {tuple(t.shape)} {float(t.double().sum()):g}" for name, t in made.items()
        ]
        assert lines == [f"load {version}", *expected]
    assert ask(echo, request(1))[0].versions.tolist() == [5]


@pytest.mark.parametrize("count", [0, 1, 4])
def test_an_empty_stream_and_one_that_ends_with_a_full_bucket(echo: ChildEngine, tmp_path: Path, count: int) -> None:
    before = len(notes(echo, tmp_path))
    echo.load_weights(((f"t{n}", torch.ones(1024)) for n in range(count)), 6)
    assert len(notes(echo, tmp_path)[before:]) == 1 + count


def test_a_load_that_the_engine_refuses_ends_the_stream_at_once(echo: ChildEngine) -> None:
    given = 0
    is_closed = threading.Event()

    def endless() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal given
        try:
            yield "wrong", torch.ones(1024)
            while True:
                given += 1
                yield f"t{given}", torch.ones(1024)
                time.sleep(0.01)
        finally:
            is_closed.set()

    with pytest.raises(ValueError, match="'wrong' is not in the model"):
        echo.load_weights(endless(), 7)
    assert is_closed.is_set()
    assert given < 100
    echo.load_weights(iter([("right", torch.ones(2))]), 8)
    assert ask(echo, request(1))[0].versions.tolist() == [8]


def test_a_source_that_breaks_off_leaves_an_engine_that_can_load_again(echo: ChildEngine, tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "first", torch.ones(5000)
        raise TimeoutError("the trainer is gone")

    with pytest.raises(TimeoutError, match="the trainer is gone"):
        echo.load_weights(broken(), 9)
    echo.load_weights(iter([("right", torch.ones(2))]), 10)
    assert notes(echo, tmp_path)[-2:] == ["load 10", "right float32 (2,) 2"]


def test_gauges_never_wait_and_name_the_memory(echo: ChildEngine) -> None:
    os.kill(echo.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        gauges = [echo.gauges() for _ in range(100)]
        assert time.monotonic() - started < LIMITS.answer / 2
    finally:
        os.kill(echo.pid, signal.SIGCONT)
    assert {"running", "waiting", "tokens", "version", "serving", "resident_bytes"} <= gauges[0].keys()
    assert gauges[0]["resident_bytes"] > 1 << 20


def test_the_child_sees_nothing_of_mpi_and_of_the_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changes = {
        "RANK": "3", "WORLD_SIZE": "8", "MASTER_PORT": "1", "PMI_RANK": "3", "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "5",
    }  # fmt: skip
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    with EngineNursery() as own:
        engine = ChildEngine(own, ECHO, settings("grandchild"), limits=LIMITS)
        variables, started, rest = notes(engine, tmp_path)[:3]
        assert variables == "OMP_NUM_THREADS=2 CUDA_VISIBLE_DEVICES=5"
        assert rest.endswith("False")
        pids = [int(pid) for pid in started.split()]
        assert alive(*pids) == set(pids)
        engine.close()
        assert eventually(lambda: not alive(*pids, engine.pid))
        with pytest.raises(EngineClosedError):
            engine.resume()


def test_requests_under_way_end_with_a_close(build: Build) -> None:
    engine = build()
    threading.Timer(0.3, engine.close).start()
    (outcome,) = ask(engine, request(1, milliseconds=60_000))
    assert type(outcome) is EngineClosedError
    assert engine.gauges()["serving"] == 0


@pytest.mark.parametrize(("words", "error", "text"), [
    ("refuse", ValueError, "rollout.path: refuse; allowed: anything else"),
    ("die", EngineFailedError, "exited with code 3"),
    ("slow", EngineFailedError, "gave no answer to the start within 2 s"),
])  # fmt: skip
def test_an_engine_that_does_not_start(build: Build, words: str, error: type[Exception], text: str) -> None:
    heard: list[BaseException] = []
    with pytest.raises(error, match=text):
        build(words, replace(LIMITS, start=2) if words == "slow" else LIMITS, on_failure=heard.append)
    assert heard == []


def fail_by(engine: ChildEngine, how: str) -> None:
    if how == "kill":
        os.kill(engine.pid, signal.SIGKILL)
    elif how == "stop":
        os.kill(engine.pid, signal.SIGSTOP)


@pytest.mark.parametrize(("how", "group", "text"), [
    ("kill", -1, r"was killed by signal 9 \(SIGKILL\)"),
    ("stop", -1, "was silent for 2.5 s"),
    ("exit", -5, "exited with code 7"),
    ("report", -4, "OSError: the device is gone"),
])  # fmt: skip
def test_a_death_or_stall_fails_everything_once(build: Build, how: str, group: int, text: str) -> None:
    heard: list[BaseException] = []
    engine = build("grandchild", replace(LIMITS, silence=2.5) if how == "stop" else LIMITS, on_failure=heard.append)
    assert ask(engine, request(3))[0].tokens.tolist() == [3]
    threading.Timer(0.3, lambda: fail_by(engine, how)).start()
    started = time.monotonic()
    outcomes = ask(engine, *[request(n, milliseconds=60_000) for n in range(5)], request(9, group=group))
    assert time.monotonic() - started < LIMITS.silence - 2
    failed = [outcome for outcome in outcomes if isinstance(outcome, EngineFailedError)]
    assert len(failed) >= 5
    assert all(str(outcome) == str(engine.failure) for outcome in failed)
    with pytest.raises(EngineFailedError, match=text):
        engine.pause()
    assert heard == [engine.failure]
    assert engine.gauges()["serving"] == 0
    assert eventually(lambda: not alive(engine.pid))
    if how == "kill":
        assert ask(build(), request(4))[0].tokens.tolist() == [4]


@pytest.mark.parametrize("name", ["deadly", "stuck"])
def test_a_death_or_stall_in_a_load(build: Build, name: str) -> None:
    heard: list[BaseException] = []
    engine = build(limits=replace(LIMITS, bucket=1), on_failure=heard.append, bucket_bytes=4096)
    weights = ((n, torch.ones(1024)) for n in ["a", "b", name, *map(str, range(1000))])
    started = time.monotonic()
    with pytest.raises(EngineFailedError):
        engine.load_weights(weights, 1)
    assert time.monotonic() - started < LIMITS.silence - 2
    assert next(weights, None) is None, "the source was not told"
    assert heard == [engine.failure]


def test_no_answer_to_a_pause_is_a_stall(build: Build) -> None:
    engine = build("deaf", replace(LIMITS, answer=1))
    with pytest.raises(EngineFailedError, match="gave no answer to pause within 1 s"):
        engine.pause()
    assert not alive(engine.pid)


def test_no_token_for_too_long_is_a_stall(build: Build) -> None:
    failed = threading.Event()
    engine = build("busy", replace(LIMITS, progress=1), on_failure=lambda _: failed.set())
    assert failed.wait(SECONDS)
    assert "sampled no token for 1 s" in str(engine.failure)


def test_a_process_that_breaks_says_why_in_its_log() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        host = subprocess.Popen(
            [sys.executable, "-m", "pekoe.pipeline.rollout.child.host", str(os.getpid()), str(theirs.fileno())],
            pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        ours.sendall(frame(b"no message"))
        _, log = host.communicate(timeout=SECONDS)
    assert host.returncode == 1
    assert "UnpicklingError" in log


def test_a_bucket_on_a_device_waits_for_that_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the one that is current in the thread at hand."""
    waited: list[torch.device] = []
    device = torch.device("cuda", 3)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(synchronize=waited.append))
    bucket = DeviceBucket(64, device)
    bucket._memory = torch.zeros(64, dtype=torch.uint8)
    assert bucket.handle() == b""
    received = ReceivedBucket(None)
    received._memory = bucket._memory
    received.used_up()
    assert waited == [device, torch.device("cpu")]


def test_a_process_that_still_imports_is_not_silent() -> None:
    watch = SilenceWatch(ChildLimits(start=60, silence=0))
    time.sleep(0.01)
    assert watch.judge() == ""
    watch.heard()
    time.sleep(0.01)
    assert watch.judge() == "was silent for 0 s"


def test_time_in_which_the_rank_itself_stood_still_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(silence_watch.time, "monotonic", lambda: clock[0])
    watch = SilenceWatch(ChildLimits(silence=60, progress=300))
    watch.heard({"tokens": 1.0, "running": 1.0})
    clock[0] += 1000
    watch.stood_still(990)
    assert watch.judge() == ""
    clock[0] += 51
    assert watch.judge() == "was silent for 60 s"


SUSPENDED = """
import asyncio, sys
sys.path.insert(0, {here!r})
from child_worlds import settings
from pekoe.pipeline.rollout.child.child_engine import ChildEngine
from pekoe.pipeline.rollout.child.nursery import EngineNursery
from pekoe.pipeline.rollout.child.silence_watch import ChildLimits
from pekoe.pipeline.rollout.engine import GenerationRequest
with EngineNursery() as nursery:
    limits = ChildLimits(silence=4, progress=60)
    engine = ChildEngine(nursery, {engine!r}, settings(), limits=limits)
    async def work():
        print(nursery.pid, engine.pid, flush=True)
        return await engine.generate(GenerationRequest((7,), seed=1500))
    print(*asyncio.run(work()).tokens, engine.failure, flush=True)
    engine.pause()
    engine.close()
"""


def test_a_job_that_was_suspended_as_a_whole_keeps_its_engine() -> None:
    """`scontrol suspend`: rank, nursery and engine stand still for longer than the engine may be silent, and go on in
    this order."""
    here = str(Path(__file__).resolve().parent)
    rank = subprocess.Popen(
        [sys.executable, "-c", SUSPENDED.format(here=here, engine=ECHO)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert rank.stdout is not None
        pids = [rank.pid, *map(int, rank.stdout.readline().split())]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(5.0)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.4)
        assert rank.communicate(timeout=SECONDS)[0] == "7 None\n"
        assert rank.returncode == 0
    finally:
        rank.kill()
        rank.wait()
