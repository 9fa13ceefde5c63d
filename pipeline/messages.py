"""The control plane's wire format: every message that ranks send each other, and the two verbs that carry them.

Messages are small by construction (<= 1 MiB): an assignment carries an example's index, a notice carries a shard's path
and a few numbers per sequence. They lie on the floor because control, rollout and train all speak them.

    head  -> rollout   Assign, AssignEvaluation, Flush, Cancel, PrepareWeights, LoadWeights, Phase, Wake, StopRollout
    rollout -> head    Hello, Finished, Published, Rejected, Evaluated, WeightsReady, WeightsLoaded, PhaseReached
    rollout -> head    DiskRefused, EngineFailed, EngineRestored, LogprobsChecked
    rollout -> rollout HandedOver, Endpoint (the first rank of an engine to its others)
    head  -> trainer   Endpoint, Plan, Commit, Replan, PublishWeights, ShareWeights, Save, Export, RollCall, StopTrainer
    head  -> trainer   CheckLogprobs
    head  -> rollout   CheckEngine
    head  -> trainer   Evaluate (supervised tasks)
    trainer -> head    EvaluationPart
    trainer -> head    Hello, RowsRead, StepDone, WeightsSent, WeightsShared, Saved, Exported, Present
    foreman -> rollout Follow, beside what a head sends (rollout ranks of an attached world)
    any   -> head      SignalReceived, Leaving, Stacks
    any   -> leader    Heartbeat (of its node; the head leads its own)
    leader -> head     NodeHeartbeats
    head  -> any       Farewell, ShowStacks
"""

from __future__ import annotations

import queue
from typing import Protocol

import msgspec

STACKS_LIMIT = 60_000


class Message(msgspec.Struct, frozen=True, tag=True):
    """Root of all messages; the tag is the class name."""


class Hello(Message, frozen=True):
    """A role is ready to work: its models are loaded and its groups are formed."""

    role: str
    version: int


class Endpoint(Message, frozen=True):
    """The owner of a named meeting point has bound its port: trainer rank 0 tells the other trainer ranks, the first
    rank of an engine its others."""

    name: str
    address: str
    """host:port"""


class Assign(Message, frozen=True):
    """Run the episodes of one prompt."""

    group: int
    try_number: int
    example: int
    n_samples: int
    min_version: int
    """Sample nothing with weights older than this."""
    drop_equal: bool = False
    """Reject the group (`equal_rewards`) when the rewards of its episodes are all equal."""


class AssignEvaluation(Message, frozen=True):
    """Run an evaluation episode of one validation example; never trained on, never counted by admission."""

    evaluation: int
    """Version at which the evaluation was asked for: its name."""
    example: int
    n_samples: int


class Flush(Message, frozen=True):
    """Publish the open shard now: the trainer waits for a group that lies in it."""


class Finished(Message, frozen=True):
    """A group is done and lies in the open shard of the rank that says so, which need not be the one that sampled it;
    the head asks for it by Flush when a batch needs it."""

    group: int
    try_number: int


class HandedOver(Message, frozen=True):
    """To the writer rank of the same node: finished groups lie in this file of the memory that both share."""

    path: str


class Cancel(Message, frozen=True):
    """Stop the episodes of a group; its slot was given back already."""

    group: int
    try_number: int


class Row(msgspec.Struct, frozen=True, array_like=True):
    """What the head must know of one published sequence to plan a batch and to report on it."""

    row: int
    sample: int
    length: int
    num_active: int
    """Tokens with loss_mask 1."""
    reward: float
    """The outcome's and those of the turns together."""
    min_version: int
    max_version: int
    truncated: bool
    num_shared: int = 0
    """Tokens with which it begins as the row before it in its group does (`records.common_prefix`)."""


class PublishedGroup(msgspec.Struct, frozen=True, array_like=True):
    """One group of a published shard."""

    group: int
    try_number: int
    rows: tuple[Row, ...]


