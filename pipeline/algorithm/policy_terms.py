"""What a policy objective reads and gives. An objective is one function, named in the registry or as `module:function`.

    def objective(terms: PolicyTerms) -> TokenLoss

It gives a loss for each token; what is common to all objectives stays outside of it: the proximal policy, behaviour
weight and rejection, aggregation and its global denominators, entropy, KL in the loss, distillation.

Legend: M tokens of a micro-batch laid end to end, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from pekoe.pipeline.config.actor import ActorConfig

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class PolicyTerms:
    """A micro-batch."""

    logprobs: Tensor
    """[M] of the policy being optimised, the only one with a gradient."""
    prox: Tensor
    """[M] of the policy that ratios are taken against: the proximal one, or the behaviour policy (not decoupled)."""
    behaviour: Tensor
    """[M] of the policy that sampled."""
    advantages: Tensor
    """[M]"""
    mask: Tensor
    """[M] bool: tokens that train, before any rejection; the log-probs and advantages of all others are 0."""
    index: Tensor
    """[M] int64: the sequence that a token belongs to."""
    num_sequences: int
    config: ActorConfig
    batch: Batch
    """All arrays of the packed batch, extras included, by name."""


@dataclass(frozen=True)
class TokenLoss:
    """What an objective gives."""

    values: Tensor
    """[M] losses, differentiable; read where the mask is true."""
    stats: dict[str, Tensor] = field(default_factory=dict)
    """[M] bool each: tokens to count, e.g. `clipped`; the same names for every micro-batch."""


Objective = Callable[[PolicyTerms], TokenLoss]
