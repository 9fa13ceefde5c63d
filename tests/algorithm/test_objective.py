"""The policy objective: hand values, float64 gradients, and invariance to how a batch is cut."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from pekoe.pipeline.algorithm.objective import PolicyObjective, needs_prox_forward
from pekoe.pipeline.config.actor import ActorConfig, RejectionConfig

VERSION = 4


def batch_of(sequences):
    """Sequences are lists of (behaviour, prox, advantage, mask, version); the first token of each is added."""
    rows = [[(0.0, 0.0, 0.0, 0, -1), *sequence] for sequence in sequences]
    flat = [token for row in rows for token in row]
    columns = list(zip(*flat, strict=True)) if flat else [()] * 5
    names = ("logprobs", "prox_logprobs", "advantages", "loss_mask", "versions")
    kinds = (torch.float64, torch.float64, torch.float64, torch.uint8, torch.int32)
    batch = {n: torch.tensor(c, dtype=k) for n, c, k in zip(names, columns, kinds, strict=True)}
    batch["cu_seqlens"] = torch.tensor(np.cumsum([0] + [len(row) for row in rows]))
    batch["truncated"] = torch.zeros(len(rows), dtype=torch.uint8)
    return batch


def token(behaviour, prox, advantage, mask=1, version=3):
    return (behaviour, prox, advantage, mask, version)


def run(batch, current, entropy=None, num_active=None, num_sequences=None, **settings):
    """(loss, gradient, statistics) for current log-probs of all tokens, first ones included."""
    settings = {"rejection_sampling": RejectionConfig(upper=50.0), **settings}
    objective = PolicyObjective(
        ActorConfig(**settings),
        num_active=int(batch["loss_mask"].sum()) if num_active is None else num_active,
        num_sequences=len(batch["cu_seqlens"]) - 1 if num_sequences is None else num_sequences,
        max_new_tokens=10,
        version=VERSION,
    )
    logprobs = torch.tensor(current, dtype=torch.float64, requires_grad=True)
    loss, stats = objective(logprobs, entropy, batch)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return float(loss.detach()), gradient.tolist(), {name: float(value) for name, value in stats.items()}


@pytest.mark.parametrize(
    ("advantage", "loss", "slope", "clipped"),
    [(1.0, -1.2 * math.exp(-0.2), 0.0, 1), (-1.0, math.exp(0.3 - 0.2), math.exp(0.3 - 0.2), 0)],
)
def test_three_policies_stay_apart(advantage, loss, slope, clipped):
    batch = batch_of([[token(-1.0, -1.2, advantage)]])
    got, gradient, stats = run(batch, [0, -0.9], rejection_sampling=RejectionConfig(upper=2))
    assert got == pytest.approx(loss)
    assert gradient == pytest.approx([0, slope])
    assert stats["clipped_higher"] == clipped
    assert stats["behaviour_weight"] == pytest.approx(math.exp(-0.2))
    assert stats["ratio"] == pytest.approx(math.exp(0.3))
    assert stats["logprob_gap_max"] == pytest.approx(0.1)


def test_the_gap_between_engine_and_trainer_is_of_tokens_of_the_own_version():
    sequence = [
        token(-1.0, -1.25, 1.0, version=VERSION), token(-1.0, -0.95, 1.0, version=VERSION),
        token(-3.0, -1.0, 1.0, version=VERSION - 1), token(-3.0, -1.0, 1.0, mask=0, version=VERSION),
    ]  # fmt: skip
    current = [0, -9.0, -9.0, -9.0, -9.0]
    _, _, exact = run(batch_of([sequence]), current)
    assert exact["fresh_tokens"] == 2
    assert exact["fresh_gap"] == pytest.approx(0.3)
    assert exact["fresh_drift"] == pytest.approx(-0.2)
    assert exact["fresh_wide"] == 1
    assert exact["fresh_gap_max"] == pytest.approx(0.25)
    _, _, first = run(batch_of([sequence]), current, prox_logp_method="reuse")
    assert first["fresh_gap"] == pytest.approx(16.0)
    _, _, none = run(batch_of([[token(-1.0, -1.0, 1.0)]]), [0, -1.0])
    assert (none["fresh_tokens"], none["fresh_gap"], none["fresh_gap_max"]) == (0, 0, 0)


def test_rejected_token_leaves_the_numerator_only():
    batch = batch_of([[token(-3, -1, 1.0), token(-1, -1, 1.0)]])
    loss, gradient, stats = run(batch, [0, -1, -1], rejection_sampling=RejectionConfig(upper=5))
    assert loss == pytest.approx(-1 / 2)
    assert gradient == pytest.approx([0, 0, -0.5])
    assert (stats["rejected"], stats["tokens"]) == (1, 2)


def test_not_decoupled_is_plain_ppo_against_the_behaviour_policy():
    batch = batch_of([[token(-1.0, -9.0, -1.0)]])
    loss, gradient, _ = run(batch, [0, -0.9], use_decoupled_loss=False, rejection_sampling=None)
    assert loss == pytest.approx(math.exp(0.1))
    assert gradient == pytest.approx([0, math.exp(0.1)])


def test_reuse_and_loglinear_need_no_proximal_forward():
    batch = batch_of([[token(-1.0, 0, 1.0, version=2)]])
    del batch["prox_logprobs"]
    loss, gradient, _ = run(batch, [0, -1.2], prox_logp_method="reuse")
    assert loss == pytest.approx(-math.exp(-0.2))
    assert gradient == pytest.approx([0, -math.exp(-0.2)])
    loss, gradient, _ = run(batch, [0, -1.2], prox_logp_method="loglinear")
    assert loss == pytest.approx(-math.exp(-0.1) * math.exp(-0.1))
    for method, needed in (("recompute", True), ("metrics", True), ("reuse", False), ("loglinear", False)):
        assert needs_prox_forward(ActorConfig(prox_logp_method=method, ppo_n_minibatches=2)) == needed
    assert not needs_prox_forward(ActorConfig(use_decoupled_loss=False))


def test_the_only_update_of_a_step_needs_no_proximal_forward():
    """It sees the very weights that a forward would: ratio 1, and the behaviour weight is the policy's own."""
    assert not needs_prox_forward(ActorConfig())
    for reads_it in (
        {"ppo_n_minibatches": 2}, {"ppo_epochs": 2}, {"disable_dropout": False}, {"kl_ctl": 0.1},
        {"prox_logp_method": "metrics"}, {"m2_threshold": 0.04},
    ):  # fmt: skip
        assert needs_prox_forward(ActorConfig(**reads_it)), reads_it
    assert needs_prox_forward(ActorConfig(m2_threshold=0.04, use_decoupled_loss=False))
    assert not needs_prox_forward(ActorConfig(kl_ctl=0.1, use_decoupled_loss=False))
    current = [0, -0.7, -1.1]
    batch = batch_of([[token(-1.0, -0.7, 1.0), token(-1.2, -1.1, -2.0)]])
    with_forward = run(batch, current)
    del batch["prox_logprobs"]
    without = run(batch, current)
    assert without == with_forward
    assert without[2]["ratio"] == 2
    assert without[2]["behaviour_weight"] == pytest.approx(math.exp(0.3) + math.exp(0.1))
    with pytest.raises(KeyError, match="prox_logprobs"):
        run(batch, current, ppo_epochs=2)


