"""The real controller against simulated roles: whole runs, and everything that can go wrong on the way."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.control.dispatcher import Dispatcher, RolloutFailure
from pekoe.pipeline.control.logprob_gap import EnginesDisagreeError
from pekoe.pipeline.control.pump import NoProgress
from pekoe.pipeline.control.weight_update import WeightUpdateError
from pekoe.pipeline.data.cursor import Cursor
from pekoe.pipeline.messages import Finished, Plan, Published, PublishedGroup, Row, Wake

sys.path.insert(0, str(Path(__file__).resolve().parent))

from simulated_roles import Faults, Loopback, World


def config(eta: int | None = 2, batch: int = 3, epochs: int = 1) -> RunConfig:
    made = RunConfig()
    made.total_train_epochs = epochs
    made.train_dataset.batch_size = batch
    made.gconfig.n_samples = 2
    made.rollout.max_head_offpolicyness = eta
    made.cluster.progress_seconds = 20.0
    made.recover.freq_steps = 2
    return made


def consumed(world: World) -> list[int]:
    return [number for _, numbers in world.consumed for number in numbers]


@pytest.mark.parametrize("eta", [0, 1, 4, None])
@pytest.mark.parametrize("colocated", [False, True])
def test_every_group_is_consumed_once_and_the_last_batch_may_be_short(eta: int | None, colocated: bool) -> None:
    world = World(config(eta), num_examples=20, num_steps=7, num_rollout=3, colocated=colocated, num_validation=5)
    world.config.evaluator.freq_steps = 3
    world.config.evaluator.at_end = True
    world.config.saver.freq_steps = 4
    assert world.run() == "finished"
    assert sorted(consumed(world)) == list(range(20))
    assert [len(numbers) for _, numbers in world.consumed] == [3] * 6 + [2]
    assert world.folder.committed == [2, 4, 6, 7]
    assert [step for step, values in world.metrics if "eval/accuracy" in values][-1] == 7
    assert world.post.sent["Export"] == 2
    assert world.post.sent["StopRollout"] == len(world.rollout_ranks)
    assert [step for step, values in world.metrics if "reward/mean" in values] == list(range(1, 8))


@pytest.mark.parametrize("colocated", [False, True])
def test_damaged_rows_are_replaced_before_anything_is_trained(colocated: bool) -> None:
    seen: list[str] = []

    def bad(plan: Plan) -> list[tuple[str, int, str]]:
        if plan.version == 1 and not seen:
            seen.extend(plan.shards)
            return [(plan.shards[0], 0, "checksum")]
        return []

    world = World(config(), 12, 4, colocated=colocated, faults=Faults(bad_shards=bad))
    assert world.run() == "finished"
    assert world.quarantined == seen[:1]
    assert sorted(consumed(world)) == list(range(12))
    again = [pair for pair in set(world.tries) if world.tries.count(pair) > 1]
    assert again
    assert all(try_number == 0 for _, try_number in again)
    assert world.post.sent["Replan"] == 1
    assert any(isinstance(message, Wake) for _, message in world.post.log) == colocated


def test_a_failed_transfer_is_tried_again_in_a_new_group() -> None:
    def fails(message: object) -> str:
        return "no room" if message.version == 2 and message.epoch == 0 else ""  # type: ignore[attr-defined]

    world = World(config(), 12, 4, num_rollout=2, faults=Faults(load_error=fails))
    assert world.run() == "finished"
    prepared = [(m.version, m.epoch) for _, m in world.post.log if type(m).__name__ == "PrepareWeights"]
    assert (2, 0) in prepared
    assert (2, 1) in prepared
    assert (3, 1) in prepared


def test_a_transfer_that_always_fails_ends_the_run() -> None:
    world = World(config(), 12, 4, faults=Faults(load_error=lambda message: "no room"))
    with pytest.raises(WeightUpdateError, match="no room"):
        world.run()


def test_engines_that_disagree_with_the_trainer_end_the_run() -> None:
    world = World(config(), 12, 4, faults=Faults(check=-1.9))
    with pytest.raises(EnginesDisagreeError, match="logprob_gap_limit"):
        world.run()


def test_groups_that_the_workflow_declines_are_filtered_and_replaced() -> None:
    world = World(config(), 14, 4, faults=Faults(reject=lambda a: "none" if a.group in (1, 5) else ""))
    assert world.run() == "finished"
    assert sorted(loss.group for loss in world.losses.filtered) == [1, 5]
    assert sorted(consumed(world)) == [number for number in range(14) if number not in (1, 5)]


def test_failing_groups_are_issued_again_then_skipped_and_counted() -> None:
    world = World(config(), 13, 4, faults=Faults(reject=lambda a: "error" if a.group == 4 else ""))
    assert world.run() == "finished"
    assert [number for group, number in world.tries if group == 4] == [0, 1, 2, 3]
    assert [loss.group for loss in world.losses.skipped] == [4]
    assert 4 not in consumed(world)


def test_a_workflow_that_always_fails_stops_the_run() -> None:
    world = World(config(), 40, 4, faults=Faults(reject=lambda a: "error"))
    world.config.rollout.max_consecutive_failures = 5
    with pytest.raises(RolloutFailure, match=r"max_consecutive_failures[\s\S]*because"):
        world.run()


@pytest.mark.parametrize("policy", ["wait", "drop"])
def test_a_straggler_is_dropped_issued_again_and_at_last_skipped(policy: str) -> None:
    world = World(config(), 13, 4, faults=Faults(hang=lambda a: a.group == 0))
    world.config.rollout.stale_policy = policy
    world.config.rollout.stale_wait_seconds = 0.2
    world.config.rollout.max_reissues = 1
    assert world.run() == "finished"
    assert [number for group, number in world.tries if group == 0] == [0, 1]
    assert [loss.group for loss in world.losses.skipped] == [0]
    assert sorted(consumed(world)) == list(range(1, 13))


def test_a_stop_while_waiting_saves_and_drops_nothing_that_was_trained() -> None:
    world = World(config(), 40, 10, faults=Faults(hang=lambda a: a.group > 14))
    threading.Timer(1.0, world.stop.set).start()
    began = time.monotonic()
    assert world.run() == "stopped"
    assert time.monotonic() - began < 40
    steps = len(world.consumed)
    assert 0 < steps < 10
    assert world.folder.committed[-1] == steps
    assert world.post.sent["StopTrainer"] == 1


def test_a_wait_without_progress_ends_with_its_reason() -> None:
    world = World(config(), 12, 4, faults=Faults(hang=lambda a: True))
    world.config.cluster.progress_seconds = 0.5
    with pytest.raises(NoProgress, match="the batch of version 0"):
        world.run()


def test_a_run_from_a_snapshot_consumes_the_rest_only() -> None:
    first = World(config(), 24, 3)
    controller = first.build()
    assert first.run() == "finished"
    state = controller.parts.dispatcher.state()
    second = World(config(), 24, 8, seed=3)
    second.cursor.restore(state["cursor"])
    dispatcher = second.build(3).parts.dispatcher
    dispatcher.restore(state, 3)
    fresh = World(config(), 24, 8).build().parts.dispatcher
    assert dispatcher.admission.capacity() == fresh.admission.capacity()
    admitted = []
    while (found := second.cursor.admit()) is not None:
        admitted.append(found[0])
    assert sorted(admitted + consumed(first)) == list(range(24))


def test_the_dispatcher_handles_five_thousand_notices_a_second() -> None:
    """A head for thousands of rollout ranks: finished and published notices of 4,000 groups over 1,000 ranks."""
    made = config(eta=3, batch=1000)
    made.rollout.max_concurrent_rollouts = 4000
    post = Loopback(1001)
    dispatcher = Dispatcher(made, post, Cursor(10_000, 1, True, 1), list(range(1, 1001)), 8)
    dispatcher.admit_all()
    groups = list(dispatcher.table.groups.values())
    assert len(groups) == 4000
    row = Row(0, 0, 100, 50, 1.0, 0, 0, False)
    began = time.process_time()
    for count, group in enumerate(groups):
        dispatcher.on_finished(Finished(group.number, 0))
        dispatcher.on_published(Published("s", (PublishedGroup(group.number, 0, (row,)),)))
        if count % 100 == 0:
            dispatcher.table.choose(0)
            dispatcher.flush(0)
    assert 8000 / (time.process_time() - began) > 5000


def test_a_late_group_is_dropped_once_and_gets_its_time_again() -> None:
    """After the limit every poll looks again: a group issued anew must not be given up at once."""
    made = config(eta=0, batch=2)
    made.rollout.stale_wait_seconds = 0.2
    dispatcher = Dispatcher(made, Loopback(2), Cursor(10, 1, True, 1), [1], 5)
    dispatcher.admit_all()
    time.sleep(0.25)
    for _ in range(5):
        dispatcher.drop_stale(0, 1.0)
        dispatcher.admit_all()
    assert dispatcher.counts["dropped"] == 2
    assert {group.try_number for group in dispatcher.table.groups.values()} == {1}
