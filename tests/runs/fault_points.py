"""A user's dataset module that makes one thing go wrong: the head and rollout ranks import it before they say Hello.

`FAULT` in the environment names what (a key of FAULTS, then `:argument`s), `FAULT_FOLDER` is where it leaves marks.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pekoe.launch.postoffice import PostOffice
from pekoe.launch.world import World
from pekoe.pipeline.control.controller import Controller
from pekoe.pipeline.control.pump import Pump
from pekoe.pipeline.data.jsonl_dataset import JsonlDataset
from pekoe.pipeline.messages import Plan, Published, WrittenFile
from pekoe.pipeline.rollout.engines.batch_decoder import BatchDecoder
from pekoe.pipeline.rollout.engines.hf_engine import HfEngine
from pekoe.pipeline.rollout.executor import Executor
from pekoe.pipeline.rollout.rank_loop import RolloutLoop
from pekoe.pipeline.train.engines.staged_shards import StagedShards
from pekoe.pipeline.train.learner import Learner
from pekoe.pipeline.train.training_step import TrainingStep
from pekoe.pipeline.trajectory.writer import ShardWriter
from pekoe.pipeline.weights.collective import CollectiveReceiver, CollectiveSender

MIDDLE_GROUP = 12
"""With eta 2 and a batch of 4, groups from here on are sampled after the first step."""


class Rows(JsonlDataset):
    """JSON lines, unchanged."""


def leave_mark(name: str, text: str = "") -> bool:
    """True for the first who comes here."""
    try:
        with (Path(os.environ["FAULT_FOLDER"]) / name).open("x") as file:
            file.write(text or repr(time.time()))
    except FileExistsError:
        return False
    return True


def fail(where: str) -> None:
    if leave_mark("raised"):
        raise RuntimeError(f"planted in the {where}")


def before(owner: type, name: str, action: Callable[..., None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(self: Any, *arguments: Any, **named: Any) -> Any:
        action(self, *arguments, **named)
        return original(self, *arguments, **named)

    setattr(owner, name, patched)


def raise_in_learner() -> None:
    before(Learner, "step", lambda learner, commit: commit.version == 2 and fail("learner"))


def raise_in_one_of_two_learners() -> None:
    """Its peer is in the collectives of the step by then, and stays there."""

    def action(step: TrainingStep, plan: Plan, *_: object) -> None:
        if dist.get_rank() == 1 and plan.version == 2:
            time.sleep(0.5)
            fail("second learner")

    before(TrainingStep, "_prepare", action)


def raise_in_controller() -> None:
    before(Controller, "gather", lambda controller: controller.version == 2 and fail("controller"))


def raise_in_rollout() -> None:
    before(RolloutLoop, "take", lambda loop, group: group.number >= MIDDLE_GROUP and fail("rollout loop"))


def raise_in_executor() -> None:
    before(RolloutLoop, "on_group", lambda loop, group: group.number >= MIDDLE_GROUP and fail("executor"))


def raise_in_engine() -> None:
    before(BatchDecoder, "decode", lambda decoder, version: version >= 1 and fail("engine"))


def raise_in_main_thread() -> None:
    before(World, "_do_duties", lambda world, now: world.rank == 1 and world.version >= 1 and fail("main thread"))


def raise_in_post_office_of_head() -> None:
    def action(office: PostOffice) -> None:
        if office.rank == 0 and (Path(os.environ["FAULT_FOLDER"]) / "step 2").exists():
            fail("head's post office")

    before(Learner, "step", lambda learner, commit: commit.version == 2 and leave_mark("step 2"))
    before(PostOffice, "pump", action)


def hang(where: str) -> None:
    """The learner in a step, the engine at a token, or the rollout loop at a group stands still for ever."""

    def stand_still() -> None:
        if leave_mark("hangs"):
            time.sleep(600)

    match where:
        case "learner":
            before(Learner, "step", lambda learner, commit: commit.version == 2 and stand_still())
        case "engine":
            before(BatchDecoder, "decode", lambda decoder, version: version >= 1 and stand_still())
        case "rollout":
            before(RolloutLoop, "take", lambda loop, group: group.number >= MIDDLE_GROUP and stand_still())


def wait_for_stop(reason: str) -> None:
    """In the controller's wait for `reason`: leaves a mark, then goes on when the signal has come."""

    running: list[Controller] = []

    def action(pump: Pump, until: object, why: str, *limits: object, **named: object) -> None:
        if why == reason and leave_mark(f"waits {os.environ['FAULT_NUMBER']}"):
            deadline = time.monotonic() + 30
            while not running[0].parts.stop.requested() and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(0.1)

    before(Controller, "run", running.append)
    before(Pump, "wait", action)


