"""One random batch in two layouts: padded rows of completions, as in TRL and verl, and Pekoe's packed sequences.

Legend: B rows, L columns of a padded completion, M tokens laid end to end (prompts included).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

PROMPT_LENGTHS = (1, 2, 3)


@dataclass
class RandomBatch:
    """Completions of several prompts: groups of uneven sizes, uneven lengths, tokens of tools between turns."""

    seed: int
    group_sizes: tuple[int, ...] = (4, 2, 3, 1)
    columns: int = 9
    with_tools: bool = True
    mask: Tensor = field(init=False)
    """[B, L] float64: 1 = sampled by the policy."""
    lengths: Tensor = field(init=False)
    """[B] tokens of each completion, the ones of tools included."""
    groups: np.ndarray = field(init=False)
    """[B]"""
    rewards: Tensor = field(init=False)
    """[B] float64"""

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.groups = np.repeat(np.arange(len(self.group_sizes)) * 7 + 3, self.group_sizes)
        rows = len(self.groups)
        self.lengths = torch.randint(1, self.columns + 1, (rows,), generator=self.random)
        self.lengths[0] = self.columns
        self.mask = (torch.arange(self.columns)[None] < self.lengths[:, None]).double()
        if self.with_tools:
            tools = torch.rand(self.mask.shape, generator=self.random, dtype=torch.float64) < 0.3
            tools[torch.arange(rows), self.lengths - 1] = False
            self.mask[tools] = 0
        self.rewards = self.normal(rows)
        self.prompts = [PROMPT_LENGTHS[row % len(PROMPT_LENGTHS)] for row in range(rows)]

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=self.random, dtype=torch.float64)

    def logprobs(self) -> Tensor:
        """[B, L] of some policy."""
        return -self.normal(*self.mask.shape).abs() - 0.1

    def near(self, logprobs: Tensor, scale: float = 0.4) -> Tensor:
        """[B, L] of a policy near by."""
        return logprobs + self.normal(*logprobs.shape, scale=scale)

    @property
    def num_rows(self) -> int:
        return len(self.groups)

    @property
    def samples(self) -> np.ndarray:
        """[B] number of a row in its group."""
        return np.concatenate([np.arange(size) for size in self.group_sizes])

    @property
    def num_active(self) -> int:
        return int(self.mask.sum())

    @property
    def cu_seqlens(self) -> Tensor:
        lengths = torch.tensor(self.prompts) + self.lengths
        return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

    def pack(self, padded: Tensor, before: float = 0.0) -> Tensor:
        """[M] of [B, L]: prompts in front (filled with `before`), padding left out; differentiable."""
        parts = []
        for row, prompt in enumerate(self.prompts):
            parts += [torch.full((prompt,), before, dtype=padded.dtype), padded[row, : self.lengths[row]]]
        return torch.cat(parts)

    def unpack(self, flat: Tensor) -> Tensor:
        """[B, L] of [M], 0 on padding."""
        out = torch.zeros(self.num_rows, self.columns, dtype=flat.dtype)
        starts = self.cu_seqlens[:-1]
        for row, prompt in enumerate(self.prompts):
            start = int(starts[row]) + prompt
            out[row, : self.lengths[row]] = flat[start : start + int(self.lengths[row])]
        return out

    def packed_mask(self) -> Tensor:
        """[M] bool"""
        return self.pack(self.mask).bool()

    def outcome_rewards(self) -> Tensor:
        """[B, L] with each row's reward on its last active token."""
        out = torch.zeros_like(self.mask)
        for row in range(self.num_rows):
            active = torch.nonzero(self.mask[row]).flatten()
            out[row, active[-1]] = self.rewards[row]
        return out
