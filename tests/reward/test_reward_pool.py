from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pekoe.pipeline.config.rollout import RewardConfig
from pekoe.pipeline.process_tree import process_table
from pekoe.pipeline.reward.pool import RewardError, RewardFailure, RewardPool, Score

HERE = Path(__file__).parent
TIMEOUT = 1.0
BAD = "user_rewards:misbehave"

Start = Callable[..., RewardPool]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.syspath_prepend(str(HERE))
    pools = []

    def start_pool(name: str = "user_rewards:misbehave", **settings: Any) -> RewardPool:
        pools.append(RewardPool(RewardConfig(name=name, **{"timeout_seconds": TIMEOUT, **settings})).start())
        pools[-1].wait_ready()
        return pools[-1]

    yield start_pool
    for pool in pools:
        pool.close()


def ask(pool: RewardPool, target: str, *completions: str, limit: float = 60.0, **data: Any) -> list[Score]:
    """Scores completions at the same time, within a limit."""

    async def all_of_them() -> list[Score]:
        calls = (pool.score(target, "p", completion, [1, 2], [3], data) for completion in completions)
        return await asyncio.wait_for(asyncio.gather(*calls), limit)

    return asyncio.run(all_of_them())


def alive(pids: set[int]) -> set[int]:
    """Those of the processes that exist, zombies included."""
    return pids & set(process_table())


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def below(pid: int) -> set[int]:
    """All descendants of a process, zombies included."""
    table = process_table()
    found = {pid}
    for _ in range(len(table)):
        more = {p for p, entry in table.items() if entry.parent in found} - found
        if not more:
            break
        found |= more
    return found - {pid}


def test_functions_of_users_work_as_they_are(start: Start) -> None:
    pool = start("user_rewards:length", args={"bonus": 0.5})
    assert ask(pool, "user_rewards:length", "x") == [Score(1.5, "ok")]
    assert ask(pool, "user_rewards:slow_length", "four") == [Score(4.0, "ok")]
    assert ask(pool, "user_rewards:keys", "x", table={1: ("a", 2)}) == [Score(1.0, "ok")]
    assert ask(pool, "user_rewards:in_main_thread", "x") == [Score(1.0, "ok")]


@pytest.mark.parametrize("completion", ["none", "nan", "inf", "text", "complex", "vector"])
def test_what_is_no_finite_number_is_invalid(start: Start, completion: str) -> None:
    (score,) = ask(start(error_value=-1.0), "user_rewards:give", completion)
    assert (score.value, score.status) == (-1.0, "invalid")
    assert "not a finite number" in score.detail


def test_numbers_of_all_kinds_are_taken(start: Start) -> None:
    assert [s.value for s in ask(start(), "user_rewards:give", "true", "float32", "array")] == [1.0, 0.25, 2.0]


