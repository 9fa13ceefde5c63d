"""A world in one process for the real controller: roles answer its messages as real ranks do, and can misbehave."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from pekoe.pipeline import files
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.control.checkpoint_saves import Committed
from pekoe.pipeline.control.controller import INBOX_KINDS, Controller
from pekoe.pipeline.control.dispatcher import Dispatcher, Losses
from pekoe.pipeline.control.logprob_gap import GapLimit
from pekoe.pipeline.control.parts import ControllerParts
from pekoe.pipeline.control.step import StepRows
from pekoe.pipeline.control.step_report import StepReport
from pekoe.pipeline.control.stop_watch import StopWatch
from pekoe.pipeline.control.weight_update import WeightUpdates
from pekoe.pipeline.data.cursor import Cursor
from pekoe.pipeline.messages import (
    Assign,
    AssignEvaluation,
    Cancel,
    Commit,
    DiskRefused,
    Evaluated,
    Export,
    Exported,
    Finished,
    Flush,
    Hello,
    Inbox,
    LoadWeights,
    Message,
    Phase,
    PhaseReached,
    Plan,
    PrepareWeights,
    Present,
    Published,
    PublishedGroup,
    PublishWeights,
    Rejected,
    RollCall,
    Row,
    RowsRead,
    Save,
    Saved,
    StepDone,
    StopRollout,
    StopTrainer,
    WeightsLoaded,
    WeightsReady,
    WeightsSent,
    WrittenFile,
)


class Loopback:
    """A post office between threads: each rank has one queue; messages for the controller go to its own."""

    def __init__(self, ranks: int) -> None:
        self.rank, self.size = 0, ranks
        self.control: Inbox = queue.SimpleQueue()
        self.queues: dict[int, Inbox] = {rank: queue.SimpleQueue() for rank in range(ranks)}
        self.sent: Counter[str] = Counter()
        self.log: list[tuple[int, Message]] = []

    def send(self, to: int, message: Message) -> None:
        self.send_from(0, to, message)

    def send_from(self, source: int, to: int, message: Message) -> None:
        self.sent[type(message).__name__] += 1
        self.log.append((to, message))
        (self.control if isinstance(message, INBOX_KINDS) else self.queues[to]).put((source, message))

    def inbox(self, *kinds: type[Message]) -> Inbox:
        return self.control


@dataclass
class Faults:
    """What goes wrong, as functions of what is asked."""

    bad_shards: Callable[[Plan], Sequence[tuple[str, int, str]]] = lambda plan: ()
    load_error: Callable[[PrepareWeights], str] = lambda message: ""
    reject: Callable[[Assign], str] = lambda assign: ""
    equal: Callable[[Assign], bool] = lambda assign: False
    """Whether all samples of a group earn the same."""
    hang: Callable[[Assign], bool] = lambda assign: False
    save: Callable[[World, Save], None] = lambda world, message: world.tell_saved(message)
    export_refused: str = ""
    """Why an export finds no room."""
    export_seconds: float = 0.0
    weights_refused: str = ""
    """Why the files of the weights find no room."""
    answers_roll_call: bool = True
    refuse_disk: Callable[[int], str] = lambda rank: ""
    """Why the shards of a rank find no room just now."""
    check: float = -1.0
    """What the engine says of the check sequence; the trainer says -1."""


@dataclass
class Folder:
    """Checkpoints in memory: what was begun, complete, given up."""

    begun: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    abandoned: list[int] = field(default_factory=list)
    tidied: int = 0
    tell: Callable[[Message], None] = lambda message: None
    commit_error: Callable[[int], OSError | None] = lambda version: None
    snapshots: dict[int, dict[str, Any]] = field(default_factory=dict)

    def begin(self, version: int, state: bytes) -> None:
        self.begun.append(version)
        self.snapshots[version] = msgspec.msgpack.decode(state) if state != b"state" else {}

    def commit(self, version: int, written: Sequence[WrittenFile]) -> None:
        error = self.commit_error(version)
        if error is None:
            self.committed.append(version)
            self.tell(Committed(version))
        else:
            self.tell(Committed(version, str(error), files.is_full(error)))

    def tidy(self) -> None:
        self.tidied += 1

    def abandon(self, version: int) -> None:
        self.abandoned.append(version)


@dataclass
class World:
    """One trainer rank (0) and some rollout ranks."""

    config: RunConfig
    num_examples: int
    num_steps: int
    num_rollout: int = 1
    colocated: bool = False
    faults: Faults = field(default_factory=Faults)
    seed: int = 0
    num_validation: int = 0
    instances: Sequence[Sequence[int]] = ()
    """Ranks that make one engine together; empty: each makes its own."""
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.rollout_ranks = [0] if self.colocated else list(range(1, 1 + self.num_rollout))
        self.post = Loopback(1 + self.num_rollout)
        self.cursor = Cursor(self.num_examples, 1, True, self.config.total_train_epochs)
        self.consumed: list[tuple[int, list[int]]] = []
        self.losses = Losses()
        self.quarantined: list[str] = []
        self.folder = Folder(tell=lambda message: self.post.control.put((0, message)))
        self.seconds_left: float | None = None
        self.peer_failed = False
        self.grace_seconds = 60.0
        self.save_seconds: float | None = None
        self.phases: list[tuple[str, float | None, tuple[int, ...]]] = []
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.open: dict[int, list[PublishedGroup]] = defaultdict(list)
        self.engine_version = dict.fromkeys(self.rollout_ranks, 0)
        self.prepared: dict[int, PrepareWeights] = {}
        self.num_shards = 0
        self.tries: list[tuple[int, int]] = []
        self.rng = random.Random(self.seed)
        self.lock = threading.Lock()

    def build(self, version: int = 0) -> Controller:
        leaders = [ranks[0] for ranks in self.instances] or self.rollout_ranks
        dispatcher = Dispatcher(self.config, self.post, self.cursor, leaders, self.num_steps)
        weights = WeightUpdates(
            self.post,
            self.config.weights,
            [0],
            self.rollout_ranks,
            lambda epoch, members: "here",
            lambda: (),
            GapLimit(0.5),
            self.instances,
        )
        parts = ControllerParts(
            post=self.post, inbox=self.post.control, trainer_ranks=[0], rollout_ranks=self.rollout_ranks,
            rollout_leaders=leaders, colocated=self.colocated, dispatcher=dispatcher, weights=weights,
            attached=None,
            choose_rows=np.ones_like,
            plan_rows=lambda lengths, groups, shared: [[[np.arange(len(lengths))]]], num_validation=self.num_validation,
            record_step=lambda *arguments: self._record(*arguments),
            record_end=self._record_end, done_before=frozenset(),
            quarantine=lambda shard, reason: self.quarantined.append(shard),
            checkpoints=self.folder,
            report=StepReport(lambda step, values: self.metrics.append((step, dict(values))), lambda state: None),
            stop=StopWatch(self.stop.is_set, lambda: self.seconds_left, self.grace_seconds, self.save_seconds),
            peer_failed=lambda: self.peer_failed,
            stacks_of=lambda ranks: {rank: f"stacks of rank {rank}" for rank in ranks}, set_phase=self._set_phase,
        )  # fmt: skip
        return Controller(self.config, parts, self.num_steps, version)

    def run(self, version: int = 0) -> str:
        """The controller in this thread, the roles in theirs."""
        controller = self.controller = self.build(version)
        threads = [threading.Thread(target=self._trainer, daemon=True)]
        threads += [] if self.colocated else [
            threading.Thread(target=self._rollout, args=(rank,), daemon=True) for rank in self.rollout_ranks
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        return controller.run()

    def _set_phase(
        self, phase: str, *, limit: float | None = None, on: Sequence[int] = (), moved: float | None = None
    ) -> None:
        if not self.phases or self.phases[-1][0] != phase:
            self.phases.append((phase, limit, tuple(on)))

    def _record(self, version: int, rows: StepRows, losses: Losses) -> None:
        self.consumed.append((version, [group.number for group in rows.groups]))
        self.losses.filtered += losses.filtered
        self.losses.skipped += losses.skipped

    def _record_end(self, version: int, losses: Losses) -> None:
        self.losses.filtered += losses.filtered
        self.losses.skipped += losses.skipped

    def tell_saved(self, message: Save, error: str = "", disk_is_full: bool = False) -> None:
        self._tell(0, Saved(message.version, 0.0, error=error, disk_is_full=disk_is_full))

    def _tell(self, rank: int, message: Message) -> None:
        self.post.send_from(rank, 0, message)

    def _trainer(self) -> None:
        self._tell(0, Hello("trainer", 0))
        if self.colocated:
            self._tell(0, Hello("rollout", 0))
        while True:
            _, message = self.post.queues[0].get()
            match message:
                case Plan():
                    self._tell(0, RowsRead(message.version, message.round, tuple(self.faults.bad_shards(message))))
                case Commit():
                    self._tell(0, StepDone(message.version + 1, 0.0, {"train/loss": 0.0}))
                case PublishWeights():
                    refused = self.faults.weights_refused
                    self._tell(0, WeightsSent(message.version, 0.0, (-1.0,), refused, bool(refused)))
                case Save():
                    self.faults.save(self, message)
                case RollCall():
                    if self.faults.answers_roll_call:
                        self._tell(0, Present(message.number))
                case Export():
                    time.sleep(self.faults.export_seconds)
                    refused = self.faults.export_refused
                    self._tell(0, Exported(message.version, message.path, refused, bool(refused)))
                case StopTrainer():
                    return
                case _ if self.colocated:
                    self._handle_rollout(0, message)

    def _rollout(self, rank: int) -> None:
        self._tell(rank, Hello("rollout", 0))
        while True:
            _, message = self.post.queues[rank].get()
            if isinstance(message, StopRollout):
                return
            self._handle_rollout(rank, message)

    def _handle_rollout(self, rank: int, message: Any) -> None:
        match message:
            case Assign():
                self._sample(rank, message)
            case AssignEvaluation():
                version = self.engine_version[rank]
                self._tell(
                    rank, Evaluated(message.evaluation, message.example, (1.0,), (3,), (False,), version, version)
                )
            case Flush():
                self._publish(rank)
            case PrepareWeights():
                self.prepared[rank] = message
                self._tell(rank, WeightsReady(message.version, message.epoch))
            case LoadWeights():
                error = self.faults.load_error(self.prepared[rank])
                if not error:
                    self.engine_version[rank] = message.version
                self._tell(rank, WeightsLoaded(message.version, 0.0, () if error else (self.faults.check,), error))
            case Phase():
                self._tell(rank, PhaseReached(message.version))
            case Cancel():
                pass

    def _sample(self, rank: int, assign: Assign) -> None:
        with self.lock:
            self.tries.append((assign.group, assign.try_number))
        if self.faults.hang(assign):
            return
        if reason := self.faults.reject(assign):
            self._tell(rank, Rejected(assign.group, assign.try_number, reason, "because"))
            return
        is_equal = self.faults.equal(assign)
        if is_equal and assign.drop_equal:
            self._tell(rank, Rejected(assign.group, assign.try_number, "equal_rewards"))
            return
        first, version = len(self.open[rank]) * assign.n_samples, assign.min_version
        rewards = [1.0 if is_equal else float(n) for n in range(assign.n_samples)]
        rows = tuple(Row(first + n, n, 5, 3, reward, version, version, False) for n, reward in enumerate(rewards))
        self.open[rank].append(PublishedGroup(assign.group, assign.try_number, rows))
        self._tell(rank, Finished(assign.group, assign.try_number))
        if self.rng.random() < 0.2:
            self._publish(rank)

    def _publish(self, rank: int) -> None:
        if not self.open[rank]:
            return
        if reason := self.faults.refuse_disk(rank):
            self._tell(rank, DiskRefused(reason, len(self.open[rank])))
            threading.Timer(0.05, self._publish, (rank,)).start()
            return
        with self.lock:
            self.num_shards += 1
            name = f"shards/0-rank-{rank}/{self.num_shards:06d}.h5"
        self._tell(rank, Published(name, tuple(self.open[rank])))
        self.open[rank] = []