class Published(Message, frozen=True):
    """A shard is visible under `path` (relative to the run directory)."""

    path: str
    groups: tuple[PublishedGroup, ...]


class DiskRefused(Message, frozen=True):
    """A shard could not be published for lack of space or quota; its groups are kept, and it is tried again.

    The next `Published` of the rank says that it went well."""

    reason: str
    num_groups: int


EQUAL_REWARDS = "equal_rewards"
"""Reason of dynamic sampling for the rejection of a group."""


class Rejected(Message, frozen=True):
    """The episodes of a group gave nothing to train on."""

    group: int
    try_number: int
    reason: str
    """`error`, `timeout`, `none` (the workflow returned None), `too_long`, EQUAL_REWARDS."""
    detail: str = ""
    """Traceback or the like, at most a few thousand characters."""


class Evaluated(Message, frozen=True):
    """Result of one evaluation example."""

    evaluation: int
    example: int
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]
    min_version: int
    max_version: int


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Name, shape and dtype (`float32`, `bfloat16`, …) of one tensor, in Hugging Face names."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class PrepareWeights(Message, frozen=True):
    """Stop at a token and answer WeightsReady; LoadWeights says when the members are complete. A later one replaces it:
    who was not ready in time is left out, and hears of the version in an epoch of its own."""

    version: int
    epoch: int
    """Number of the transfer group; a new one means: form a new group with `members`."""
    members: tuple[int, ...]
    """World ranks of the transfer group, the sender first."""
    endpoint: str
    """Where the sender waits for the members of this epoch (`host:port`; empty for a transport that needs none)."""
    tensors: tuple[TensorSpec, ...]
    """In sending order; empty when unchanged since this epoch began."""


class WeightsReady(Message, frozen=True):
    """The engine has stopped at a token and waits for the buckets of this version."""

    version: int
    epoch: int


class LoadWeights(Message, frozen=True):
    """To the members of an epoch, once all of them are ready: take the weights of this version now."""

    version: int
    epoch: int


class PublishWeights(Message, frozen=True):
    """To trainer ranks: stream the weights of `version` now; the sender alone feeds the transfer group."""

    version: int
    epoch: int
    members: tuple[int, ...]


class WeightsSent(Message, frozen=True):
    """From trainer rank 0, after all its buckets are gone."""

    version: int
    seconds: float
    check: tuple[float, ...] = ()
    """Log-probs of the check sequences by the trainer at this version."""
    error: str = ""
    disk_is_full: bool = False
    """The error is lack of space or quota: it is worth trying again."""


class ShareWeights(Message, frozen=True):
    """To trainer ranks, at a step boundary: write the weights of `version` to disk for attached worlds."""

    version: int


class WeightsShared(Message, frozen=True):
    """From trainer rank 0: attached worlds can load `version` (or why not)."""

    version: int
    seconds: float
    token: str = ""
    """Tells these weights from those that another attempt wrote under the same number."""
    error: str = ""
    disk_is_full: bool = False


class Follow(Message, frozen=True):
    """To the rollout ranks of an attached world: the run is in this attempt now. Every assignment of the one before was
    cancelled; what lies in the open shard is thrown away, and shards carry this attempt from now on."""

    attempt: int


class WeightsLoaded(Message, frozen=True):
    """From an engine: it serves `version` now (or why not)."""

    version: int
    seconds: float
    """How long decoding stood still."""
    check: tuple[float, ...] = ()
    """Log-probs of the check sequences by the engine."""
    error: str = ""


class CheckLogprobs(Message, frozen=True):
    """To trainer ranks, before an attempt samples anything: score the check sequences."""

    version: int


class CheckEngine(Message, frozen=True):
    """To ranks that lead an engine, before an attempt samples anything: score the check sequences, and a completion
    that the engine samples now."""

    version: int


