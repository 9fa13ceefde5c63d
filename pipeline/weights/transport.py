"""How weights travel from trainer ranks to engines: the two ends of a transport.

The head opens an epoch (a transfer group), tells the engines by PrepareWeights, and lets every trainer rank call
`send`. An engine stops at a token, answers WeightsReady, and feeds `receive` into `InferenceEngine.load_weights`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from pekoe.pipeline.messages import PrepareWeights, TensorSpec

if TYPE_CHECKING:
    import torch


class WeightSender(Protocol):
    """On every trainer rank; the head is the one that sends."""

    def open_epoch(self, epoch: int, members: tuple[int, ...]) -> str:
        """Head only, does not block: binds what the members will connect to and returns it (opaque to others:
        `host:port#token`, or "" where none is needed). A broken epoch is replaced by one with a higher number."""
        ...

    def send(
        self, version: int, epoch: int, members: tuple[int, ...], specs: Sequence[TensorSpec],
        weights: Iterator[tuple[str, torch.Tensor]],
    ) -> None:  # fmt: skip
        """Streams all tensors. Whatever fails in sending, the iterator is exhausted (its gathers are collective over
        trainer ranks), then the error is raised. Ranks that are not the sender only exhaust it."""
        ...

    def close(self) -> None: ...


class WeightReceiver(Protocol):
    """On every rollout rank."""

    def prepare(self, message: PrepareWeights) -> None:
        """Remembers tensor specs of a new epoch; connects lazily."""
        ...

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every tensor of the version, in order; a yielded tensor is only valid until the next one is asked
        for. Raises within the bucket's time limit when the sender is gone, naming the tensor. Closing it early breaks
        the epoch."""
        ...

    def abandon(self, reason: str) -> None:
        """The engine failed while loading: tells the sender at once, which raises; this receiver needs a new epoch.
        Harmless when nothing is under way."""
        ...

    def close(self) -> None: ...
