"""A run directory and the head of its present attempt, driven by hand beside the sequential model."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sequential_model import Model

from pekoe.pipeline import files
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.control.dispatcher import Dispatcher, Losses
from pekoe.pipeline.control.group_table import GroupState, OutstandingGroup
from pekoe.pipeline.messages import (
    Assign,
    Cancel,
    Finished,
    Flush,
    Inbox,
    Message,
    Published,
    Rejected,
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

RANKS = (1, 2)


class FastDisk(files.Disk):
    """Without waiting for the platters: processes die here, computers do not."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


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

    def finish_with_equal_rewards(self, group: int) -> None:
        """The rank rejects it, unless the head wants it all the same."""
        if not self.rollout.running[group][1].drop_equal:
            self.finish(group)
            return
        self.reject(group, "equal_rewards")
        self.model.dropped += self.config.rollout.dynamic_batch_size
        assert self.dispatcher.resampled <= self.dispatcher.max_resampled

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
        if not batch:
            assert self.config.rollout.dynamic_batch_size
            return
        oldest = min(int(row.versions[row.loss_mask == 1].min()) for _, row in rows)
        newest = max(int(row.versions.max()) for _, row in rows)
        assert self.version - oldest <= self.model.eta, "too old"
        assert newest <= self.version, "from a future that was abandoned"

    def commit(self, batch: list[OutstandingGroup], losses: Losses) -> None:
        for group in batch:
            self.model.end(group.number, "consumed")
        self.model.version += 1
        self.model.dropped -= min(self.model.dropped, self.model.batch - len(batch))
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


def damage(path: Path, how: str) -> None:
    if how == "vanish" or not path.exists():
        path.unlink(missing_ok=True)
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


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