def test_metrics_tell_the_errors_of_the_approximations():
    batch = batch_of([[token(-1.0, -1.3, 1.0, version=2)]])
    _, _, stats = run(batch, [0, -1.2], prox_logp_method="metrics")
    assert stats["prox_error_loglinear"] == pytest.approx(0.2)
    assert stats["prox_error_reuse"] == pytest.approx(0.1)


ONES = [[token(-1, -1, 1.0)], [token(-1, -1, -1.0)] * 3]


def values(*rows):
    """Sequences whose token losses at ratio 1 are the given numbers."""
    return [[token(-1, -1, -value) for value in row] for row in rows]


@pytest.mark.parametrize(
    ("sequences", "aggregation", "expected"),
    [
        (values([-1], [1, 1, 1]), "token_mean", 0.5),
        (values([2] * 5, [10]), "token_mean", 10 / 3),
        (values([2] * 5, [10]), "sequence_mean", 6.0),
        (values([2] * 5, [10]), "constant", 20 / (2 * 10)),
    ],
)
def test_aggregations(sequences, aggregation, expected):
    batch = batch_of(sequences)
    loss, _, _ = run(batch, [-1.0] * len(batch["loss_mask"]), loss_aggregation=aggregation)
    assert loss == pytest.approx(expected)
    shares = [
        run(
            batch_of([sequence]), [-1.0] * (len(sequence) + 1), loss_aggregation=aggregation,
            num_active=sum(map(len, sequences)), num_sequences=len(sequences),
        )[0]
        for sequence in sequences
    ]  # fmt: skip
    assert sum(shares) == pytest.approx(expected)


