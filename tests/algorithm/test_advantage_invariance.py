"""Advantages depend on the step alone: not on ranks, micro-batches, order, padding or where a group's rows lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_ranks import on_ranks, packed, trajectory

from pekoe.pipeline.algorithm.reduction import OneRank
from pekoe.pipeline.algorithm.reward_to_advantage import find_advantages
from pekoe.pipeline.config.actor import ActorConfig, NormConfig
from pekoe.pipeline.records import Finish

ALGORITHMS = {
    "grpo": {},
    "rloo": {"reward_norm": NormConfig(std_level=None, mean_leave1out=True)},
    "liteppo": {"reward_norm": NormConfig(std_level="batch")},
    "reinforce_pp": {"reward_norm": None, "kl_ctl": 0.1, "adv_norm": NormConfig("batch", "batch")},
    "tokens of groups": {"adv_norm": NormConfig("group", "group", mean_leave1out=True), "kl_ctl": 0.1},
    "ppo": {"critic": True, "gae_lambda": 0.9, "discount": 0.97, "adv_norm": NormConfig("batch", "batch")},
    "turns": {"critic": True, "gae_unit": "turn", "gae_lambda_by_length": "vapo", "kl_ctl": 0.1, "kl_estimator": "k3"},
    "dapo": {"overlong_reward_penalty": True, "overlong_tokens": 3, "mask_truncated": True},
}
TOKEN_ARRAYS = ("prox_logprobs", "ref_logprobs", "values", "turn_rewards")


def random_rows(seed, num_rows, critic):
    """Uneven groups; an episode may have several sequences; tokens of tools; some truncated."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(num_rows):
        n = int(rng.integers(2, 10))
        mask = np.append([0, 1], rng.random(n - 2) < 0.7).astype(np.uint8)
        row = trajectory(
            mask, float(rng.normal()), sample=int(rng.integers(0, 3)), logprobs=rng.uniform(-2, -0.1, n),
            finish=Finish.LENGTH if rng.random() < 0.2 else Finish.STOP,
        )  # fmt: skip
        extra = {name: np.where(mask == 1, rng.normal(size=n), 0) for name in TOKEN_ARRAYS}
        extra["bootstrap"], extra["model_scores"] = rng.normal(), rng.normal()
        for name in () if critic else ("values", "bootstrap"):
            del extra[name]
        rows.append((int(rng.integers(0, 4)) * 1000 + 7, row, extra, number))
    return rows


def pad(row, more):
    """The same sequence with tokens of a tool behind it."""
    group, t, extra, number = row
    longer = trajectory([*t.loss_mask, *[0] * more], t.reward, [*t.turns, *[-1] * more], t.sample, t.finish,
                        [*t.logprobs, *[0] * more])  # fmt: skip
    return group, longer, {n: np.append(v, [0.0] * more) if n in TOKEN_ARRAYS else v for n, v in extra.items()}, number


def batch_of(rows):
    names = rows[0][2] if rows else {}
    extra = {name: np.concatenate([np.atleast_1d(row[2][name]) for row in rows]) for name in names}
    return packed(*(row[:2] for row in rows), **extra)


def by_row(rows, config, over, groups, cuts):
    """({number: (advantages, returns) of its active tokens}, sums) with the rows cut at `cuts`."""
    parts = [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    found = find_advantages([batch_of(part) for part in parts], config, 8, over, groups=groups)
    pieces = torch.split(torch.stack([found.advantages, found.returns]), [len(row[1].tokens) for row in rows], dim=1)
    return {
        row[3]: piece[:, torch.from_numpy(row[1].loss_mask).bool()].numpy()
        for row, piece in zip(rows, pieces, strict=True)
    }, found.sums


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(ALGORITHMS)), st.integers(1, 14), st.integers(1, 3), st.integers(0, 10**6))
def test_any_cut_order_and_padding(name, num_rows, num_ranks, seed):
    options = dict(ALGORITHMS[name])
    rows = random_rows(seed, num_rows, options.pop("critic", False))
    config = ActorConfig(**options)
    groups = sorted({row[0] for row in rows} | {5})
    whole, sums = by_row(rows, config, OneRank(), groups, [])
    rng = np.random.default_rng(seed)
    mixed = [pad(rows[i], int(rng.integers(0, 4))) for i in rng.permutation(num_rows)]
    shares = [mixed[rank::num_ranks] for rank in range(num_ranks)]
    cuts = [sorted(rng.integers(0, len(share) + 1, 2).tolist()) for share in shares]
    backwards = groups[::-1]
    found = on_ranks(num_ranks, lambda rank, over: by_row(shares[rank], config, over, backwards, cuts[rank]))
    together = {number: piece for pieces, _ in found for number, piece in pieces.items()}
    assert together.keys() == whole.keys()
    for number, piece in together.items():
        np.testing.assert_allclose(piece, whole[number], rtol=1e-12, atol=1e-12)
    for _, own in found:
        assert own == pytest.approx(sums, abs=1e-12, rel=1e-12)
