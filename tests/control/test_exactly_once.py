"""Exactly once, under any history: the real cursor, dispatcher, ledger, shards and way back against a sequential model.

Random operations by hypothesis: groups are admitted, finish, are published, rejected or dropped; shards are damaged;
steps are taken, checkpoints made; the run dies at any instant and goes on, with its shards or without.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run_by_hand import RANKS, FastDisk, Rollout, Run, damage, finish_and_publish, make_run, take_steps

from pekoe.pipeline import files
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.control.admission import Admission
from pekoe.pipeline.control.dispatcher import Dispatcher
from pekoe.pipeline.data.cursor import Cursor
from pekoe.pipeline.messages import Published, PublishedGroup, Row
from pekoe.pipeline.run_directory import RunDirectory

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "disk", FastDisk())


class History(RuleBasedStateMachine):
    """Any order of operations."""

    run: Run
    is_sound = False

    @initialize(
        eta=st.integers(0, 2), batch=st.integers(1, 3), examples=st.integers(4, 9), concurrent=st.integers(1, 9),
        reissues=st.integers(0, 2), keep=st.sampled_from(["none", "shards"]),
        sampling=st.sampled_from([{}, *({"max_resampled_groups": n} for n in (0, 2)), {"dynamic_batch_size": True}]),
    )  # fmt: skip
    def begin(
        self, eta: int, batch: int, examples: int, concurrent: int, reissues: int, keep: str, sampling: dict[str, Any]
    ) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.run = make_run(
            self.root, eta=eta, batch=batch, examples=examples, epochs=2, max_concurrent_rollouts=concurrent,
            max_reissues=reissues, keep_trajectories=keep, dynamic_sampling=bool(sampling), **sampling,
        )  # fmt: skip

    def teardown(self) -> None:
        try:
            if self.is_sound:
                self.run.finish_everything()
        finally:
            self.run.store.close()
            shutil.rmtree(self.root)

    @rule()
    def admit(self) -> None:
        self.run.admit()

    @rule(pick=st.integers(0, 99), count=st.integers(1, 4), publish=st.booleans())
    def finish(self, pick: int, count: int, publish: bool) -> None:
        for _ in range(min(count, len(self.run.rollout.running))):
            rank = self.run.rollout.running[group := self.choose(self.run.rollout.running, pick)][0]
            self.run.finish(group)
            if publish:
                self.run.publish(rank)

    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=6), with_step=st.booleans())
    def advance(self, picks: list[int], with_step: bool) -> None:
        """Several operations at once, so that histories get somewhere."""
        self.run.admit()
        for pick in picks:
            self.finish(pick, 1, True)
        if with_step:
            self.step()

    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=6), with_checkpoint=st.booleans())
    def die_with_full_shards(self, picks: list[int], with_checkpoint: bool) -> None:
        self.advance(picks, False)
        if with_checkpoint:
            self.run.checkpoint()
        self.run.crash()

    @rule(rank=st.sampled_from(RANKS))
    def publish(self, rank: int) -> None:
        self.run.publish(rank)

    @rule(pick=st.integers(0, 99), reason=st.sampled_from(["none", "none", "error", "timeout", "too_long"]))
    def reject(self, pick: int, reason: str) -> None:
        if self.run.rollout.running:
            self.run.reject(self.choose(self.run.rollout.running, pick), reason)

    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=6), with_step=st.booleans())
    def finish_with_equal_rewards(self, picks: list[int], with_step: bool) -> None:
        self.run.admit()
        for pick in picks[: len(self.run.rollout.running)]:
            self.run.finish_with_equal_rewards(self.choose(self.run.rollout.running, pick))
        if with_step:
            self.step()

    @rule()
    def drop_stale(self) -> None:
        self.run.drop_stale()

    @rule()
    def finish_a_cancelled_one(self) -> None:
        if self.run.rollout.cancelled:
            self.run.finish_a_cancelled_one()

    @rule(pick=st.integers(0, 99), how=st.sampled_from(["cut", "flip", "vanish"]))
    def damage(self, pick: int, how: str) -> None:
        names = sorted(self.run.dispatcher.table.shards())
        if names:
            damage(self.run.directory.path / names[pick % len(names)], how)
            self.step()

    @rule()
    def step(self) -> None:
        if not self.run.step():
            for rank in self.run.rollout.asked:
                self.run.publish(rank)
            self.run.rollout.asked.clear()

    @rule()
    def checkpoint(self) -> None:
        self.run.checkpoint()

    @rule()
    def crash(self) -> None:
        self.run.crash()

    @invariant()
    def holds(self) -> None:
        self.is_sound = False
        if hasattr(self, "run"):
            self.run.check()
        self.is_sound = True

    @staticmethod
    def choose(running: dict[int, Any], pick: int) -> int:
        return sorted(running)[pick % len(running)]


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=int(os.environ.get("PEKOE_HISTORIES", "60")), stateful_step_count=50, deadline=None,
    suppress_health_check=list(HealthCheck), print_blob=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("eta", "num_ready", "eta_then", "num_adopted"),
    [
        (0, 0, 0, 0), (0, 2, 0, 2), (0, 3, 0, 3), (2, 0, 2, 0), (2, 2, 2, 2), (2, 3, 2, 3), (2, 7, 2, 7), (2, 9, 2, 9),
        (2, 9, 1, 3), (2, 5, 0, 0),
    ],
    ids=[
        "empty, synchronous", "partial, synchronous", "exactly full, synchronous", "empty", "partial", "exactly full",
        "over-full", "all there is", "smaller limit", "only stale",
    ],
)  # fmt: skip
def test_a_resume_with_any_buffer_goes_on_and_uses_nothing_twice(
    eta: int, num_ready: int, eta_then: int, num_adopted: int, tmp_path: Path
) -> None:
    """Groups lie in shards when the run dies, more than one step needs, or too old for the limit it goes on with."""
    run = make_run(tmp_path, eta=eta, batch=3, examples=30, epochs=1)
    take_steps(run, 2)
    run.admit()
    for group in sorted(run.rollout.running)[:num_ready]:
        finish_and_publish(run, group)
    assert len(run.dispatcher.table.ready) == num_ready
    num_open = len(run.dispatcher.table.groups)
    assert num_open == 3 * (eta + 1)
    run.checkpoint()
    capacity_before = run.dispatcher.admission.capacity()
    run.config.rollout.max_head_offpolicyness = run.model.eta = run.saved[2].eta = eta_then
    run.crash()
    run.admit()
    assert run.dispatcher.counts["adopted"] == num_adopted
    assert run.dispatcher.counts["issued_again"] == 3 * (eta_then + 1) - num_adopted
    assert run.dispatcher.admission.capacity() == capacity_before == 0
    run.check()
    run.finish_everything()
    assert sorted(run.model.ends) == list(run.model.order)


@pytest.mark.parametrize("version", [0, 5, 10, 50])
@pytest.mark.parametrize("eta", [0, 1, 2, 3])
@pytest.mark.parametrize("num_running", [0, 3, 99])
def test_the_capacity_after_a_resume_is_that_of_an_uninterrupted_run(
    version: int, eta: int, num_running: int, tmp_path: Path
) -> None:
    """With groups running and ready at the checkpoint, and none of their shards left."""
    config = RunConfig()
    config.train_dataset.batch_size, config.rollout.max_head_offpolicyness = 4, eta
    cursor = Cursor(1000, 1)
    dispatcher = Dispatcher(config, Rollout(RunDirectory(tmp_path), 0), cursor, RANKS, 250)
    row = Row(0, 0, 5, 3, 1.0, version, version, False)
    for step in range(version + 1):
        dispatcher.admit_all()
        running = dispatcher.table.running()
        for group in running[: 4 if step < version else max(0, len(running) - num_running)]:
            newest = PublishedGroup(
                group.number, 0, (msgspec.structs.replace(row, min_version=step, max_version=step),)
            )
            dispatcher.on_published(Published(f"{group.number}", (newest,)))
        if step < version:
            chosen = dispatcher.table.choose(step)
            assert chosen is not None
            dispatcher.consume(chosen)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(dispatcher.state()))
    again_cursor = Cursor(1000, 1)
    again_cursor.restore(state["cursor"])
    again = Dispatcher(config, Rollout(RunDirectory(tmp_path), 1), again_cursor, RANKS, 250)
    again.restore(state, version)
    assert again.admission.capacity() == min(again.admission.max_concurrent, 4 * (eta + 1))
    assert again.admission.capacity() == Admission(again.admission.max_concurrent, 4, eta).capacity()
    again.admit_all()
    assert again.admission.capacity() == 0
    assert set(again.table.groups) == set(dispatcher.table.groups)
    assert sorted(entry[0] for entry in state["in_flight"]) == sorted(dispatcher.table.groups)


def test_a_straggler_keeps_its_tries_over_a_resume_and_is_skipped_the_second_time(tmp_path: Path) -> None:
    """The skip list and the tries are in the checkpoint: later epochs never see the example again."""
    run = make_run(tmp_path, eta=0, batch=2, examples=4, epochs=2, max_reissues=1)
    run.admit()
    straggler, other = sorted(run.rollout.running)
    finish_and_publish(run, other)
    run.drop_stale()
    run.checkpoint()
    run.crash()
    run.admit()
    assert run.rollout.running[straggler][1].try_number == 1
    assert run.dispatcher.counts["adopted"] == 1, "the other one lay in a shard"
    run.drop_stale()
    assert run.model.ends == {straggler: "skipped"}
    run.checkpoint()
    run.crash()
    assert run.dispatcher.losses.skipped, "it will be in the ledger with the next step"
    run.finish_everything()
    example = run.model.order[straggler]
    assert [group for group in run.model.ends if run.model.order[group] == example] == [straggler]
    assert [entry.group for record in run.ledger.read() for entry in record.skipped] == [straggler]
    assert len(run.model.ends) == 7


def test_what_earlier_filtering_let_in_is_not_adopted_before_its_turn(tmp_path: Path) -> None:
    """The abandoned future had filtered two groups and sampled later ones: now these two come first again."""
    run = make_run(tmp_path, eta=1, batch=2, examples=6, epochs=1)
    run.checkpoint()
    run.admit()
    for group in (0, 1):
        run.reject(group, "none")
    run.admit()
    for group in sorted(run.rollout.running):
        finish_and_publish(run, group)
    assert sorted(run.dispatcher.table.ready) == [2, 3, 4, 5]
    run.crash()
    run.admit()
    assert sorted(run.rollout.running) == [0, 1]
    assert sorted(run.dispatcher.table.ready) == [2, 3]
    for group in (0, 1):
        run.reject(group, "none")
    run.admit()
    assert sorted(run.dispatcher.table.ready) == [2, 3, 4, 5]
    assert run.dispatcher.counts["adopted"] == 4
    run.finish_everything()
    assert {group for group, how in run.model.ends.items() if how == "filtered"} == {0, 1}


def test_a_damaged_shard_is_not_adopted_from_again(tmp_path: Path) -> None:
    """Two steps find their groups in it: only the first one loses time to it."""
    run = make_run(tmp_path, eta=1, batch=1, examples=4, epochs=1)
    run.admit()
    rank = run.rollout.running[0][0]
    for group in (0, 1):
        run.rollout.running[group] = (rank, run.rollout.running[group][1])
        run.finish(group)
    notice = run.publish(rank)
    assert notice is not None
    run.checkpoint()
    run.config.rollout.max_head_offpolicyness = run.model.eta = run.saved[0].eta = 0
    run.crash()
    run.admit()
    assert (len(run.dispatcher.table.ready), len(run.dispatcher.shelf)) == (1, 1)
    damage(run.directory.path / notice.path, "flip")
    assert not run.step()
    assert len(run.dispatcher.shelf) == 0
    run.admit()
    assert sorted(run.rollout.running) == [0]
    run.finish_everything()
    assert run.dispatcher.counts["damaged"] == 1


def test_shards_that_nobody_needs_are_named_once(tmp_path: Path) -> None:
    """Consumed ones, and those that hold late tries only."""
    run = make_run(tmp_path, eta=0, batch=1, examples=4, epochs=1)
    run.admit()
    run.drop_stale()
    run.finish_a_cancelled_one()
    late = [notice.path for rank in RANKS if (notice := run.publish(rank))]
    assert run.dispatcher.counts["late"] == 1
    assert run.dispatcher.take_idle_shards() == set(late)
    run.admit()
    finish_and_publish(run, 0)
    assert run.dispatcher.take_idle_shards() == set()
    assert run.step()
    assert len(run.dispatcher.take_idle_shards()) == 1
    assert run.dispatcher.take_idle_shards() == set()
    assert run.dispatcher.take_idle_shards() == set()


def test_a_checkpoint_before_anything_was_admitted_again_forgets_nothing(tmp_path: Path) -> None:
    """Neither the tries of groups in flight nor the shards that wait to be adopted."""
    run = make_run(tmp_path, eta=1, batch=2, examples=6, epochs=1, keep_trajectories="none")
    run.admit()
    first, *others = sorted(run.rollout.running)
    for group in others:
        finish_and_publish(run, group)
    run.reject(first, "error")
    for _ in range(3):
        run.checkpoint()
        run.crash()
    run.admit()
    assert run.rollout.running[first][1].try_number == 1
    assert sorted(run.dispatcher.table.ready) == others
    assert run.dispatcher.counts["rejected_error"] == 1
    run.finish_everything()
    assert all(how == "consumed" for how in run.model.ends.values())


def test_what_a_try_that_was_given_up_has_left_is_not_adopted(tmp_path: Path) -> None:
    run = make_run(tmp_path, eta=0, batch=1, examples=2, epochs=1, keep_trajectories="shards")
    run.admit()
    run.drop_stale()
    run.finish_a_cancelled_one()
    for rank in RANKS:
        run.publish(rank)
    run.checkpoint()
    run.crash()
    run.admit()
    assert run.rollout.running[0][1].try_number == 1
    assert run.dispatcher.counts["adopted"] == 0
    run.finish_everything()
    assert [entry.try_number for record in run.ledger.read() for entry in record.consumed] == [1, 0]