def test_any_thread_and_loop_may_ask(start: Start) -> None:
    pool = start("math", processes=2)
    results: list[list[Score]] = []
    threads = [
        threading.Thread(target=lambda: results.append(ask(pool, "math", "\\boxed{1/2}", "0.5", "2/3", answer="0.5")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert [[s.value for s in scores] for scores in results] == [[1.0, 1.0, 0.0]] * 4


@pytest.mark.parametrize("completion", ["spin", "stubborn", "power", "shell", "daemon"])
def test_a_call_that_overruns_is_killed_with_all_it_started(start: Start, completion: str) -> None:
    pool = start(processes=1)
    (worker,) = pool.wait_ready()
    supervisor = process_table()[worker].parent
    seen: set[int] = set()
    watching = threading.Event()

    def watch() -> None:
        while not watching.is_set():
            seen.update(below(supervisor))
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    (score,) = ask(pool, BAD, completion)
    seconds = time.monotonic() - started
    watching.set()
    watcher.join()
    assert (score.value, score.status) == (0.0, "timeout")
    assert TIMEOUT <= seconds < TIMEOUT + 20
    assert ask(pool, BAD, "fine") == [Score(1.0, "ok")]
    (replacement,) = pool.worker_pids()
    assert replacement != worker
    if completion in ("shell", "daemon"):
        assert len(seen - {worker, replacement}) >= 2, "the grandchildren were never there: the test shows nothing"
    assert eventually(lambda: below(supervisor) == {replacement})
    assert eventually(lambda: not alive(seen - {replacement}))


def test_three_spinning_calls_do_not_shrink_a_pool_of_two(start: Start) -> None:
    pool = start(processes=2)
    started = time.monotonic()
    scores = ask(pool, BAD, "spin", "spin", "spin", "fine")
    assert [s.status for s in scores] == ["timeout"] * 3 + ["ok"]
    assert time.monotonic() - started < 2 * TIMEOUT + 20
    assert eventually(lambda: len(pool.worker_pids()) == 2)
    assert pool.gauges()["timeouts"] == 3
    assert [s.status for s in ask(pool, BAD, *["fine"] * 10)] == ["ok"] * 10


@pytest.mark.parametrize(
    ("completion", "status", "detail"),
    [
        ("exit", "died", "code 3"),
        ("exit with child", "died", "code 0"),
        ("sys.exit", "error", "SystemExit: 4"),
        ("raise", "error", "no route to the checker"),
    ],
)
def test_failures_say_what_happened(start: Start, completion: str, status: str, detail: str) -> None:
    pool = start(processes=1, error_value=-2.0)
    (score,) = ask(pool, BAD, completion)
    assert (score.value, score.status) == (-2.0, status)
    assert detail in score.detail
    assert ask(pool, BAD, "print") == [Score(1.0, "ok")]
    assert eventually(lambda: len(pool.worker_pids()) == 1), "a grandchild or a zombie was left"
    assert pool.gauges()["errors"] == 1


def test_without_an_error_value_the_judge_raises(start: Start) -> None:
    pool = start(error_value=None)
    with pytest.raises(RewardError, match="no route to the checker"):
        asyncio.run(pool("p", "raise", [1], [2], {}))
    assert asyncio.run(pool("p", "fine", [1], [2], {})) == 1.0


def test_too_large_a_share_of_failures_stops_the_run(start: Start) -> None:
    pool = start(max_error_share=0.5)
    assert {s.status for s in ask(pool, BAD, *["fine"] * 24, *["raise"] * 25)} == {"ok", "error"}
    with pytest.raises(RewardFailure, match=r"(?s)52% of the last 50 reward calls failed .*no route to the checker"):
        ask(pool, BAD, "raise")
    assert pool.gauges()["error_share"] == 0.52


def test_a_few_failures_at_the_start_stop_nothing(start: Start) -> None:
    assert len(ask(start(max_error_share=0.1), BAD, *["raise"] * 49)) == 49


def test_a_worker_that_died_while_idle_costs_no_call(start: Start) -> None:
    pool = start(processes=1)
    (worker,) = pool.wait_ready()
    os.kill(worker, signal.SIGKILL)
    assert eventually(lambda: process_table()[worker].state == "Z")
    assert ask(pool, BAD, "fine") == [Score(1.0, "ok")]


def test_a_function_that_cannot_be_had_fails_at_the_start(start: Start) -> None:
    for name, message in (("broken_module:f", "needs a key"), ("user_rewards:no", "cannot load"), ("maths", "'math'")):
        with pytest.raises(RewardFailure, match=message):
            start(name)


def test_pending_calls_fail_when_the_supervisor_is_killed(start: Start) -> None:
    pool = start(processes=1, timeout_seconds=30.0)
    (worker,) = pool.wait_ready()

    async def lose() -> None:
        task = asyncio.create_task(pool.score(BAD, "p", "spin", [1], [2], {}))
        await asyncio.sleep(0.3)
        os.kill(process_table()[worker].parent, signal.SIGKILL)
        await asyncio.wait_for(task, 25)

    with pytest.raises(RewardFailure, match="supervisor of the reward pool ended"):
        asyncio.run(lose())
    assert eventually(lambda: not alive({worker})), "the spinning worker outlived its supervisor"


def test_a_cancelled_call_leaves_the_queue(start: Start) -> None:
    pool = start(processes=1)

    async def cancel() -> float:
        busy = asyncio.create_task(pool.score(BAD, "p", "spin", [1], [2], {}))
        queued = [asyncio.create_task(pool.score(BAD, "p", "spin", [1], [2], {})) for _ in range(20)]
        await asyncio.sleep(0.2)
        for task in queued:
            task.cancel()
        await asyncio.gather(*queued, return_exceptions=True)
        started = time.monotonic()
        assert (await pool.score(BAD, "p", "fine", [1], [2], {})).status == "ok"
        assert (await busy).status == "timeout"
        return time.monotonic() - started

    assert asyncio.run(cancel()) < 20 * TIMEOUT, "the cancelled ones would each have taken that"


def test_closing_leaves_no_process(start: Start) -> None:
    pool = start(processes=2)
    (supervisor,) = {process_table()[pid].parent for pid in pool.wait_ready()}
    everyone = {supervisor, *below(supervisor)}
    assert len(everyone) == 3
    pool.close()
    assert eventually(lambda: not alive(everyone))


OWNER = """
import asyncio, sys, time
sys.path.insert(0, {here!r})
from pekoe.pipeline.config.rollout import RewardConfig
from pekoe.pipeline.reward.pool import RewardPool
pool = RewardPool(RewardConfig(name="user_rewards:misbehave", processes=2, timeout_seconds=60)).start()
print(*pool.wait_ready(), flush=True)
async def go():
    await asyncio.gather(*(pool.score("user_rewards:misbehave", "p", c, [1], [2], {{}}) for c in ("shell", "spin")))
asyncio.run(go())
"""


def test_nothing_outlives_a_killed_owner() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER.format(here=str(HERE))], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        workers = {int(pid) for pid in owner.stdout.readline().split()}
        assert len(workers) == 2
        assert eventually(lambda: len(below(owner.pid)) >= 5), "supervisor, two workers, a shell and a sleep"
        everyone = below(owner.pid)
    finally:
        owner.kill()
        owner.wait(60)
    assert eventually(lambda: not alive(everyone))


MPI_RANK = """
import asyncio, os
from pekoe.pipeline.config.rollout import RewardConfig
from pekoe.pipeline.reward.pool import RewardPool
pool = RewardPool(RewardConfig(name="user_rewards:misbehave", timeout_seconds=0.3, max_error_share=1.0)).start()
from mpi4py import MPI
async def go():
    for completion in ("spin", "exit"):
        await pool.score("user_rewards:misbehave", "p", completion, [1], [2], {})
    clean = await pool.score("user_rewards:importing", "p", "", [1], [2], {})
    scores = await asyncio.gather(*(pool.score("gsm8k", "p", "7", [1], [2], {"answer": "7"}) for _ in range(100)))
    return sum(s.value for s in scores), clean.value
value, clean = asyncio.run(go())
os.write(1, f"RESULT {MPI.COMM_WORLD.size} {value} {clean}\\n".encode())
MPI.COMM_WORLD.Barrier()
pool.close()
"""


def test_workers_are_replaced_after_mpi_was_initialised(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(HERE)!r})\n{MPI_RANK}")
    mpiexec = Path(sys.executable).with_name("mpiexec")
    world = subprocess.run(
        [str(mpiexec), "-n", "2", sys.executable, str(script)], capture_output=True, text=True, timeout=90
    )
    assert world.returncode == 0, world.stderr
    assert world.stdout.count("RESULT 2 100.0 0.0") == 2