class LogprobsChecked(Message, frozen=True):
    """From trainer rank 0 (CheckLogprobs) and from each engine (CheckEngine)."""

    version: int
    check: tuple[float, ...]
    """Log-probs of the check sequences at the sampling temperature."""
    sampled: tuple[float, ...] = ()
    """An engine's: recorded while it sampled a completion with the run's sampling parameters."""
    scored: tuple[float, ...] = ()
    """The same tokens, scored by the same engine."""


class EngineFailed(Message, frozen=True):
    """The engine of a rollout rank has failed and is being built anew; its requests wait there. The rank takes part in
    no weight update until `EngineRestored`."""

    reason: str
    restarts: int
    """How often this rank has built its engine anew, this time included."""


class EngineRestored(Message, frozen=True):
    """The engine stands again, with the weights it was built from: it serves nothing until it has the current ones."""


class Phase(Message, frozen=True):
    """Colocated ranks: the device belongs to the trainer now: stop at a token, keep unfinished sequences, sleep.

    The engine wakes when the next weights are loaded."""

    version: int


class Wake(Message, frozen=True):
    """Colocated ranks: the step was called off; go on decoding with the weights that you have."""

    version: int


class PhaseReached(Message, frozen=True):
    """The engine sleeps: its device is free."""

    version: int


class PlannedRow(msgspec.Struct, frozen=True, array_like=True):
    """A sequence of a batch."""

    shard: int
    """Index into Plan.shards."""
    row: int
    group: int
    length: int


class Plan(Message, frozen=True):
    """What a trainer rank computes in a step: read and verify these rows, answer RowsRead, wait for the verdict."""

    version: int
    """The step at version v makes version v+1."""
    round: int
    """0, 1, … : plans of the same step after bad rows were replaced."""
    shards: tuple[str, ...]
    minibatches: tuple[tuple[tuple[PlannedRow, ...], ...], ...]
    """[minibatch][micro-batch][row]; every rank has the same number of micro-batches, some may be empty."""
    groups: tuple[int, ...]
    """All groups of the batch over all ranks, ascending."""
    num_active: tuple[int, ...]
    """Global number of active tokens of each minibatch, over all ranks: the token-mean denominator."""
    num_sequences: tuple[int, ...]
    """Global number of sequences of each minibatch."""


class RowsRead(Message, frozen=True):
    """A trainer rank has read and verified its rows of a plan, or says which ones are bad."""

    version: int
    round: int
    bad: tuple[tuple[str, int, str], ...] = ()
    """(shard, row, reason) of rows that could not be read; their whole groups are replaced."""


class Commit(Message, frozen=True):
    """Every rank has its rows: train. No trainer collective happens before this."""

    version: int
    round: int


class Replan(Message, frozen=True):
    """Forget the plan of this round: another one comes."""

    version: int
    round: int


class StepDone(Message, frozen=True):
    """A trainer rank finished the step; `stats` are reduced over the ranks, equal on all."""

    version: int
    """The new version."""
    seconds: float
    stats: dict[str, float] = {}


class Evaluate(Message, frozen=True):
    """Supervised tasks: the loss on some validation examples by the weights of `version`."""

    version: int
    first: int
    count: int
    """Examples `first` to `first + count - 1`."""


class EvaluationPart(Message, frozen=True):
    """A trainer rank has evaluated these examples together with its peers; `sums` are over all ranks, equal on all."""

    version: int
    first: int
    sums: dict[str, float] = {}


class Save(Message, frozen=True):
    """Write this rank's part of the checkpoint of `version`; training goes on once its state is copied."""

    version: int


class WrittenFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of a checkpoint, as its writer saw its bytes go out."""

    name: str
    """Relative to the checkpoint's folder."""
    num_bytes: int
    blake2b: str
    """32 hex digits."""


class Saved(Message, frozen=True):
    """A trainer rank has written its part of the checkpoint, durably (or why not)."""

    version: int
    seconds: float
    """From the order to the last byte."""
    stage_seconds: float = 0.0
    """Of these, how long training stood still."""
    files: tuple[WrittenFile, ...] = ()
    error: str = ""
    disk_is_full: bool = False
    """The error is lack of space or quota: it is worth trying again."""


