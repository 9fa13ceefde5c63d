"""The policy objective: hand values, float64 gradients, and invariance to how a batch is cut."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pekoe.pipeline.algorithm.objective import PolicyObjective, needs_prox_forward
from pekoe.pipeline.algorithm.objectives.ppo import clipped_loss
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


def test_dual_clip_bounds_negative_advantages():
    ratio = torch.tensor([5.0, 5.0, 1.0])
    found = clipped_loss(ratio, torch.tensor([-1.0, 1.0, -1.0]), 0.2, None, 3.0)
    assert found.values.tolist() == pytest.approx([3.0, -1.2, 1.0])
    assert found.stats["clipped_higher"].tolist() == [False, True, False]
    assert found.stats["clipped_lower"].tolist() == [False, False, False]
    assert found.stats["dual_clipped"].tolist() == [True, False, False]


def test_asymmetric_and_absent_clip():
    ratio, advantages = torch.tensor([1.25, 1.5, 0.5]), torch.tensor([1.0, 1.0, -1.0])
    assert clipped_loss(ratio, advantages, 0.2, 0.28, None).values.tolist() == pytest.approx([-1.25, -1.28, 0.8])
    assert clipped_loss(ratio, advantages, None, None, None).values.tolist() == pytest.approx([-1.25, -1.5, 0.5])


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


tokens = st.tuples(
    st.floats(-3, 0), st.floats(-3, 0), st.floats(-2, 2), st.integers(0, 1), st.integers(0, 4), st.floats(-3, 0)
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=6),
    st.sampled_from(["token_mean", "sequence_mean", "constant"]),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from(["recompute", "loglinear", "reuse"]),
    st.sampled_from(["token", "sequence"]),
    st.integers(1, 4),
    st.randoms(),
)
def test_any_cut_and_order_gives_the_same_loss_and_gradient(rows, aggregation, level, method, reject, parts, random):
    options = {
        "loss_aggregation": aggregation, "importance_sampling_level": level, "prox_logp_method": method,
        "rejection_sampling": RejectionConfig(level=reject, upper=1.5), "c_clip": 2.0,
    }  # fmt: skip
    sequences, current = [[t[:5] for t in row] for row in rows], [[0.0, *(t[5] for t in row)] for row in rows]
    counts = {"num_active": sum(t[3] for row in rows for t in row), "num_sequences": len(rows)}
    whole, gradient, stats = run(batch_of(sequences), list(itertools.chain(*current)), **counts, **options)
    offsets = np.cumsum([0] + [len(c) for c in current])
    order = list(range(len(rows)))
    random.shuffle(order)
    total, pieces, sums = 0.0, [None] * len(rows), dict.fromkeys(stats, 0.0)
    for part in range(parts):
        mine = order[part::parts]
        loss, piece, found = run(
            batch_of([sequences[i] for i in mine]),
            list(itertools.chain(*(current[i] for i in mine))),
            **counts,
            **options,
        )
        total += loss
        for i in mine:
            pieces[i], piece = piece[: len(current[i])], piece[len(current[i]) :]
        sums = {n: max(sums[n], v) if n.endswith("_max") else sums[n] + v for n, v in found.items()}
    assert total == pytest.approx(whole, abs=1e-12)
    for i, piece in enumerate(pieces):
        assert piece == pytest.approx(gradient[offsets[i] : offsets[i + 1]], abs=1e-12)
    assert sums == pytest.approx(stats, abs=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["token", "sequence"]))
def test_gradient_equals_finite_differences(seed, level):
    rng = np.random.default_rng(seed)
    rows = [[token(*rng.uniform(-2, -0.5, 2), rng.normal()) for _ in range(3)] for _ in range(2)]
    batch = batch_of(rows)
    objective = PolicyObjective(
        ActorConfig(importance_sampling_level=level, c_clip=3.0),
        num_active=6, num_sequences=2, max_new_tokens=3, version=VERSION,
    )  # fmt: skip
    current = torch.tensor(rng.uniform(-2, -0.5, 8), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: objective(x, None, batch)[0], (current,), eps=1e-7, atol=1e-5)
