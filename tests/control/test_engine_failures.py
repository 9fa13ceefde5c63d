"""Engines that fail, stall or come late, in each phase of an update: the real controller against simulated roles."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from simulated_roles import World

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.control.engine_roster import EngineRoster
from pekoe.pipeline.control.weight_update import LostEngineError, WeightUpdateError
from pekoe.pipeline.messages import (
    Assign,
    AssignEvaluation,
    Cancel,
    EngineFailed,
    EngineRestored,
    LoadWeights,
    Message,
    PrepareWeights,
    Published,
    PublishWeights,
    Wake,
    WeightsLoaded,
    WeightsReady,
    WeightsSent,
)

MOMENTS = ("prepare", "ready", "load", "middle", "answer", "late answer")


def config(**overrides: Any) -> RunConfig:
    made = RunConfig()
    made.train_dataset.batch_size = 3
    made.gconfig.n_samples = 2
    made.rollout.max_head_offpolicyness = 2
    made.cluster.progress_seconds = 20.0
    made.recover.freq_steps = None
    made.weights.ready_seconds = 0.3
    made.weights.bucket_seconds = 0.3
    for key, value in overrides.items():
        section, name = key.split(".")
        setattr(getattr(made, section), name, value)
    return made


class Engines(World):
    """Rollout ranks whose engines misbehave: `act` gets (rank, message) and says whether it has dealt with it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.act: Callable[[int, Message], bool] = lambda rank, message: False
        self.sender_error: Callable[[PublishWeights], str] = lambda message: ""
        self.down: set[int] = set()
        self.restarts = 0

    def _handle_rollout(self, rank: int, message: Any) -> None:
        if self.act(rank, message):
            return
        if rank in self.down and isinstance(message, PrepareWeights | LoadWeights):
            return
        super()._handle_rollout(rank, message)

    def _tell(self, rank: int, message: Message) -> None:
        if isinstance(message, WeightsSent):
            published = next(m for _, m in reversed(self.post.log) if isinstance(m, PublishWeights))
            if error := self.sender_error(published):
                message = WeightsSent(message.version, 0.0, message.check, error)
        super()._tell(rank, message)

    def fail(self, rank: int, seconds: float) -> None:
        """The engine of this rank fails now, and stands again so much later."""
        self.down.add(rank)
        self.restarts += 1
        self._tell(rank, EngineFailed("planted", self.restarts))

        def restore() -> None:
            self.down.discard(rank)
            self._tell(rank, EngineRestored())

        threading.Timer(seconds, restore).start()

    def of(self, kind: type[Message], rank: int | None = None) -> list[Any]:
        return [m for to, m in self.post.log if isinstance(m, kind) and rank in (None, to)]


def consumed(world: World) -> list[int]:
    return sorted(number for _, numbers in world.consumed for number in numbers)


def strike(world: Engines, moment: str, stalls: bool, seconds: float = 0.4) -> None:
    """At version 2 the engine of rank 2 fails, or stands still, once, at this moment."""
    struck: list[str] = []

    def act(rank: int, message: Message) -> bool:
        if rank != 2 or struck or getattr(message, "version", -1) != 2:
            return False
        if isinstance(message, PrepareWeights) and moment in ("prepare", "ready"):
            struck.append(moment)
            if stalls:
                late = WeightsReady(message.version, message.epoch)
                threading.Timer(seconds, lambda: world._tell(rank, late)).start()
                return True
            if moment == "ready":
                world._tell(rank, WeightsReady(message.version, message.epoch))
            world.fail(rank, seconds)
            return True
        if isinstance(message, LoadWeights) and moment not in ("prepare", "ready"):
            struck.append(moment)
            error = "" if moment == "late answer" else "it broke"
            if moment == "answer":
                world._tell(rank, WeightsLoaded(2, 0.0, (), error))
            if not stalls:
                world.fail(rank, seconds)
            elif moment != "answer":
                threading.Timer(seconds, lambda: world._tell(rank, WeightsLoaded(2, 0.0, (-1.0,), error))).start()
            return True
        return False

    world.act = act
    if moment in ("load", "middle"):
        world.sender_error = lambda message: "rank 2 gave up" if message.version == 2 and 2 in message.members else ""
        if moment == "middle":
            world.faults.load_error = lambda m: "the epoch is broken" if m.version == 2 and 2 in m.members else ""