class Export(Message, frozen=True):
    """Write a Hugging Face folder of `version`; `path` is relative to the run directory."""

    version: int
    path: str


class Exported(Message, frozen=True):
    """A Hugging Face folder is complete (from trainer rank 0), or had no room (any other error ends the run)."""

    version: int
    path: str
    error: str = ""
    disk_is_full: bool = False


class RollCall(Message, frozen=True):
    """A stop was asked for: whoever can take part in a last checkpoint answers Present."""

    number: int


class Present(Message, frozen=True):
    """A trainer rank stands at a step boundary and can save."""

    number: int


class StopTrainer(Message, frozen=True):
    """Leave the learner's loop and close."""

    reason: str
    """`finished` or `stopped`: how the run ends."""


class StopRollout(Message, frozen=True):
    """Leave the rollout loop and close."""

    reason: str


class ThreadPhase(msgspec.Struct, frozen=True):
    """What one thread of a rank does."""

    who: str
    phase: str
    seconds: float
    """Since it began (its own clock)."""
    limit: float | None = None
    """Seconds without progress after which somebody ends the run; None: nobody does."""
    on: tuple[int, ...] = ()
    """Ranks that it waits for."""
    quiet: float | None = None
    """Seconds without progress, where that is not `seconds`."""


class Heartbeat(Message, frozen=True):
    """Who is alive, and what it is doing since when (its own clock)."""

    rank: int
    role: str
    host: str
    pid: int
    counter: int
    phase: str
    phase_seconds: float
    version: int
    gauges: dict[str, float] = {}
    """Queue sizes, tokens/s, oldest running episode's age …"""
    threads: tuple[ThreadPhase, ...] = ()
    """`phase` and `phase_seconds` are of all of them together."""
    ends_at: float | None = None
    """When the job ends, seconds since 1970; None: not known."""


class HeardRank(msgspec.Struct, frozen=True, array_like=True):
    """A rank as the leader of its node heard it last."""

    heartbeat: Heartbeat
    """Without gauges and threads, its phase cut: the head wants to know who lives and does what."""
    seconds: float
    """Since it was heard (the leader's clock)."""


class NodeHeartbeats(Message, frozen=True):
    """One interval of a node: from its leader, or from its deputy while the leader is silent."""

    ranks: tuple[HeardRank, ...]


class ShowStacks(Message, frozen=True):
    """To a rank that is waited for: what are your threads doing? Answered by its main thread."""

    number: int
    of: int = -1
    """Another rank on the same host, whose main thread does not answer; -1: of yourself."""


class Stacks(Message, frozen=True):
    """The Python stacks of all threads of a rank, newest call last."""

    number: int
    text: str
    """At most STACKS_LIMIT characters."""
    of: int = -1
    """As in the question."""


class SignalReceived(Message, frozen=True):
    """This rank was told to stop (SIGTERM, SIGUSR2, SIGHUP)."""

    signal: int


class Leaving(Message, frozen=True):
    """This rank's work is over; it only carries its last messages until the Farewell."""


class Farewell(Message, frozen=True):
    """Every rank is leaving: finish MPI now, together."""


Inbox = queue.SimpleQueue[tuple[int, Message]]
"""(source rank, message), in the order of arrival; order is kept per source."""


class Post(Protocol):
    """The two verbs of the post office (`launch/postoffice.py`); both may be called from any thread."""

    rank: int
    size: int

    def send(self, to: int, message: Message) -> None:
        """Queues a message and returns at once; to == rank delivers locally. Raises when the outbox bound is hit."""
        ...

    def inbox(self, *kinds: type[Message]) -> Inbox:
        """A queue that gets every message of these kinds; each kind has exactly one inbox on a rank."""
        ...
