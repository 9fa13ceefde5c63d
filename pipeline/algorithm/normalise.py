"""Normalisation of sequence rewards and of token advantages: `(x - mean) / (std + eps)` over the batch or over groups.

Groups are told by id, never by stride; uneven sizes are normal. All statistics are float64 and in two passes (mean,
then squared deviations from the mean that is subtracted, the leave-one-out one included). A std that is only
rounding (`STD_FLOOR`) counts as zero variance and gives 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pekoe.pipeline.algorithm.segments import segment_sum, sequence_index
from pekoe.pipeline.config.actor import NormConfig
from pekoe.pipeline.records import Float64

STD_FLOOR = 1e-6
"""Relative to the largest |x|: rewards that differ by less differ by float32 rounding only."""

Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RewardRows:
    """One reward a sequence, with whom it belongs to."""

    rewards: Float64
    """[S]"""
    groups: npt.NDArray[np.integer]
    """[S] ids; group numbers or anything else that tells groups apart."""
    samples: npt.NDArray[np.integer]
    """[S] the episode of the group that made the sequence."""
    keep: npt.NDArray[np.bool_]
    """[S] sequences that train."""


def normalise_rewards(rows: RewardRows, config: NormConfig | None, voters: RewardRows | None = None) -> Float64:
    """Normalised rewards [S] of `rows`; mean and std are taken over `voters` (all ranks' rows; absent = `rows`).

    The sequences of one episode (same group and sample) count as one member, with the mean of their rewards.
    Sequences that do not train do not vote and get 0; with none that trains, and with no `config`, the input is
    returned. The result does not depend on the order of the voters, to the bit.
    """
    x = np.asarray(rows.rewards, dtype=np.float64)
    voters = rows if voters is None else voters
    if config is None or not voters.keep.any():
        return x.copy()
    order = np.lexsort((voters.rewards, voters.samples, voters.groups))
    order = order[voters.keep[order]]
    keys = np.stack([voters.groups[order], voters.samples[order]], axis=1).astype(np.int64)
    members, member = np.unique(keys, axis=0, return_inverse=True)
    values = np.bincount(member.reshape(-1), weights=voters.rewards[order]) / np.bincount(member.reshape(-1))
    _, group_of_member = np.unique(members[:, 0], return_inverse=True)
    mean, std = _mean_and_std(torch.from_numpy(values), torch.from_numpy(group_of_member.reshape(-1)), config)
    own = np.stack([rows.groups[rows.keep], rows.samples[rows.keep]], axis=1).astype(np.int64)
    place = {key: number for number, key in enumerate(map(tuple, members.tolist()))}
    of_row = torch.tensor([place[key] for key in map(tuple, own.tolist())], dtype=torch.int64)
    out = np.zeros_like(x)
    out[rows.keep] = _scale(torch.from_numpy(x[rows.keep]) - mean[of_row], std[of_row], config).numpy()
    return out


def normalise_tokens(
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    groups: Tensor,
    config: NormConfig | None,
    reduce_sum: Reduce | None = None,
    reduce_max: Reduce | None = None,
    num_groups: int | None = None,
) -> Tensor:
    """Normalised token values [M] over the active tokens (`mask` 1), in the dtype of `values`; masked ones get 0.

    Group level pools the active tokens of a group. `groups` [S] are group numbers 0..num_groups-1 that all
    data-parallel ranks agree on; `reduce_sum` and `reduce_max` reduce a tensor over these ranks (identity when
    absent). All masked: input returned.
    """
    active = mask.to(torch.bool)
    x = values[active].to(torch.float64)
    group_of_token = groups.to(torch.int64)[sequence_index(cu_seqlens)][active]
    total = torch.tensor([float(len(x))], dtype=torch.float64, device=x.device)
    if config is None or not float(reduce_sum(total) if reduce_sum else total):
        return values.clone()
    mean, std = _mean_and_std(x, group_of_token, config, reduce_sum, reduce_max, num_groups)
    out = torch.zeros_like(values)
    out[active] = _scale(x - mean, std, config).to(values.dtype)
    return out


def _mean_and_std(
    x: Tensor,
    group: Tensor,
    config: NormConfig,
    reduce_sum: Reduce | None = None,
    reduce_max: Reduce | None = None,
    num_groups: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean [n] to subtract and std [n] to divide by (0 = zero variance) for each of `x` [n] float64."""
    add = reduce_sum or (lambda tensor: tensor)
    largest = reduce_max or (lambda tensor: tensor)
    size = num_groups if num_groups is not None else (int(group.max()) + 1 if len(group) else 0)

    def pool(level: str) -> tuple[Tensor, int]:
        return (group, size) if level == "group" else (torch.zeros_like(group), 1)

    mean = torch.zeros_like(x)
    if config.mean_level is not None:
        index, num_pools = pool(config.mean_level)
        sums = add(torch.stack([segment_sum(torch.ones_like(x), index, num_pools), segment_sum(x, index, num_pools)]))
        count, total = sums[0][index], sums[1][index]
        mean = total / count
        if config.mean_leave1out:
            alone = x if config.mean_level == "group" else torch.zeros_like(x)
            mean = torch.where(count > 1, (total - x) / (count - 1).clamp(min=1), alone)
    if config.std_level is None:
        return mean, torch.ones_like(x)
    index, num_pools = pool(config.std_level)
    squares = segment_sum((x - mean).square(), index, num_pools)
    sums = add(torch.stack([segment_sum(torch.ones_like(x), index, num_pools), squares]))
    start = torch.zeros(num_pools, dtype=x.dtype, device=x.device)
    magnitude = largest(start.scatter_reduce(0, index, x.abs(), reduce="amax"))[index]
    count, squares = sums[0][index], sums[1][index]
    if config.std_unbiased:
        std = torch.where(count > 1, (squares / (count - 1).clamp(min=1)).sqrt(), torch.ones_like(x))
    else:
        std = (squares / count).sqrt()
    return mean, torch.where(std > STD_FLOOR * magnitude, std, torch.zeros_like(std))


def _scale(deviation: Tensor, std: Tensor, config: NormConfig) -> Tensor:
    """`deviation / (std + eps)`; exactly `deviation` with no std, exactly 0 where the std is 0."""
    if config.std_level is None:
        return deviation
    return torch.where(std > 0, deviation / (std + config.eps), torch.zeros_like(deviation))
