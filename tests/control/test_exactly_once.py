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
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sequential_model import Model

from pekoe.pipeline import files
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.control.admission import Admission
from pekoe.pipeline.control.dispatcher import Dispatcher, Losses
from pekoe.pipeline.control.group_table import GroupState, OutstandingGroup
from pekoe.pipeline.data.cursor import Cursor
from pekoe.pipeline.messages import (
    Assign,
    Cancel,
    Finished,
    Flush,
    Inbox,
    Message,
    Published,
    PublishedGroup,
    Rejected,
    Row,
)
from pekoe.pipeline.observe.metrics import MetricsWriter, read_metrics
from pekoe.pipeline.records import Finish, Group, Trajectory
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.resume import go_back, training_cursor
from pekoe.pipeline.runs.start import RunData, StartPoint
from pekoe.pipeline.train.checkpoint import CONTROLLER_STATE
from pekoe.pipeline.trajectory.ledger import Entry, Ledger
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.store import BadRows, Store
from pekoe.pipeline.trajectory.writer import ShardWriter

pytestmark = pytest.mark.timeout(600)
RANKS = (1, 2)


class FastDisk(files.Disk):
    """Without waiting for the platters: processes die here, computers do not."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "disk", FastDisk())


class Rollout:
    """What the rollout ranks of one attempt hold; also the post office on the way to them."""

    rank, size = 0, 1 + len(RANKS)

    def __init__(self, run: RunDirectory, attempt: int) -> None:
        self.running: dict[int, tuple[int, Assign]] = {}
        self.asked: set[int] = set()
        self.cancelled: list[tuple[int, Assign]] = []
        self.writers = {rank: ShardWriter(run, ShardAttributes("test", attempt, f"rank-{rank}", 1.0)) for rank in RANKS}

    def send(self, to: int, message: Message) -> None:
        match message:
            case Assign():
                assert message.group not in self.running, "a rank was given what another one has"
                self.running[message.group] = (to, message)
            case Cancel():
                self.cancelled.append(self.running.pop(message.group))
            case Flush():
                self.asked.add(to)

    def inbox(self, *kinds: type[Message]) -> Inbox:
        raise AssertionError("nobody listens here")


def sample(assign: Assign, newest: int) -> Group:
    """Two trajectories whose tokens are of the version named and of the newest one."""
    rng = np.random.default_rng([assign.group, assign.try_number])
    made = []
    for number in range(2):
        versions = np.array([-1, -1, assign.min_version, newest, newest], np.int32)
        active = versions >= 0
        made.append(
            Trajectory(
                tokens=rng.integers(0, 100, 5, dtype=np.int32), loss_mask=active.astype(np.uint8),
                logprobs=np.where(active, -0.5, 0).astype(np.float32), versions=versions,
                turns=np.where(active, 0, -1).astype(np.int32), prompt_length=2, reward=float(number),
                finish=Finish.STOP, sample=number,
            )
        )  # fmt: skip
    return Group(assign.group, assign.try_number, f"example {assign.example}", made)


class Run:
    """A run directory and the head of its present attempt, beside the model."""

    def __init__(self, root: Path, config: RunConfig, num_steps: int) -> None:
        self.config, self.num_steps = config, num_steps
        self.directory = RunDirectory(root / "run")
        self.directory.create()
        self.data = RunData(config)
        self.num_examples = len(self.data.training)
        self.model = Model.of(
            self.num_examples, config.seed, config.total_train_epochs, config.train_dataset.batch_size,
            config.rollout.max_head_offpolicyness or 0,
        )  # fmt: skip
        self.attempt, self.adopted = -1, 0
        self.saved: dict[int, Model] = {0: self.model.save()}
        self.begin()

    @property
    def version(self) -> int:
        return self.dispatcher.admission.version

    def begin(self) -> None:
        """A new attempt, as `rl.run` and `lead` begin one."""
        self.attempt += 1
        version = max(self.saved)
        checkpoint = self.directory.checkpoints / f"step-{version}"
        self.store, self.ledger = Store(self.directory, retry_seconds=0.01), Ledger(self.directory)
        self.rollout = Rollout(self.directory, self.attempt)
        cursor = training_cursor(self.config, self.data)
        self.dispatcher = Dispatcher(self.config, self.rollout, cursor, RANKS, self.num_steps)
        if self.attempt:
            start = StartPoint(version, str(checkpoint) if checkpoint.is_dir() else "", self.num_steps)
            past = go_back(self.directory, self.config, self.attempt, start, self.data)
            if past.state:
                cursor.restore(past.state["cursor"])
                self.dispatcher.restore(past.state, version)
            self.dispatcher.offer(past.notices, version)
            self.check_nothing_is_newer_than(version)
        self.metrics = MetricsWriter(self.directory, self.attempt, tensorboard=False)

    def crash(self) -> None:
        self.store.close()
        self.metrics.close()
        self.model = self.saved[max(self.saved)].restored()
        self.begin()

    def check_nothing_is_newer_than(self, version: int) -> None:
        assert self.ledger.steps() == list(range(1, version + 1))
        assert [line.step for line in read_metrics(self.directory)] == list(range(1, version + 1))
        assert {path.name for path in self.directory.weights.iterdir()} == {f"v-{v + 1}" for v in range(version)}
        for name in self.store.paths():
            assert all(row.max_version <= version for group in self.store.notice(name).groups for row in group.rows)

    def admit(self) -> None:
        before = set(self.dispatcher.table.groups)
        self.dispatcher.admit_all()
        for number in self.dispatcher.table.groups:
            if number not in before:
                self.model.admit(number)

    def finish(self, group: int) -> None:
        rank, assign = self.rollout.running.pop(group)
        self.rollout.writers[rank].add(sample(assign, self.version))
        self.dispatcher.on_finished(Finished(assign.group, assign.try_number))

    def publish(self, rank: int) -> Published | None:
        notice = self.rollout.writers[rank].flush()
        if notice is not None:
            self.dispatcher.on_published(notice)
        return notice

    def lose(self) -> None:
        """Takes over what the dispatcher says of groups that ended untrained; the ledger has them with the step."""
        for how, losses in (("filtered", self.dispatcher.losses.filtered), ("skipped", self.dispatcher.losses.skipped)):
            for loss in losses:
                if self.model.ends.get(loss.group) != how:
                    self.model.again.discard(loss.group)
                    self.model.end(loss.group, how)

    def give_up(self, numbers: set[int]) -> None:
        """Groups that have left the table: they come again, or were skipped."""
        self.model.again |= numbers - set(self.dispatcher.table.groups)
        self.lose()

    def reject(self, group: int, reason: str) -> None:
        _, assign = self.rollout.running.pop(group)
        self.dispatcher.on_rejected(Rejected(group, assign.try_number, reason))
        self.give_up({group})

    def drop_stale(self) -> None:
        before = set(self.dispatcher.table.groups)
        self.dispatcher.drop_stale(self.version, 1.0)
        self.give_up(before)

    def finish_a_cancelled_one(self) -> None:
        """Its rank had finished it before the word came."""
        rank, assign = self.rollout.cancelled.pop()
        self.rollout.writers[rank].add(sample(assign, self.version))
        self.dispatcher.on_finished(Finished(assign.group, assign.try_number))

    def step(self) -> bool:
        """As the controller gathers and trains; False when the batch is not complete or its rows are bad."""
        want = self.dispatcher.want()
        if not want or self.version >= self.num_steps:
            return False
        batch = self.dispatcher.table.choose(self.version, want)
        if batch is None:
            self.dispatcher.flush(self.version, want)
            return False
        keys = [(group.shard, row.row) for group in batch for row in group.rows]
        try:
            rows = self.store.read(keys)
        except BadRows as error:
            for shard in {shard for shard, _, _ in error.rows}:
                before = set(self.dispatcher.table.groups)
                self.store.quarantine(shard, "damaged")
                self.dispatcher.replace_shard(shard)
                self.give_up(before)
            return False
        self.check_batch(batch, rows)
        self.commit(batch, self.dispatcher.consume(batch))
        return True

    def check_batch(self, batch: list[OutstandingGroup], rows: list[tuple[int, Trajectory]]) -> None:
        assert [number for number, _ in rows] == [group.number for group in batch for _ in group.rows]
        oldest = min(int(row.versions[row.loss_mask == 1].min()) for _, row in rows)
        newest = max(int(row.versions.max()) for _, row in rows)
        assert self.version - oldest <= self.model.eta, "too old"
        assert newest <= self.version, "from a future that was abandoned"

    def commit(self, batch: list[OutstandingGroup], losses: Losses) -> None:
        for group in batch:
            self.model.end(group.number, "consumed")
        self.model.version += 1
        entries = [Entry(g.number, g.try_number, g.shard, tuple(row.row for row in g.rows)) for g in batch]
        filtered = [Entry(loss.group, loss.try_number, reason=loss.reason) for loss in losses.filtered]
        skipped = [Entry(loss.group, loss.try_number, reason=loss.reason) for loss in losses.skipped]
        self.ledger.record(self.version, consumed=entries, filtered=filtered, skipped=skipped)
        self.metrics.write(self.version, {"reward/mean": 0.0})
        (self.directory.weights / f"v-{self.version}").mkdir()

    def checkpoint(self) -> None:
        state = msgspec.msgpack.encode({"version": self.version, **self.dispatcher.state()})
        folder = self.directory.checkpoints / f"step-{self.version}"
        folder.mkdir(exist_ok=True)
        (folder / CONTROLLER_STATE).write_bytes(state)
        self.saved[self.version] = self.model.save()
        idle = self.dispatcher.take_idle_shards()
        if self.config.rollout.keep_trajectories == "none":
            self.store.collect(idle)

    def check(self) -> None:
        """What holds at every instant."""
        dispatcher, model = self.dispatcher, self.model
        assert set(dispatcher.table.groups) == set(model.open) - model.again
        running = sum(group.state is GroupState.RUNNING for group in dispatcher.table.groups.values())
        assert dispatcher.admission.running == running == len(self.rollout.running)
        assert self.version == model.version
        if self.version < self.num_steps - 1 or not dispatcher.data_is_exhausted:
            limit = dispatcher.admission.max_concurrent
            assert dispatcher.admission.capacity() == min(limit - running, model.capacity())
        ledger: dict[int, str] = {}
        keys: list[tuple[str, int]] = []
        for record in self.ledger.read():
            keys += [(entry.shard, row) for entry in record.consumed for row in entry.rows]
            for how in ("consumed", "filtered", "skipped"):
                for entry in getattr(record, how):
                    assert entry.group not in ledger, "in the ledger twice"
                    ledger[entry.group] = how
        assert len(keys) == len(set(keys)), "a row was trained on twice"
        pending = {loss.group: "filtered" for loss in dispatcher.losses.filtered}
        pending |= {loss.group: "skipped" for loss in dispatcher.losses.skipped}
        assert ledger | pending == model.ends
        assert not ledger.keys() & pending.keys()

    def finish_everything(self) -> None:
        """Whatever state it is in, the run comes to its end, and then nothing is missing."""
        for _ in range(20 * (len(self.model.order) + 5)):
            self.admit()
            for group in list(self.rollout.running):
                self.finish(group)
            for rank in RANKS:
                self.publish(rank)
            if not self.step() and not self.dispatcher.want():
                break
            self.check()
            if self.version == self.num_steps:
                break
        model = self.model
        missing = [g for g in model.order if g not in model.ends and not model.is_passed_over(g)]
        assert not missing or self.version == self.num_steps, f"never ended: {missing}"
        assert not model.open
        assert not self.dispatcher.shelf or self.version == self.num_steps


def make_run(root: Path, *, eta: int, batch: int, examples: int, epochs: int, **rollout: Any) -> Run:
    config = RunConfig()
    data = root / "data.jsonl"
    data.write_text("".join(f'{{"question": "{n}", "answer": "{n}"}}\n' for n in range(examples)))
    config.train_dataset.type, config.train_dataset.path = "jsonl", str(data)
    config.train_dataset.batch_size, config.total_train_epochs, config.seed = batch, epochs, 5
    config.rollout.max_head_offpolicyness, config.rollout.stale_wait_seconds = eta, 1e-9
    config.rollout.max_consecutive_failures = 1_000_000
    for name, value in rollout.items():
        setattr(config.rollout, name, value)
    return Run(root, config, -(-examples * epochs // batch))


class History(RuleBasedStateMachine):
    """Any order of operations."""

    run: Run
    is_sound = False

    @initialize(
        eta=st.integers(0, 2), batch=st.integers(1, 3), examples=st.integers(4, 9), concurrent=st.integers(1, 9),
        reissues=st.integers(0, 2), keep=st.sampled_from(["none", "shards"]),
    )  # fmt: skip
    def begin(self, eta: int, batch: int, examples: int, concurrent: int, reissues: int, keep: str) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.run = make_run(
            self.root, eta=eta, batch=batch, examples=examples, epochs=2, max_concurrent_rollouts=concurrent,
            max_reissues=reissues, keep_trajectories=keep,
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


def damage(path: Path, how: str) -> None:
    if how == "vanish" or not path.exists():
        path.unlink(missing_ok=True)
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=int(os.environ.get("PEKOE_HISTORIES", "60")), stateful_step_count=50, deadline=None,
    suppress_health_check=list(HealthCheck), print_blob=True,
)  # fmt: skip


def take_steps(run: Run, version: int) -> None:
    """Up to a version; only what the steps need is finished."""
    while run.version < version:
        run.admit()
        for group in sorted(run.rollout.running)[: run.config.train_dataset.batch_size]:
            finish_and_publish(run, group)
        assert run.step()


def finish_and_publish(run: Run, group: int) -> None:
    rank = run.rollout.running[group][0]
    run.finish(group)
    run.publish(rank)


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