def test_gspo_gradient_reaches_every_token():
    batch = batch_of([[token(-1, -1, 1.0), token(-1, -1, 3.0)]])
    loss, gradient, _ = run(
        batch, [0, -0.9, -0.9], importance_sampling_level="sequence", loss_aggregation="sequence_mean", eps_clip=0.5
    )
    assert loss == pytest.approx(-2 * math.exp(0.1))
    assert gradient == pytest.approx([0, -math.exp(0.1), -math.exp(0.1)])


def test_entropy_bonus_is_differentiable():
    batch = batch_of([[token(-1, -1, 0.0), token(-1, -1, 0.0, mask=0)]])
    entropy = torch.tensor([9.0, 2.0, 9.0], dtype=torch.float64, requires_grad=True)
    objective = PolicyObjective(
        ActorConfig(entropy_coef=0.1), num_active=1, num_sequences=1, max_new_tokens=1, version=VERSION
    )
    assert objective.needs_entropy_gradient
    loss, stats = objective(torch.zeros(3, dtype=torch.float64), entropy, batch)
    assert loss.item() == pytest.approx(-0.2)
    assert stats["entropy"] == 2
    loss.backward()
    assert entropy.grad.tolist() == pytest.approx([0, -0.1, 0])


def test_truncated_sequences_are_left_out():
    batch = batch_of([[token(-1, -1, 1.0)], [token(-1, -1, 1.0)]])
    batch["truncated"][1] = 1
    loss, gradient, stats = run(batch, [0, -1, 0, -1], mask_truncated=True, num_active=1, num_sequences=1)
    assert loss == pytest.approx(-1)
    assert gradient == pytest.approx([0, -1, 0, 0])
    assert (stats["tokens"], stats["sequences"]) == (1, 1)


def test_masked_tokens_carry_no_nan():
    batch = batch_of([[token(-1, -1, 1.0), token(math.nan, math.nan, math.nan, mask=0)]])
    loss, gradient, stats = run(batch, [math.nan, -1, math.nan])
    assert loss == pytest.approx(-1)
    assert gradient == pytest.approx([0, -1, 0])
    assert all(math.isfinite(value) for value in stats.values())


def test_empty_batch_gives_the_same_statistics_all_zero():
    full = run(batch_of(ONES), [-1.0] * 6)[2]
    loss, _, stats = run(batch_of([]), [], num_active=4, num_sequences=2)
    assert loss == 0
    assert stats.keys() == full.keys()
    assert not any(stats.values())


def test_contradictions_are_refused_and_unbounded_weights_warn():
    def make(**settings):
        PolicyObjective(ActorConfig(**settings), num_active=1, num_sequences=1, max_new_tokens=1, version=0)

    with pytest.raises(ValueError, match=r"actor\.eps_clip: null"):
        make(eps_clip=None, eps_clip_higher=0.3)
    with pytest.raises(ValueError, match=r"actor\.c_clip: 1"):
        make(c_clip=1.0)
    with pytest.raises(ValueError, match="action clamp"):
        make(rejection_sampling=RejectionConfig(action="clamp", metric="kl_k2"))
    with pytest.warns(UserWarning, match="unbounded"):
        make(rejection_sampling=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(rejection_sampling=None, use_decoupled_loss=False)
