"""The collective transport: buckets broadcast from the head to all engines of an epoch.

    sender    begin ─► bucket 0 ─► bucket 1 ─► … ─► end (counts, bytes, checksums) ─► waits for every confirmation
    receiver  begin ─► bucket 0 ─► … : yields bucket k's tensors while bucket k+1 arrives ─► end ─► confirms

The sender gathers bucket k+1 while bucket k is under way: two buffers on each side, reused. A receiver that posted no
receive holds the sender back. Each wait has the bucket's limit and looks for failures that others reported.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

import torch

from pekoe.pipeline.messages import PrepareWeights, TensorSpec
from pekoe.pipeline.weights.buckets import Bucket, BucketPlan, checksum, fill, plan_buckets, views
from pekoe.pipeline.weights.meeting import Meeting
from pekoe.pipeline.weights.transfer_group import Transfer, TransferGroup, disagreement, member_settings
from pekoe.pipeline.weights.transport_setup import TransferError, TransportSetup, exhaust

logger = logging.getLogger(__name__)

BEGIN, END = 0x70656B6F, 0x65646E65
SILENT_SECONDS = 2.0
DECLINE_SECONDS = 5.0
"""For telling a sender that was not met yet that this member will not come."""


class CollectiveTransport:
    """Names the two ends for the registry."""

    @staticmethod
    def sender(setup: TransportSetup) -> CollectiveSender:
        return CollectiveSender(setup)

    @staticmethod
    def receiver(setup: TransportSetup) -> CollectiveReceiver:
        return CollectiveReceiver(setup)


class Buffers:
    """Two stretches of bytes that buckets take in turn; kept between versions, grown when a plan needs it."""

    def __init__(self, setup: TransportSetup) -> None:
        self.device = torch.device("cpu") if setup.backend == "gloo" else setup.device
        self._bytes = [torch.empty(0, dtype=torch.uint8, device=self.device)] * 2

    def take(self, index: int, bucket: Bucket) -> torch.Tensor:
        """Buffer of the bucket with this index; it belongs to bucket `index` until bucket `index + 2` takes it."""
        if self._bytes[index % 2].numel() < bucket.num_bytes:
            self._bytes[index % 2] = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self.device)
        return self._bytes[index % 2][: bucket.num_bytes]


def begin_record(version: int, plan: BucketPlan) -> list[int]:
    return [BEGIN, version, plan.num_tensors, len(plan.buckets), plan.total_bytes, plan.digest]


def end_record(version: int, plan: BucketPlan, sums: Sequence[int]) -> list[int]:
    return [END, version, len(plan.buckets), plan.total_bytes, *sums]


def label(version: int, index: int, plan: BucketPlan) -> str:
    bucket = plan.buckets[index]
    return (
        f"weights version {version}, bucket {index + 1}/{len(plan.buckets)} ({bucket.names}, {bucket.num_bytes} bytes)"
    )


class SenderEpoch:
    """What the sender holds of one epoch."""

    def __init__(self, meeting: Meeting, members: tuple[int, ...]) -> None:
        self.meeting = meeting
        self.members = members
        self.group: TransferGroup | None = None
        self.is_broken = False

    def form(self, setup: TransportSetup) -> TransferGroup:
        """The group, formed at the first use after all members have shown fitting settings."""
        if self.is_broken:
            raise TransferError("weights: this epoch's group is broken; open a new epoch")
        if self.group is None:
            receivers = self.members[1:]
            settings = {setup.rank: member_settings(setup), **self.meeting.gather(receivers)}
            problem = disagreement(settings)
            self.meeting.give_verdict(problem)
            if problem:
                raise TransferError(problem)
            self.group = TransferGroup(setup, self.meeting, self.members)
        return self.group

    def fail(self, text: str, rank: int) -> None:
        """Tells the members, and gives the group up. The store stays, so that members can still read why."""
        self.is_broken = True
        self.meeting.report(text, rank)
        if self.group is not None:
            self.group.retire()
            self.group = None


class CollectiveSender:
    """On every trainer rank; the first of `members` streams, the others only take part in the gathers."""

    def __init__(self, setup: TransportSetup) -> None:
        self._setup = setup
        self._buffers = Buffers(setup)
        self._epochs: dict[int, SenderEpoch] = {}
        self._lock = threading.Lock()

    def open_epoch(self, epoch: int, members: tuple[int, ...]) -> str:
        """Binds the meeting point and returns `host:port#token`. Does not block; the group is formed by the first
        `send`."""
        if members[0] != self._setup.rank:
            raise ValueError(f"members {members}: the sender, rank {self._setup.rank}, must come first")
        meeting = Meeting.open(self._setup.host, self._setup.bucket_seconds)
        with self._lock:
            if epoch in self._epochs:
                raise ValueError(f"epoch {epoch} is open already; give a new group a new number")
            self._epochs[epoch] = SenderEpoch(meeting, members)
        return meeting.endpoint

    def send(
        self, version: int, epoch: int, members: tuple[int, ...], specs: Sequence[TensorSpec],
        weights: Iterator[tuple[str, torch.Tensor]],
    ) -> None:  # fmt: skip
        """Streams all tensors and returns when every member has them. On failure the iterator is exhausted, the epoch
        is broken, and TransferError (or the iterator's own error) is raised."""
        pending = iter(weights)
        if not members or members[0] != self._setup.rank or len(members) == 1:
            exhaust(pending)
            return
        held = self._take_epoch(epoch, members)
        try:
            group = held.form(self._setup)
            plan = plan_buckets(specs, self._setup.bucket_bytes)
            self._stream(group, version, plan, pending)
            held.meeting.await_confirmations(version, members[1:])
        except Exception as error:
            held.fail(f"rank {self._setup.rank} (sender): {error}", self._setup.rank)
            exhaust(pending)
            if isinstance(error, TransferError):
                seconds = min(SILENT_SECONDS, self._setup.bucket_seconds)
                if silent := held.meeting.silent(version, members[1:], seconds):
                    raise TransferError(f"{error}; no sign of life from ranks {silent}") from error
            raise

    def close(self) -> None:
        with self._lock:
            epochs, self._epochs = self._epochs, {}
        for held in epochs.values():
            held.fail(f"rank {self._setup.rank} (sender) has closed", self._setup.rank)

    def _take_epoch(self, epoch: int, members: tuple[int, ...]) -> SenderEpoch:
        """The epoch; older ones are let go, since a group is only replaced when it is done."""
        with self._lock:
            held = self._epochs.get(epoch)
            older = [self._epochs.pop(number) for number in sorted(self._epochs) if number < epoch]
        for past in older:
            past.fail("a new epoch has begun", self._setup.rank)
        if held is None:
            raise ValueError(f"epoch {epoch} was not opened on rank {self._setup.rank}")
        if held.members != members:
            raise ValueError(f"epoch {epoch} was opened for members {held.members}, not {members}")
        return held

    def _stream(
        self, group: TransferGroup, version: int, plan: BucketPlan, weights: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        self._tell(group, begin_record(version, plan), f"weights version {version}, begin")
        under_way = None
        sums: list[int] = []
        for index, bucket in enumerate(plan.buckets):
            buffer = self._buffers.take(index, bucket)
            fill(bucket, buffer, weights)
            if self._setup.verify:
                sums.append(checksum(bucket, buffer))
            if under_way is not None:
                under_way.wait()
            under_way = group.broadcast(buffer, label(version, index, plan)) if bucket.num_bytes else None
        if under_way is not None:
            under_way.wait()
        if (surplus := next(weights, None)) is not None:
            raise ValueError(f"tensor {surplus[0]!r} came after all announced ones")
        self._tell(group, end_record(version, plan, sums), f"weights version {version}, end")

    def _tell(self, group: TransferGroup, record: list[int], what: str) -> None:
        group.broadcast(torch.tensor(record, dtype=torch.int64, device=self._buffers.device), what).wait()


class CollectiveReceiver:
    """On every rollout rank."""

    def __init__(self, setup: TransportSetup) -> None:
        self._setup = setup
        self._buffers = Buffers(setup)
        self._message: PrepareWeights | None = None
        self._plan = plan_buckets((), setup.bucket_bytes)
        self._meeting: Meeting | None = None
        self._group: TransferGroup | None = None
        self._epoch = -1
        self._position = ""

    def prepare(self, message: PrepareWeights) -> None:
        """Remembers the epoch's meeting point and its tensors; connects at the next `receive`."""
        if self._setup.rank not in message.members[1:]:
            raise ValueError(f"rank {self._setup.rank} is not a receiver of epoch {message.epoch}: {message.members}")
        if message.epoch != self._epoch:
            self._leave("left for a new epoch")
            self._epoch = message.epoch
            self._message = message
            self._plan = plan_buckets(message.tensors, self._setup.bucket_bytes)
        elif message.tensors:
            self._plan = plan_buckets(message.tensors, self._setup.bucket_bytes)

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every tensor; it is a view that the next one may overwrite. Not taking all of them breaks the
        epoch."""
        message = self._message
        if message is None:
            raise TransferError(f"weights version {version}: rank {self._setup.rank} is in no working epoch")
        self._position = "the first tensor"
        try:
            meeting, group = self._join(message)
            yield from self._stream(group, version)
            meeting.confirm(version, self._setup.rank)
        except GeneratorExit:
            if message is self._message:
                self._give_up(f"the engine stopped reading weights version {version} at {self._position}")
            raise
        except Exception as error:
            if message is self._message:
                self._give_up(str(error))
            raise

    def abandon(self, reason: str) -> None:
        """Tells the sender that this engine failed, and leaves the epoch; harmless when there is none. A sender that
        was not met yet is told, too: it and the members need not wait for this one."""
        if self._message is not None and self._meeting is None:
            try:
                self._meeting = Meeting.join(self._message.endpoint, min(DECLINE_SECONDS, self._setup.bucket_seconds))
            except TransferError as error:
                logger.info("epoch %d is over already: %s", self._epoch, error)
        self._give_up(reason)

    def close(self) -> None:
        self._give_up("the engine has closed")

    def _give_up(self, reason: str) -> None:
        self._leave(f"rank {self._setup.rank}: {reason}")
        self._message = None

    def _join(self, message: PrepareWeights) -> tuple[Meeting, TransferGroup]:
        if self._meeting is None or self._group is None:
            self._meeting = Meeting.join(message.endpoint, self._setup.bucket_seconds)
            self._meeting.present(self._setup.rank, member_settings(self._setup))
            self._group = TransferGroup(self._setup, self._meeting, message.members)
        return self._meeting, self._group

    def _leave(self, text: str) -> None:
        if self._meeting is not None:
            self._meeting.report(text, self._setup.rank)
        if self._group is not None:
            self._group.retire()
        self._group = self._meeting = None

    def _stream(self, group: TransferGroup, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        plan, buckets = self._plan, self._plan.buckets
        self._expect(group, begin_record(version, plan), f"weights version {version}, begin")
        sums: list[int] = []
        buffer, under_way = self._start(group, version, 0) if buckets else (None, None)
        for index, bucket in enumerate(buckets):
            if under_way is not None:
                under_way.wait()
            here = buffer
            assert here is not None
            if index + 1 < len(buckets):
                buffer, under_way = self._start(group, version, index + 1)
            if self._setup.verify:
                sums.append(checksum(bucket, here))
            for name, tensor in views(bucket, here):
                self._position = f"tensor {name!r} (bucket {index + 1}/{len(buckets)})"
                yield name, tensor
        self._position = "the end"
        self._expect(group, end_record(version, plan, sums), f"weights version {version}, end")

    def _start(self, group: TransferGroup, version: int, index: int) -> tuple[torch.Tensor, Transfer | None]:
        bucket = self._plan.buckets[index]
        buffer = self._buffers.take(index, bucket)
        return buffer, group.broadcast(buffer, label(version, index, self._plan)) if bucket.num_bytes else None

    def _expect(self, group: TransferGroup, record: list[int], what: str) -> None:
        """Takes a record from the sender; raises TransferError unless it says what this side has."""
        told = torch.empty(len(record), dtype=torch.int64, device=self._buffers.device)
        group.broadcast(told, what).wait()
        found = told.tolist()
        if found == record:
            return
        sums = [index for index, (a, b) in enumerate(zip(found[4:], record[4:], strict=True)) if a != b]
        if record[0] == END and found[:4] == record[:4]:
            raise TransferError(
                f"{what}: checksum differs in {', '.join(label(record[1], i, self._plan) for i in sums)}"
            )
        names = (
            "kind, version, tensors, buckets, bytes, digest" if record[0] == BEGIN else "kind, version, buckets, bytes"
        )
        raise TransferError(
            f"{what}: the sender announces ({names}) {found}, here it is {record}: tensor names, shapes, dtypes or the "
            "bucket size differ"
        )
