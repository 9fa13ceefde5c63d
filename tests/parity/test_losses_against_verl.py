"""Pekoe's policy objective against verl's losses: value and gradient on random batches, in float64."""

from __future__ import annotations

import warnings

import pytest
import torch
from random_batches import RandomBatch

from pekoe.pipeline.algorithm.objective import PolicyObjective
from pekoe.pipeline.config.actor import ActorConfig, RejectionConfig

pytestmark = pytest.mark.slow

SEEDS = [1, 2, 3]
MAX_NEW_TOKENS = 32
AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}


def verl_config(**settings):
    from verl.workers.config import FSDPActorConfig

    fixed = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    return FSDPActorConfig(**fixed, **settings)


def pekoe_loss(config, batch, logprobs, prox, behaviour, advantages):
    """Loss by the packed layout of a padded batch; `logprobs` is the leaf of the gradient."""
    mask = batch.packed_mask()
    packed = {
        "cu_seqlens": batch.cu_seqlens,
        "loss_mask": mask.to(torch.uint8),
        "logprobs": batch.pack(behaviour),
        "prox_logprobs": batch.pack(prox),
        "advantages": batch.pack(advantages),
        "versions": torch.where(mask, 2, -1),
        "truncated": torch.zeros(batch.num_rows, dtype=torch.uint8),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        objective = PolicyObjective(
            config, num_active=batch.num_active, num_sequences=batch.num_rows, max_new_tokens=MAX_NEW_TOKENS, version=3
        )
    return objective(batch.pack(logprobs), None, packed)[0]


def assert_equal_with_gradients(ours, theirs, logprobs):
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)
    (mine,) = torch.autograd.grad(ours, logprobs)
    (other,) = torch.autograd.grad(theirs, logprobs)
    assert other.abs().max() > 1e-4
    torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-10)


def settings_of(seed, *, by_sequence=False):
    """A batch, three policies, and advantages: one a token, or one a sequence."""
    batch = RandomBatch(seed)
    prox = batch.logprobs()
    behaviour, logprobs = batch.near(prox), batch.near(prox).requires_grad_()
    advantages = batch.rewards[:, None].expand_as(prox) if by_sequence else batch.normal(*prox.shape)
    return batch, prox, behaviour, logprobs, advantages


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_clipped_ratio_with_dual_clip(algos, seed, aggregation):
    batch, prox, _, logprobs, advantages = settings_of(seed)
    bounds = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}
    config = verl_config(**bounds)
    config.global_batch_info["loss_scale_factor"] = MAX_NEW_TOKENS
    theirs, _ = algos.compute_policy_loss_vanilla(
        prox, logprobs, advantages, batch.mask, AGGREGATIONS[aggregation], config
    )
    actor = ActorConfig(
        eps_clip=0.2, eps_clip_higher=0.28, c_clip=1.5, loss_aggregation=aggregation, use_decoupled_loss=False
    )
    ours = pekoe_loss(actor, batch, logprobs, prox, prox, advantages)
    assert_equal_with_gradients(ours, theirs, logprobs)


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo(algos, seed):
    batch, prox, _, logprobs, advantages = settings_of(seed, by_sequence=True)
    config = verl_config(clip_ratio_low=0.1, clip_ratio_high=0.12)
    theirs, _ = algos.compute_policy_loss_gspo(prox, logprobs, advantages, batch.mask, "seq-mean-token-mean", config)
    actor = ActorConfig(
        eps_clip=0.1, eps_clip_higher=0.12, importance_sampling_level="sequence", loss_aggregation="sequence_mean",
        use_decoupled_loss=False,
    )  # fmt: skip
    ours = pekoe_loss(actor, batch, logprobs, prox, prox, advantages)
    assert_equal_with_gradients(ours, theirs, logprobs)


@pytest.mark.parametrize("seed", SEEDS)
def test_sapo(algos, seed):
    batch, _, behaviour, logprobs, advantages = settings_of(seed)
    config = verl_config(tau_pos=1.0, tau_neg=1.05)
    theirs, _ = algos.compute_policy_loss_sapo(behaviour, logprobs, advantages, batch.mask, config=config)
    actor = ActorConfig(
        objective="sapo", sapo_tau_pos=1.0, sapo_tau_neg=1.05, loss_aggregation="sequence_mean",
        use_decoupled_loss=False,
    )  # fmt: skip
    ours = pekoe_loss(actor, batch, logprobs, behaviour, behaviour, advantages)
    assert_equal_with_gradients(ours, theirs, logprobs)


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo(algos, seed):
    batch, prox, _, logprobs, advantages = settings_of(seed)
    config = verl_config(clip_ratio_low=0.3, clip_ratio_high=0.4)
    theirs, _ = algos.compute_policy_loss_cispo(prox, logprobs, advantages, batch.mask, "token-mean", config)
    actor = ActorConfig(objective="cispo", eps_clip=0.3, eps_clip_higher=0.4, use_decoupled_loss=False)
    ours = pekoe_loss(actor, batch, logprobs, prox, prox, advantages)
    assert_equal_with_gradients(ours, theirs, logprobs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("bounds", "threshold"),
    [
        (RejectionConfig(action="clamp", upper=1.3), 1.3),
        (RejectionConfig(action="mask", lower=0.7, upper=1.4), "0.7_1.4"),
        (None, 1e9),
    ],
    ids=["truncated", "icepop", "unbounded"],
)
def test_decoupled_weight_and_rejection(algos, correction, seed, bounds, threshold):
    batch, prox, behaviour, logprobs, advantages = settings_of(seed)
    weights, _ = correction.compute_rollout_correction_weights(
        prox - behaviour, batch.mask, rollout_is="token", rollout_is_threshold=threshold
    )
    config = verl_config(clip_ratio_c=1e9)
    theirs, _ = algos.compute_policy_loss_vanilla(
        prox, logprobs, advantages, batch.mask, "token-mean", config, rollout_is_weights=weights
    )
    ours = pekoe_loss(ActorConfig(rejection_sampling=bounds), batch, logprobs, prox, behaviour, advantages)
    assert_equal_with_gradients(ours, theirs, logprobs)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_over_ranks_add_up_to_the_same(algos, aggregation):
    """verl scales each share for the mean that its data-parallel ranks take; ours is a sum."""
    batch, prox, _, logprobs, advantages = settings_of(4)
    config = verl_config(clip_ratio_c=1e9)
    config.global_batch_info.update(
        dp_size=2, batch_num_tokens=batch.num_active, global_batch_size=batch.num_rows,
        loss_scale_factor=MAX_NEW_TOKENS,
    )  # fmt: skip
    shares = [
        algos.compute_policy_loss_vanilla(
            prox[part], logprobs[part], advantages[part], batch.mask[part], AGGREGATIONS[aggregation], config
        )[0]
        for part in (slice(0, 3), slice(3, 4), slice(4, None))
    ]
    actor = ActorConfig(loss_aggregation=aggregation, use_decoupled_loss=False)
    ours = pekoe_loss(actor, batch, logprobs, prox, prox, advantages)
    assert_equal_with_gradients(ours, sum(shares) / 2, logprobs)