def wait_for_stop_with_slow_evaluation(reason: str) -> None:
    """So that the evaluation is not over when the run is."""
    original = Executor._run_evaluation

    async def slow(self: Executor, *arguments: Any) -> None:
        import asyncio

        await asyncio.sleep(20)
        await original(self, *arguments)

    Executor._run_evaluation = slow  # type: ignore[method-assign]
    wait_for_stop(reason)


def hold_with_ready_groups(count: str) -> None:
    """Before the third step: waits until so many groups are published, writes down where they lie, and stands still."""

    def action(controller: Controller) -> None:
        if controller.version != 2:
            return
        ready, deadline = controller.parts.dispatcher.table.ready, time.monotonic() + 30
        while len(ready) < int(count) and time.monotonic() < deadline:
            controller.parts.dispatcher.admit_all()
            controller.pump.turn(0.05)
        leave_mark("ready", json.dumps({str(group.number): group.shard for group in ready.values()}))
        time.sleep(60)

    before(Controller, "gather", action)


def damage_shards() -> None:
    """On each rank: a byte of the second shard is flipped, the third is cut short, the fourth (rank 0's) vanishes."""
    original, counter = ShardWriter.flush, itertools.count(1)

    def flush(self: ShardWriter) -> Published | None:
        published = original(self)
        if published is None:
            return None
        path, number = self._run.path / published.path, next(counter)
        if number == 2:
            data = bytearray(path.read_bytes())
            position = data.find(b"\x00\x00\x80\x3f") if b"\x00\x00\x80\x3f" in data else len(data) // 2
            data[position] ^= 0x10
            path.write_bytes(data)
        elif number == 3:
            os.truncate(path, path.stat().st_size // 2)
        elif number == 4 and "rank-0" in published.path:
            path.unlink()
        else:
            return published
        leave_mark(published.path.replace("/", "__"), json.dumps([group.group for group in published.groups]))
        return published

    ShardWriter.flush = flush  # type: ignore[method-assign]


def fail_once_in_each_transfer_and_checkpoint() -> None:
    """The first checkpoint, the receiver at version 2, the sender at version 3."""
    stream, send, save = CollectiveReceiver._stream, CollectiveSender._stream, StagedShards.write

    def received(self: CollectiveReceiver, group: Any, version: int) -> Iterator[Any]:
        for count, item in enumerate(stream(self, group, version)):
            if version == 2 and count == 3 and leave_mark("receiver"):
                raise RuntimeError("planted in the receiver")
            yield item

    def sent(self: CollectiveSender, group: Any, version: int, plan: Any, weights: Any) -> None:
        if version == 3 and leave_mark("sender"):
            next(weights)
            raise OSError("planted in the sender")
        send(self, group, version, plan, weights)

    def saved(self: StagedShards, folder: Path) -> tuple[WrittenFile, ...]:
        written = save(self, folder)
        if leave_mark("checkpoint"):
            raise OSError(28, "planted in the checkpoint")
        return written

    CollectiveReceiver._stream = received  # type: ignore[method-assign]
    CollectiveSender._stream = sent  # type: ignore[method-assign]
    StagedShards.write = saved  # type: ignore[method-assign]


def fail_once_in_a_load(rank: str) -> None:
    """The engine of one rank gives up in the middle of version 2, whatever the transport."""
    load = HfEngine.load_weights

    def failing(self: HfEngine, weights: Iterable[tuple[str, Any]], version: int) -> None:
        if version == 2 and os.environ["PMI_RANK"] == rank and leave_mark("load"):
            tensors = iter(weights)
            for _ in range(3):
                next(tensors)
            raise RuntimeError("planted in a load")
        load(self, weights, version)

    HfEngine.load_weights = failing  # type: ignore[method-assign]


def fail_once_in_the_checkpoint_of_one_rank() -> None:
    """Its disk is full in the middle of the first checkpoint; its peers write theirs."""
    from torch.distributed.checkpoint import filesystem

    write = filesystem._write_item

    def failing(*arguments: Any, **named: Any) -> Any:
        if os.environ["PMI_RANK"] == "1" and leave_mark("checkpoint"):
            raise OSError(28, "planted in the checkpoint")
        return write(*arguments, **named)

    filesystem._write_item = failing


FAULTS: dict[str, Callable[..., None]] = {
    found.__name__: found
    for found in (
        raise_in_learner,
        raise_in_one_of_two_learners,
        raise_in_controller,
        raise_in_rollout,
        raise_in_executor,
        raise_in_engine,
        raise_in_main_thread,
        raise_in_post_office_of_head,
        hang,
        wait_for_stop,
        wait_for_stop_with_slow_evaluation,
        hold_with_ready_groups,
        damage_shards,
        fail_once_in_each_transfer_and_checkpoint,
        fail_once_in_a_load,
        fail_once_in_the_checkpoint_of_one_rank,
    )
}

if os.environ.get("FAULT"):
    what, *given = os.environ["FAULT"].split(":")
    FAULTS[what](*given)
