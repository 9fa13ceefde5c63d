"""The local transport: trainer and engine of one process (colocated roles) hand tensors over without a copy.

    learner's thread: send ──one tensor──► engine's thread: receive ──taken──► send goes on to the next gather

Each colocated rank hands over to itself; a trainer rank without an engine only takes part in the gathers.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch

from pekoe.pipeline.messages import PrepareWeights, TensorSpec
from pekoe.pipeline.weights.buckets import check_tensor
from pekoe.pipeline.weights.transport_setup import TransferError, TransportSetup, exhaust

Weights = Iterable[tuple[str, torch.Tensor]]


class LocalTransport:
    """Names the two ends for the registry; ends of one run and rank meet in this process."""

    @staticmethod
    def sender(setup: TransportSetup) -> LocalSender:
        return LocalSender(setup)

    @staticmethod
    def receiver(setup: TransportSetup) -> LocalReceiver:
        return LocalReceiver(setup)


class Delivery:
    """One version on its way between two threads; a tensor is offered only after the one before was taken."""

    def __init__(self) -> None:
        self.offers: queue.SimpleQueue[tuple[str, torch.Tensor] | str | None] = queue.SimpleQueue()
        """A tensor, None at the end, or the sender's error."""
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Empty when the tensor was taken, or the receiver's error."""


class Counter:
    """Where the two ends find each other's delivery, by (run, rank, version, epoch)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deliveries: dict[tuple[str, int, int, int], Delivery] = {}

    def meet(self, setup: TransportSetup, version: int, epoch: int) -> Delivery:
        """The delivery, made by whoever comes first."""
        with self._lock:
            return self._deliveries.setdefault((str(setup.run.path), setup.rank, version, epoch), Delivery())

    def clear(self, setup: TransportSetup, version: int, epoch: int) -> None:
        with self._lock:
            self._deliveries.pop((str(setup.run.path), setup.rank, version, epoch), None)


COUNTER = Counter()


class LocalSender:
    """On every colocated rank."""

    def __init__(self, setup: TransportSetup) -> None:
        self._setup = setup

    def open_epoch(self, epoch: int, members: tuple[int, ...]) -> str:
        return ""

    def send(
        self, version: int, epoch: int, members: tuple[int, ...], specs: Sequence[TensorSpec],
        weights: Iterator[tuple[str, torch.Tensor]],
    ) -> None:  # fmt: skip
        """Returns when this rank's engine has taken every tensor and its load has ended well."""
        pending = iter(weights)
        if self._setup.rank not in members[1:]:
            exhaust(pending)
            return
        delivery = COUNTER.meet(self._setup, version, epoch)
        try:
            for name, tensor in checked(specs, pending):
                delivery.offers.put((name, tensor))
                self._await_taken(delivery, version, name)
            delivery.offers.put(None)
            self._await_taken(delivery, version, "the end")
        except Exception as error:
            delivery.offers.put(str(error))
            exhaust(pending)
            raise
        finally:
            COUNTER.clear(self._setup, version, epoch)

    def close(self) -> None:
        """Holds nothing."""

    def _await_taken(self, delivery: Delivery, version: int, name: str) -> None:
        limit = self._setup.bucket_seconds
        try:
            problem = delivery.answers.get(timeout=limit)
        except queue.Empty:
            raise TransferError(
                f"weights version {version}: rank {self._setup.rank}'s engine did not take {name!r} within {limit:g} s"
            ) from None
        if problem:
            raise TransferError(problem)


class LocalReceiver:
    """On every colocated rank."""

    def __init__(self, setup: TransportSetup) -> None:
        self._setup = setup
        self._specs: tuple[TensorSpec, ...] = ()
        self._epoch = -1
        self._expected = -1
        """Version that was announced and has not come yet."""

    def prepare(self, message: PrepareWeights) -> None:
        self._expected = message.version
        if message.tensors or message.epoch != self._epoch:
            self._specs, self._epoch = message.tensors, message.epoch

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the trainer's own tensors: only valid until the next one is asked for."""
        delivery = COUNTER.meet(self._setup, version, self._epoch)
        position = "the first tensor"
        try:
            for spec in self._specs:
                position = spec.name
                found = self._take(delivery, version, spec.name)
                if found is None:
                    raise TransferError(f"weights version {version} ended before {spec.name!r}")
                check_tensor(spec, *found)
                yield found
                delivery.answers.put("")
            position = "the end"
            if self._take(delivery, version, "the end") is not None:
                raise TransferError(f"weights version {version}: more tensors than the {len(self._specs)} announced")
            self._expected = -1
            delivery.answers.put("")
        except GeneratorExit:
            delivery.answers.put(f"the engine stopped reading weights version {version} at {position!r}")
            raise
        except Exception as error:
            self._expected = -1
            delivery.answers.put(str(error))
            raise

    def abandon(self, reason: str) -> None:
        """The sender hears at once, also before it has begun."""
        if self._expected >= 0:
            COUNTER.meet(self._setup, self._expected, self._epoch).answers.put(
                f"weights version {self._expected}: rank {self._setup.rank}'s engine does not take them: {reason}"
            )
            self._expected = -1

    def close(self) -> None:
        """Holds nothing."""

    def _take(self, delivery: Delivery, version: int, name: str) -> tuple[str, torch.Tensor] | None:
        limit = self._setup.bucket_seconds
        try:
            found = delivery.offers.get(timeout=limit)
        except queue.Empty:
            COUNTER.clear(self._setup, version, self._epoch)
            raise TransferError(f"weights version {version}: the trainer gave no {name!r} within {limit:g} s") from None
        if isinstance(found, str):
            raise TransferError(found)
        return found


def checked(
    specs: Sequence[TensorSpec], weights: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Passes tensors on when they are exactly the announced ones; raises ValueError naming the first that is not."""
    for spec in specs:
        found = next(weights, None)
        if found is None:
            raise ValueError(f"weights ended before tensor {spec.name!r}")
        check_tensor(spec, *found)
        yield found[0], found[1].detach()
    if (surplus := next(weights, None)) is not None:
        raise ValueError(f"tensor {surplus[0]!r} came after all announced ones")
