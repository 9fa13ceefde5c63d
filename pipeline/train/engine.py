"""The trainer-engine protocol, and the loss functions that engines call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pekoe.pipeline.messages import TensorSpec, WrittenFile
from pekoe.pipeline.records import PackedBatch

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]


class TokenLogprobs(Protocol):
    """Log-probs and entropies [M] of packed tokens: holds the one shift between positions and tokens.

    `logprobs_at(positions [K], targets [K])` gives log-probs and entropies [K] of these tokens by what the model says
    at these positions of the buffer. Both results are 0 where `loss_mask` is 0.
    """

    def __call__(
        self,
        logprobs_at: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        tokens: torch.Tensor,
        cu_seqlens: torch.Tensor,
        loss_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class TokenValues(Protocol):
    """(values [M], scores [S]) of packed tokens from a value head's outputs [M] at every position: holds the one shift
    between positions and tokens. The score of a sequence is the output at its last token."""

    def __call__(self, outputs: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


class LossFunction(Protocol):
    """A loss on packed, token-aligned tensors; knows no engine.

    `batch` holds the PackedBatch's arrays and `extra` as tensors on the engine's device. Returns the
    micro-batch's share of the global loss (already divided by the global denominator: shares simply add up) and
    sums of statistics (maxima where the name ends in `_max`), the same names for every micro-batch, an empty one
    included.
    """

    def __call__(
        self, logprobs: torch.Tensor, entropy: torch.Tensor | None, batch: Tensors
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...

    needs_entropy_gradient: bool


class ValueLossFunction(Protocol):
    """As `LossFunction`, on a value head's values [M] and scores [S]; both carry gradients."""

    def __call__(
        self, values: torch.Tensor, scores: torch.Tensor, batch: Tensors
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...


class StagedState(Protocol):
    """One save on one rank: a copy that training no longer changes."""

    def write(self, folder: Path) -> tuple[WrittenFile, ...]:
        """Collective over the trainer ranks, once, on any one thread, while the engine trains on: the durable files of
        this rank, named relative to `folder`, whose own entries the caller makes durable. OSError on all ranks when one
        cannot write, with its errno there."""
        ...

    def discard(self) -> None:
        """Gives the copy up, written or not: the engine may be staged again. Not collective."""
        ...


class TrainEngine(Protocol):
    """One model, sharded over the trainer ranks. Every method but the queries is collective over them.

    It ends in a language-model head (`forward`) or in a value head (`forward_values`). One that is not trainable is
    only asked: it has no optimiser and nothing to save.
    """

    data_parallel_rank: int
    data_parallel_size: int

    def forward(self, micro_batches: Sequence[PackedBatch], temperature: float) -> list[torch.Tensor]:
        """Token log-probs [M] (float32, 0 where loss_mask is 0) of each micro-batch at `temperature`, without gradient.
        All ranks pass the same number of micro-batches; empty ones take part in the collectives."""
        ...

    def forward_values(self, micro_batches: Sequence[PackedBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(values [M], scores [S]) of each micro-batch, without gradient; else as `forward`. Every token has a value,
        masked or not (0 on the first of a sequence, which nothing precedes)."""
        ...

    def train_batch(
        self,
        micro_batches: Sequence[PackedBatch],
        loss: LossFunction | ValueLossFunction,
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """One optimiser update. Returns sums reduced over data-parallel ranks, and `grad_norm`, `lr`,
        `update_skipped` (1 when the gradient was not finite or exactly 0: parameters and optimiser state are
        untouched)."""
        ...

    def set_progress(self, fraction_done: float) -> None:
        """Share of all steps done in [0, 1]: the schedule's clock."""
        ...

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """Names (Hugging Face, tied names once per name expected by `state_dict`), shapes, dtypes, in the order of
        `weights`."""
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors one by one, gathered on every rank; never two whole models in memory."""
        ...

    def stage(self) -> StagedState:
        """A copy in host memory of sharded model and optimiser state, as they are now: the only part of a save during
        which training stands still. The one before must have been written: its memory is used again."""
        ...

    def load(self, folder: Path) -> None:
        """What `StagedState.write` wrote, on any number of ranks; rates and decay stay those of the configuration."""
        ...

    def export_hf(self, folder: Path) -> None:
        """safetensors + config + tokenizer, loadable with `from_pretrained`."""
        ...

    def close(self) -> None: ...