@pytest.mark.parametrize("stalls", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_others_go_on_without_an_engine_that_fails_or_stalls(moment: str, stalls: bool) -> None:
    world = Engines(config(), num_examples=60, num_steps=20, num_rollout=3)
    strike(world, moment, stalls)
    break_first_epoch(world, 2)
    pace(world, 0.03)
    assert world.run() == "finished"
    assert consumed(world) == list(range(60)), "no group is lost or doubled"
    roster = world.controller.parts.weights.roster
    assert roster.describe() == ""
    assert roster.available() == [1, 2, 3]
    assert {engine.served for engine in roster.engines} == {20}
    assert set(world.engine_version.values()) == {20}
    without = [m for m in world.of(PublishWeights) if m.members == (0, 1, 3)]
    assert bool(without) == ((moment, stalls) != ("answer", True)), "steps were made without it"
    assert world.post.sent["PublishWeights"] >= 20
    left_out = [values["engines/left_out"] for _, values in world.metrics if "engines/left_out" in values]
    assert set(left_out) <= {1.0}
    assert bool(left_out) == bool(without)
    assert all(m.try_number == 0 for m in world.of(Assign))


def break_first_epoch(world: Engines, version: int) -> None:
    """Errors of the transfer end with the first epoch of this version in which rank 2 is."""
    error, load, epochs = world.sender_error, world.faults.load_error, list[int]()

    def is_first(message: Any) -> bool:
        if message.version == version and 2 in message.members:
            epochs.append(message.epoch)
        return bool(epochs) and message.epoch == epochs[0]

    world.sender_error = lambda message: error(message) if is_first(message) else ""
    world.faults.load_error = lambda message: load(message) if is_first(message) else ""


def pace(world: Engines, seconds: float) -> None:
    """Steps take a while, so that an engine can come back before the run is over."""
    record = world._record

    def slow(*given: Any) -> None:
        time.sleep(seconds)
        record(*given)

    world._record = slow  # type: ignore[method-assign]


def single(moment: str, seconds: float = 0.3) -> Engines:
    """One engine, which fails at this moment and is there again soon; what it is asked meanwhile waits for a load."""
    world = Engines(config(), num_examples=24, num_steps=8, num_rollout=1)
    waiting: list[Message] = []
    needs_load = [False]

    def act(rank: int, message: Message) -> bool:
        hit = {
            "sampling": isinstance(message, Assign),
            "evaluating": isinstance(message, AssignEvaluation),
            "prepare": isinstance(message, PrepareWeights),
            "load": isinstance(message, LoadWeights),
        }[moment]
        if hit and not world.restarts:
            needs_load[0] = True
            world.fail(rank, seconds)
        if isinstance(message, LoadWeights) and rank not in world.down:
            needs_load[0] = False
            World._handle_rollout(world, rank, message)
            while waiting:
                World._handle_rollout(world, rank, waiting.pop(0))
            return True
        if isinstance(message, Assign | AssignEvaluation) and needs_load[0]:
            waiting.append(message)
            return True
        return False

    world.act = act
    if moment == "load":
        world.sender_error = lambda message: "gave up" if message.version == 1 and message.epoch == 0 else ""
    return world


@pytest.mark.parametrize("moment", ["sampling", "prepare", "load", "evaluating"])
def test_the_only_engine_is_brought_the_version_while_the_head_waits_for_it(moment: str) -> None:
    """Not only after the next step, which would never come; also while the head waits for an evaluation."""
    world = single(moment)
    if moment == "evaluating":
        world.num_validation, world.config.evaluator.at_start, world.config.evaluator.block = 4, True, True
    began = time.monotonic()
    assert world.run() == "finished"
    assert time.monotonic() - began < 40
    assert consumed(world) == list(range(24))
    assert world.restarts == 1
    if moment in ("sampling", "evaluating"):
        assert [m.version for m in world.of(PublishWeights)] == list(range(9)), "version 0 was brought, too"
    assert {m.try_number for m in world.of(Assign)} == {0}


def test_no_group_is_given_to_an_engine_that_is_away_and_those_there_stay() -> None:
    world = Engines(config(), num_examples=120, num_steps=40, num_rollout=2)
    times: list[tuple[str, float]] = []

    def act(rank: int, message: Message) -> bool:
        if rank == 1 and isinstance(message, PrepareWeights) and message.version == 3 and not world.restarts:
            times.append(("down", time.monotonic()))
            world.fail(1, 0.4)
            return True
        if rank == 1 and isinstance(message, Assign):
            times.append(("assign", time.monotonic()))
        return False

    world.act = act
    pace(world, 0.03)
    assert world.run() == "finished"
    assert consumed(world) == list(range(120))
    (down,) = [when for what, when in times if what == "down"]
    assert not [when for what, when in times if what == "assign" and down + 0.1 < when < down + 0.35]
    assert [when for what, when in times if what == "assign" and when > down + 0.4], "it works again"
    assert not world.of(Cancel)


@pytest.mark.parametrize("both_finish", [False, True])
def test_groups_of_an_engine_that_is_away_for_long_are_sampled_by_others_with_the_same_try(both_finish: bool) -> None:
    """A recovery is no new draw. Should the first rank still publish its copy, one of the two counts."""
    world = Engines(config(**{"rollout.stale_wait_seconds": 0.3}), num_examples=30, num_steps=10, num_rollout=2)
    held: list[Assign] = []

    def act(rank: int, message: Message) -> bool:
        if rank == 1 and isinstance(message, PrepareWeights) and message.version == 2 and not world.restarts:
            world.fail(1, 1.2)
            return True
        if rank == 1 and isinstance(message, Assign) and message.group >= 3 and world.restarts == 0:
            held.append(message)
            return True
        if rank == 1 and isinstance(message, Cancel) and both_finish:
            for assign in [a for a in held if a.group == message.group]:
                World._handle_rollout(world, rank, assign)
            world._publish(rank)
        return False

    world.act = act
    assert world.run() == "finished"
    assert consumed(world) == list(range(30))
    dispatcher = world.controller.parts.dispatcher
    assert held
    assert dispatcher.counts["taken_back"] == len(world.of(Cancel)) == len(held)
    assert dispatcher.counts["dropped"] == 0
    assert {m.try_number for m in world.of(Assign)} == {0}
    assert dispatcher.admission.running == 0
    published = [g.group for m in world.of(Published) for g in m.groups]
    assert (len(published) > len(set(published))) == both_finish


def test_an_engine_that_stays_away_ends_the_run_with_its_reason() -> None:
    world = Engines(config(**{"cluster.progress_seconds": 1.0}), num_examples=300, num_steps=100, num_rollout=2)

    def act(rank: int, message: Message) -> bool:
        if rank == 2 and isinstance(message, PrepareWeights) and not world.restarts:
            world.fail(2, 60.0)
            return True
        return False

    world.act = act
    pace(world, 0.05)
    with pytest.raises(
        LostEngineError, match=r"rank 2 is being built anew for \d+ s .*progress_seconds is 1\): planted"
    ) as raised:
        world.run()
    assert raised.value.stacks == {2: "stacks of rank 2"}


def test_transfers_that_fail_without_an_engine_to_blame_end_the_run() -> None:
    world = Engines(config(), num_examples=12, num_steps=4, num_rollout=2)
    world.sender_error = lambda message: "no route"
    world.faults.load_error = lambda message: "no route"
    with pytest.raises(WeightUpdateError, match="no route"):
        world.run()
    assert world.post.sent["PublishWeights"] == 3


def test_a_catch_up_under_way_does_not_mix_with_the_next_version() -> None:
    """The step is done while the tensors of a catch-up are still on the way: that ends first."""
    world = Engines(config(), num_examples=60, num_steps=20, num_rollout=2)
    held: list[Message] = []

    def act(rank: int, message: Message) -> bool:
        if rank == 2 and isinstance(message, PrepareWeights) and message.version == 2 and not world.restarts:
            world.fail(2, 0.15)
            return True
        if rank == 2 and isinstance(message, LoadWeights) and not held and world.restarts:
            held.append(message)
            threading.Timer(0.2, lambda: World._handle_rollout(world, rank, message)).start()
            return True
        return False

    world.act = act
    pace(world, 0.05)
    assert world.run() == "finished"
    assert consumed(world) == list(range(60))
    kinds = [(type(m).__name__, m.version) for to, m in world.post.log if to == 2 and isinstance(m, PrepareWeights)]
    assert kinds[-1] == ("PrepareWeights", 20)
    assert {engine.served for engine in world.controller.parts.weights.roster.engines} == {20}


def test_an_engine_of_several_ranks_takes_part_as_a_whole() -> None:
    """Ranks 1+2 and 3+4 make an engine each; 2 is not ready in time: 1 waits with it, the others go on."""
    world = Engines(config(), num_examples=60, num_steps=20, num_rollout=4)
    world.instances = [(1, 2), (3, 4)]
    struck: list[int] = []

    def act(rank: int, message: Message) -> bool:
        if rank == 2 and isinstance(message, PrepareWeights) and message.version == 2 and not struck:
            struck.append(rank)
            late = WeightsReady(message.version, message.epoch)
            threading.Timer(0.6, lambda: world._tell(rank, late)).start()
            return True
        return False

    world.act = act
    pace(world, 0.03)
    assert world.run() == "finished"
    assert consumed(world) == list(range(60))
    assert {to for to, m in world.post.log if isinstance(m, Assign)} == {1, 3}
    members = [m.members for m in world.of(PublishWeights)]
    assert (0, 3, 4) in members
    assert set(members) <= {(0, 1, 2, 3, 4), (0, 3, 4), (0, 1, 2)}
    assert set(world.engine_version.values()) == {20}


@pytest.mark.parametrize("moment", ["rest", "between"])
def test_colocated_an_engine_is_built_anew_when_the_step_is_over(moment: str) -> None:
    """Its device is the trainer's in a step; the head says when it is not."""
    world = Engines(config(), num_examples=24, num_steps=8, colocated=True)
    woken: list[int] = []

    def act(rank: int, message: Message) -> bool:
        name = type(message).__name__
        if name == ("Phase" if moment == "rest" else "Assign") and not world.restarts and world.version_seen >= 2:
            world.down.add(rank)
            world.restarts += 1
            world._tell(rank, EngineFailed("planted", 1))
        if isinstance(message, PrepareWeights):
            world.version_seen = message.version
        if isinstance(message, Wake) and rank in world.down:
            woken.append(world.version_seen)
            world.down.discard(rank)
            world._tell(rank, EngineRestored())
        return False

    world.version_seen, world.act = 0, act
    assert world.run() == "finished"
    assert consumed(world) == list(range(24))
    assert len(woken) == 1
    assert world.engine_version == {0: 8}


def test_the_roster_knows_who_may_get_groups() -> None:
    told: list[tuple[int, bool]] = []
    roster = EngineRoster([(1,), (2, 3)], 0)
    roster.tell = lambda leader, is_available: told.append((leader, is_available))
    roster.fail(3, "planted")
    roster.fail(2, "planted again")
    assert told == [(2, False)]
    assert roster.down() == [2, 3]
    assert "rank 2 is being built anew" in roster.describe()
    roster.restore(2)
    assert roster.behind(0) == [roster.by_rank[2]]
    assert roster.available() == [1], "it has no weights yet"
    roster.serve(roster.by_rank[2], 0)
    assert told == [(2, False), (2, True)]
    roster.stall(roster.by_rank[2], [2, 3], "silent")
    roster.hear(2)
    assert roster.behind(1) == [roster.by_rank[1]], "its other rank has not been heard of"
    roster.hear(3)
    assert len(roster.behind(1)) == 2
