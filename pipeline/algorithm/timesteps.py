"""Timesteps of packed sequences: each active token, or each sampled turn.

Legend: M tokens laid end to end, K active ones, S sequences, N timesteps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pekoe.pipeline.algorithm.segments import segment_sum, sequence_index

UNITS = ("token", "turn")
"""Of `gae_unit`."""


@dataclass(frozen=True)
class Timesteps:
    """In the order of the tokens."""

    active: Tensor
    """[K] places of the active tokens."""
    step: Tensor
    """[K] the timestep of each active token."""
    first: Tensor
    """[N] place of the first active token of a timestep …"""
    last: Tensor
    """[N] … and of its last one."""
    sequence: Tensor
    """[N] the sequence of a timestep."""
    counts: Tensor
    """[S] timesteps of a sequence."""

    def sum(self, values: Tensor) -> Tensor:
        """[N] sums of `values` [M] over the active tokens of each timestep."""
        return segment_sum(values[self.active], self.step, len(self.first))

    def spread(self, values: Tensor, onto: Tensor) -> Tensor:
        """`onto` [M] with `values` [N] on all active tokens of each timestep."""
        return onto.index_copy(0, self.active, values[self.step])


def timesteps(mask: Tensor, turns: Tensor, cu_seqlens: Tensor, unit: str) -> Timesteps:
    """Timesteps of the active tokens (`mask` [M]) in `unit` token or turn; a turn is a run of active tokens with one
    number in `turns` [M], whatever lies between them."""
    if unit not in UNITS:
        raise ValueError(f"gae_unit: {unit!r} is not allowed; token or turn")
    active = torch.nonzero(mask).flatten()
    sequence = sequence_index(cu_seqlens)[active]
    begins = torch.ones(len(active), dtype=torch.bool, device=mask.device)
    if unit == "turn":
        turn = turns[active]
        begins[1:] = (sequence[1:] != sequence[:-1]) | (turn[1:] != turn[:-1])
    ends = torch.ones_like(begins)
    ends[:-1] = begins[1:]
    owner = sequence[begins]
    counts = segment_sum(torch.ones_like(owner), owner, len(cu_seqlens) - 1)
    return Timesteps(active, torch.cumsum(begins, 0) - 1, active[begins], active[ends], owner, counts)
