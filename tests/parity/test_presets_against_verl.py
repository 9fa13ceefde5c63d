"""Presets as they are, from rewards to the gradient of each log-prob, against verl's estimators and losses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from random_batches import RandomBatch

from pekoe.pipeline.algorithm.objective import PolicyObjective
from pekoe.pipeline.algorithm.reduction import OneRank
from pekoe.pipeline.algorithm.reward_to_advantage import find_advantages
from pekoe.pipeline.config.load import load
from pekoe.pipeline.records import PackedBatch

pytestmark = pytest.mark.slow

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
MAX_NEW_TOKENS = 32
NO_DUAL_CLIP = 1e9
TOKEN_MEAN, SEQUENCE_MEAN, CONSTANT = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"
CASES = {
    "grpo": ("grpo", "vanilla", TOKEN_MEAN, 0.2, 0.2),
    "drgrpo": ("drgrpo", "vanilla", CONSTANT, 0.2, 0.2),
    "rloo": ("rloo", "vanilla", TOKEN_MEAN, 0.2, 0.2),
    "dapo": ("grpo", "vanilla", TOKEN_MEAN, 0.2, 0.28),
    "gspo": ("grpo", "gspo", SEQUENCE_MEAN, 3e-4, 4e-4),
    "cispo": ("grpo", "cispo", TOKEN_MEAN, 1.0, 4.0),
    "ppo": ("gae", "vanilla", TOKEN_MEAN, 0.2, 0.2),
}
"""Preset -> verl's estimator, loss, aggregation and clip range."""


def packed_batch(batch: RandomBatch, values: torch.Tensor) -> PackedBatch:
    """The batch as a trainer rank reads it; float64 values stand where a critic's would."""
    mask = batch.packed_mask().numpy()
    length = len(mask)
    return PackedBatch(
        tokens=np.zeros(length, np.int32), cu_seqlens=batch.cu_seqlens.numpy().astype(np.int32),
        loss_mask=mask.astype(np.uint8), logprobs=np.zeros(length, np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32), turns=np.where(mask, 0, -1).astype(np.int32),
        rewards=batch.rewards.numpy(), groups=batch.groups.astype(np.int64), samples=batch.samples.astype(np.int32),
        truncated=np.zeros(batch.num_rows, np.uint8),
        extra={"values": batch.pack(values, before=9.0).numpy(), "bootstrap": np.zeros(batch.num_rows)},
    )  # fmt: skip


def theirs_of(algos, batch, estimator, values, eps):
    """verl's advantages [B, L]."""
    placed = batch.outcome_rewards()
    if estimator == "gae":
        return algos.compute_gae_advantage_return(placed, values, batch.mask, 1.0, 1.0)[0]
    if estimator == "rloo":
        return algos.compute_rloo_outcome_advantage(placed, batch.mask, batch.groups)[0]
    return algos.compute_grpo_outcome_advantage(
        placed, batch.mask, batch.groups, eps, norm_adv_by_std_in_grpo=estimator == "grpo"
    )[0]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("preset", CASES)
def test_from_rewards_to_gradients(algos, preset, seed):
    from verl.workers.config import FSDPActorConfig

    estimator, loss_name, aggregation, lower, higher = CASES[preset]
    actor = load(QUICKSTART, [f"algorithm={preset}"]).actor
    batch = RandomBatch(seed, group_sizes=(4, 2, 3))
    values, prox = batch.normal(*batch.mask.shape), batch.logprobs()
    logprobs = batch.near(prox).requires_grad_()
    if estimator != "gae":
        values = torch.zeros_like(values)

    settings = FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=lower, clip_ratio_high=higher,
        clip_ratio_c=NO_DUAL_CLIP,
    )  # fmt: skip
    if aggregation == CONSTANT:
        settings.global_batch_info["loss_scale_factor"] = MAX_NEW_TOKENS
    eps = actor.reward_norm.eps if actor.reward_norm else 0.0
    advantages = theirs_of(algos, batch, estimator, values, eps)
    theirs, _ = algos.get_policy_loss_fn(loss_name)(prox, logprobs, advantages, batch.mask, aggregation, settings)

    rows = packed_batch(batch, values)
    if estimator != "gae":
        rows.extra.clear()
    found = find_advantages([rows], actor, MAX_NEW_TOKENS, OneRank(), groups=sorted(set(batch.groups.tolist())))
    objective = PolicyObjective(
        actor, num_active=batch.num_active, num_sequences=batch.num_rows, max_new_tokens=MAX_NEW_TOKENS, version=0
    )
    columns = {
        "cu_seqlens": batch.cu_seqlens, "loss_mask": batch.packed_mask(), "logprobs": batch.pack(prox),
        "prox_logprobs": batch.pack(prox), "advantages": found.advantages,
        "versions": torch.from_numpy(rows.versions), "truncated": torch.from_numpy(rows.truncated),
    }  # fmt: skip
    ours, _ = objective(batch.pack(logprobs), None, columns)

    # eps of whitening: 1e-5 beside the std here, 1e-8 inside of the root there.
    tolerance = 1e-4 if estimator == "gae" else 1e-7
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance / 100)
    (mine,), (other,) = torch.autograd.grad(ours, logprobs), torch.autograd.grad(theirs, logprobs)
    assert other.abs().max() > 1e-4
    torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance / 100)
