"""Normalisation, advantages, KL terms and the value loss against verl's, on random batches in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from random_batches import RandomBatch

from pekoe.pipeline.algorithm.estimator_terms import EstimatorTerms
from pekoe.pipeline.algorithm.gae import gae
from pekoe.pipeline.algorithm.kl import kl_estimate
from pekoe.pipeline.algorithm.normalise import RewardRows, normalise_rewards, normalise_tokens
from pekoe.pipeline.algorithm.reduction import OneRank
from pekoe.pipeline.algorithm.value_loss import ValueObjective
from pekoe.pipeline.config.actor import ActorConfig, NormConfig
from pekoe.pipeline.config.companions import CriticConfig

pytestmark = pytest.mark.slow

SEEDS = [1, 2, 3]
EPS = 1e-6


def rows_of(batch):
    return RewardRows(batch.rewards.numpy(), batch.groups, batch.samples, np.ones(batch.num_rows, dtype=bool))


def spread(batch, outcomes):
    """[B, L]: a sequence's advantage on each of its sampled tokens."""
    return torch.as_tensor(outcomes)[:, None] * batch.mask


def without_singletons(batch, padded):
    """Rows of groups with one member, for which the conventions differ, left out."""
    sizes = torch.tensor([size for size in batch.group_sizes for _ in range(size)])
    return padded[sizes > 1]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("with_std", [True, False], ids=["grpo", "drgrpo"])
def test_group_mean_and_std(algos, seed, with_std):
    batch = RandomBatch(seed)
    theirs, _ = algos.compute_grpo_outcome_advantage(
        batch.outcome_rewards(), batch.mask, batch.groups, EPS, norm_adv_by_std_in_grpo=with_std
    )
    config = NormConfig(std_level="group" if with_std else None, eps=EPS)
    ours = spread(batch, normalise_rewards(rows_of(batch), config))
    torch.testing.assert_close(without_singletons(batch, ours), without_singletons(batch, theirs))
    assert (ours[-1] == 0).all(), "one sample tells nothing about itself; verl leaves its raw reward there"


@pytest.mark.parametrize("seed", SEEDS)
def test_leave_one_out(algos, seed):
    batch = RandomBatch(seed)
    theirs, _ = algos.compute_rloo_outcome_advantage(batch.outcome_rewards(), batch.mask, batch.groups)
    config = NormConfig(std_level=None, mean_leave1out=True)
    ours = spread(batch, normalise_rewards(rows_of(batch), config))
    torch.testing.assert_close(without_singletons(batch, ours), without_singletons(batch, theirs))


def by_gae(batch, rewards, values, config, bootstrap=None):
    terms = EstimatorTerms(
        rewards=batch.pack(rewards), mask=batch.packed_mask(), turns=torch.where(batch.packed_mask(), 0, -1),
        cu_seqlens=batch.cu_seqlens, values=None if values is None else batch.pack(values, before=77.0),
        bootstrap=bootstrap, groups=torch.zeros(batch.num_rows, dtype=torch.int64), num_groups=1,
        samples=torch.from_numpy(batch.samples), config=config, over=OneRank(),
    )  # fmt: skip
    return gae(terms)


def whiten(batch, flat):
    """What verl always does to advantages: `rsqrt(variance + 1e-8)`, so eps inside of the root."""
    groups = torch.zeros(batch.num_rows, dtype=torch.int64)
    config = NormConfig(mean_level="batch", std_level="batch", eps=1e-12)
    return normalise_tokens(flat, batch.packed_mask(), batch.cu_seqlens, groups, config)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (0.97, 0.9)])
def test_gae_over_tokens_of_tools(algos, seed, discount, gae_lambda):
    batch = RandomBatch(seed)
    rewards, values = batch.normal(*batch.mask.shape) * batch.mask, batch.normal(*batch.mask.shape)
    whitened, returns = algos.compute_gae_advantage_return(rewards, values, batch.mask, discount, gae_lambda)
    advantages, ours = by_gae(batch, rewards, values, ActorConfig(discount=discount, gae_lambda=gae_lambda))
    active = batch.mask.bool()
    torch.testing.assert_close(batch.unpack(ours)[active], returns[active])
    mine = batch.unpack(whiten(batch, advantages))
    torch.testing.assert_close(mine[active], whitened[active], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_plus_plus(algos, seed):
    from verl.trainer.config import AlgoConfig

    batch = RandomBatch(seed)
    rewards = batch.normal(*batch.mask.shape) * batch.mask
    theirs, _ = algos.compute_reinforce_plus_plus_outcome_advantage(rewards, batch.mask, config=AlgoConfig(gamma=0.9))
    advantages, _ = by_gae(batch, rewards, None, ActorConfig(discount=0.9))
    mine = batch.unpack(whiten(batch, advantages))
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_baseline(algos, seed):
    batch = RandomBatch(seed, group_sizes=(3, 2, 4))
    theirs, _ = algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        batch.outcome_rewards(), batch.mask, batch.groups
    )
    config = NormConfig(std_level=None)
    outcomes = normalise_rewards(rows_of(batch), config)
    mine = batch.unpack(whiten(batch, batch.pack(spread(batch, outcomes))))
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimators(algos, kind):
    batch = RandomBatch(1)
    logprobs = batch.logprobs()
    base = batch.near(logprobs)
    theirs = algos.kl_penalty(logprobs, base, kind) * batch.mask
    ours = kl_estimate(kind, batch.pack(logprobs), batch.pack(base), batch.packed_mask())
    torch.testing.assert_close(batch.unpack(ours), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_clipped_value_loss(algos, seed):
    batch = RandomBatch(seed)
    shape = batch.mask.shape
    old, returns = batch.normal(*shape), batch.normal(*shape)
    values = batch.near(old, 0.6).requires_grad_()
    theirs, share = algos.compute_value_loss(values, returns, old, batch.mask, cliprange_value=0.3)
    packed = {
        "cu_seqlens": batch.cu_seqlens, "loss_mask": batch.packed_mask(), "values": batch.pack(old, before=55.0),
        "returns": batch.pack(returns, before=-55.0), "truncated": torch.zeros(batch.num_rows, dtype=torch.uint8),
    }  # fmt: skip
    objective = ValueObjective(CriticConfig(eps_clip=0.3), batch.num_active)
    ours, stats = objective(batch.pack(values), None, packed)
    torch.testing.assert_close(ours, theirs)
    assert float(stats["clipped"]) / batch.num_active == pytest.approx(float(share)) != 0
    (mine,), (other,) = torch.autograd.grad(ours, values), torch.autograd.grad(theirs, values)
    torch.testing.assert_close(mine, other)
