"""Losses of the supervised tasks: closed forms, padded references in float64, and what must not change them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from pekoe.kernels.logprob.logprob import logits_logprobs
from pekoe.pipeline.algorithm.supervised.dpo import DpoLoss, preference_losses
from pekoe.pipeline.algorithm.supervised.reward_model import RewardModelLoss
from pekoe.pipeline.algorithm.supervised.sft import SftLoss
from pekoe.pipeline.algorithm.token_logprobs import token_logprobs
from pekoe.pipeline.config.companions import DpoConfig

VOCABULARY = 11
LENGTHS = ((2, 5), (4, 8), (1, 2), (3, 4), (2, 9), (1, 6))
"""(prompt tokens, all tokens) of six sequences: three pairs."""


def sequences():
    """Tokens, labels and logits [T, V] (float64, leaves) of each sequence; one label is missing in the middle."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for prompt, length in LENGTHS:
        tokens = torch.randint(0, VOCABULARY, (length,), generator=generator)
        labels = (torch.arange(length) >= prompt).to(torch.uint8)
        if length > 7:
            labels[-2] = 0
        logits = torch.randn(length, VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
        made.append((tokens, labels, logits))
    return made


def packed(rows, extra=()):
    """(log-probs [M], batch) of sequences laid end to end; `extra` are arrays of each sequence by name."""
    tokens = torch.cat([row[0] for row in rows])
    labels = torch.cat([row[1] for row in rows])
    logits = torch.cat([row[2] for row in rows])
    lengths = torch.tensor([0, *(len(row[0]) for row in rows)])
    batch = {"tokens": tokens, "loss_mask": labels, "cu_seqlens": lengths.cumsum(0)}
    batch |= {name: torch.cat(arrays) for name, arrays in dict(extra).items()}
    logprobs, _ = token_logprobs(
        lambda at, targets: logits_logprobs(logits[at], targets), tokens, batch["cu_seqlens"], labels
    )
    return logprobs, batch


def padded(rows, pad=0):
    """(logits [S, T, V], targets [S, T] with -100 where nothing is trained): the usual shape, shifted by one."""
    longest = max(len(row[0]) for row in rows)
    logits = torch.stack([F.pad(row[2], (0, 0, 0, longest - len(row[0]))) for row in rows])
    targets = torch.full((len(rows), longest), -100)
    for i, (tokens, labels, _) in enumerate(rows):
        targets[i, : len(tokens)] = torch.where(labels.bool(), tokens, -100)
    return logits[:, :-1], targets[:, 1:]


def padded_logprobs(rows):
    """[S] sums over labels, and their numbers."""
    logits, targets = padded(rows)
    each = -F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-100, reduction="none")
    return each.sum(dim=1), (targets != -100).sum(dim=1)


def gradients(loss, rows):
    return torch.autograd.grad(loss, [row[2] for row in rows], allow_unused=True)


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def total(shares):
    return torch.stack(list(shares)).sum()


def test_sft_is_the_padded_cross_entropy():
    rows = sequences()
    logits, targets = padded(rows)
    expected = F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1), ignore_index=-100)
    num_labels = sum(int(row[1].sum()) for row in rows)
    loss, stats = SftLoss(num_labels)(*packed(rows)[:1], None, packed(rows)[1])
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    assert stats["labels"] == num_labels
    close(gradients(loss, rows), gradients(expected, rows))


@pytest.mark.parametrize("cut", [[[0, 1, 2, 3, 4, 5]], [[5], [3], [0], [4], [1], [2]], [[4, 1], [], [3, 5, 0, 2]]])
def test_sft_does_not_change_with_cut_or_order(cut):
    rows = sequences()
    num_labels = sum(int(row[1].sum()) for row in rows)
    whole = SftLoss(num_labels)(*packed(rows)[:1], None, packed(rows)[1])[0]
    parts = []
    for indices in cut:
        if not indices:
            nothing = {"loss_mask": torch.zeros(0, dtype=torch.uint8)}
            parts.append(SftLoss(num_labels)(torch.zeros(0, dtype=torch.float64), None, nothing)[0])
            continue
        logprobs, batch = packed([rows[i] for i in indices])
        parts.append(SftLoss(num_labels)(logprobs, None, batch)[0])
    torch.testing.assert_close(total(parts), whole, rtol=1e-13, atol=0)
    close(gradients(total(parts), rows), gradients(whole, rows))


def test_sft_numbers():
    """Lengths 1 and 3: every token counts the same, whatever its sequence."""
    logprobs = torch.tensor([0.0, -1.0, 0.0, -2.0, -3.0, -4.0], dtype=torch.float64)
    batch = {"loss_mask": torch.tensor([0, 1, 0, 1, 1, 1], dtype=torch.uint8)}
    assert float(SftLoss(4)(logprobs, None, batch)[0]) == 2.5


def test_sft_of_nothing_is_zero_not_nan():
    batch = {"loss_mask": torch.zeros(3, dtype=torch.uint8)}
    loss, stats = SftLoss(0)(torch.full((3,), torch.nan, dtype=torch.float64), None, batch)
    assert float(loss) == 0
    assert float(stats["labels"]) == 0


def reference_of(rows):
    """Log-probs of another policy on the labelled tokens, 0 elsewhere."""
    generator = torch.Generator().manual_seed(1)
    return [-torch.rand(len(row[0]), generator=generator, dtype=torch.float64) * row[1] for row in rows]


@pytest.mark.parametrize("form", ["sigmoid", "ipo"])
@pytest.mark.parametrize("cut", [[[0, 1, 2]], [[2], [0], [1]], [[2, 0], [1], []]])
def test_dpo_is_the_padded_formula_however_it_is_cut(form, cut):
    rows, beta = sequences(), 0.3
    reference = reference_of(rows)
    sums, counts = padded_logprobs(rows)
    gap = sums - torch.stack([values.sum() for values in reference])
    if form == "ipo":
        gap = gap / counts
    margins = gap[0::2] - gap[1::2]
    expected = (-F.logsigmoid(beta * margins)).mean() if form == "sigmoid" else ((margins - 1 / (2 * beta)) ** 2).mean()
    loss_function, parts, sums_found = DpoLoss(DpoConfig(beta=beta, loss_type=form), 3), [], {}
    for pairs in cut:
        indices = [i for pair in pairs for i in (2 * pair, 2 * pair + 1)]
        if indices:
            logprobs, batch = packed([rows[i] for i in indices], {"ref_logprobs": [reference[i] for i in indices]})
        else:
            logprobs = torch.zeros(0, dtype=torch.float64)
            batch = {
                "loss_mask": torch.zeros(0),
                "cu_seqlens": torch.zeros(1, dtype=torch.int64),
                "ref_logprobs": logprobs,
            }
        share, stats = loss_function(logprobs, None, batch)
        parts.append(share)
        for name, value in stats.items():
            sums_found[name] = sums_found.get(name, 0.0) + float(value)
    torch.testing.assert_close(total(parts), expected, rtol=1e-12, atol=0)
    close(gradients(total(parts), rows), gradients(expected, rows))
    assert sums_found["pairs"] == 3
    assert sums_found["accuracy"] == int((margins > 0).sum())
    assert sums_found["margin"] == pytest.approx(float(beta * margins.detach().sum()), rel=1e-12)
    assert sums_found["reward_chosen"] - sums_found["reward_rejected"] == pytest.approx(sums_found["margin"], rel=1e-9)


@pytest.mark.parametrize("rows", [[0, 1], [2, 3, 4, 5], [0, 1, 2, 3, 4, 5]])
def test_dpo_of_a_policy_that_is_its_reference_is_ln_2_for_every_shape(rows):
    chosen = [sequences()[i] for i in rows]
    logprobs, batch = packed(chosen)
    batch["ref_logprobs"] = logprobs.detach().clone()
    share, stats = DpoLoss(DpoConfig(beta=0.7), len(rows) // 2)(logprobs, None, batch)
    assert float(share) == pytest.approx(math.log(2), abs=1e-15)
    assert float(stats["margin"]) == 0
    assert float(stats["accuracy"]) == 0


def test_dpo_pairs_of_lengths_3_7_and_1_1():
    """Completions of one token, prompts of one: nothing is an extra sequence, and prompts have no gradient."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for length in (3, 7, 1, 1):
        tokens = torch.randint(0, VOCABULARY, (length + 1,), generator=generator)
        labels = torch.tensor([0] + [1] * length, dtype=torch.uint8)
        rows.append((tokens, labels, torch.randn(length + 1, VOCABULARY, dtype=torch.float64).requires_grad_()))
    logprobs, batch = packed(rows)
    batch["ref_logprobs"] = logprobs.detach().clone()
    share, _ = DpoLoss(DpoConfig(), 2)(logprobs, None, batch)
    assert float(share) == pytest.approx(math.log(2), abs=1e-15)
    for gradient in gradients(share, rows):
        assert gradient[:-1].abs().max() > 0
        assert not gradient[-1].any()


def test_swapping_the_sides_flips_the_margin():
    rows, config = sequences(), DpoConfig(beta=0.5)
    reference = reference_of(rows)
    found = []
    for order in ([0, 1, 2, 3, 4, 5], [1, 0, 3, 2, 5, 4]):
        logprobs, batch = packed([rows[i] for i in order], {"ref_logprobs": [reference[i] for i in order]})
        found.append(DpoLoss(config, 3)(logprobs, None, batch)[1])
    assert float(found[0]["margin"]) == -float(found[1]["margin"]) != 0
    assert float(found[0]["accuracy"]) == 3 - float(found[1]["accuracy"])


def test_prompt_tokens_have_no_gradient():
    rows = sequences()
    logprobs, batch = packed(rows, {"ref_logprobs": reference_of(rows)})
    share, _ = DpoLoss(DpoConfig(), 3)(logprobs, None, batch)
    for (_, labels, _), gradient in zip(rows, gradients(share, rows), strict=True):
        trained = torch.cat([labels[1:], labels.new_zeros(1)]).bool()
        assert (gradient.abs().sum(dim=1) > 0).equal(trained)


def test_ipo_is_zero_at_its_margin():
    for beta in (0.1, 0.5, 2.0):
        assert float(preference_losses(torch.tensor([1 / (2 * beta)], dtype=torch.float64), beta, "ipo")) == 0
    assert float(preference_losses(torch.zeros(1, dtype=torch.float64), 0.5, "ipo")) == 1
    # On means per token: 4 labels of log-ratio .5 and 1 of -.5 have a margin of 1 = 1 / (2 * .5).
    batch = {
        "loss_mask": torch.tensor([0, 1, 1, 1, 1, 0, 1], dtype=torch.uint8), "cu_seqlens": torch.tensor([0, 5, 7]),
        "ref_logprobs": torch.tensor([0, -1, -1, -1, -1, 0, -1], dtype=torch.float64),
    }  # fmt: skip
    logprobs = torch.tensor([0, -0.5, -0.5, -0.5, -0.5, 0, -1.5], dtype=torch.float64)
    assert float(DpoLoss(DpoConfig(beta=0.5, loss_type="ipo"), 1)(logprobs, None, batch)[0]) == 0


def test_preference_losses_are_finite_for_extreme_margins():
    margins = torch.tensor([-1e4, 1e4], dtype=torch.float32, requires_grad=True)
    losses = preference_losses(margins, 1.0, "sigmoid")
    (slope,) = torch.autograd.grad(losses.sum(), margins)
    assert losses.tolist() == [1e4, 0.0]
    assert slope.tolist() == [-1.0, 0.0]
    with pytest.raises(ValueError, match="sigmoid, ipo"):
        preference_losses(margins, 1.0, "hinge")


def test_a_torn_pair_is_refused():
    rows = sequences()[:3]
    logprobs, batch = packed(rows)
    batch["ref_logprobs"] = logprobs.detach()
    with pytest.raises(ValueError, match="pair"):
        DpoLoss(DpoConfig(), 2)(logprobs, None, batch)


def test_bradley_terry_numbers():
    scores = torch.tensor([1.0, 0.0, 2.0, 2.0, -1.0, 1.0], dtype=torch.float64, requires_grad=True)
    share, stats = RewardModelLoss(3)(scores.new_zeros(9), scores, {})
    expected = (math.log1p(math.exp(-1)) + math.log(2) + math.log1p(math.exp(2))) / 3
    assert float(share) == pytest.approx(expected, rel=1e-14)
    assert {name: float(value) for name, value in stats.items() if name != "loss"} == {
        "pairs": 3, "accuracy": 1, "margin": -1, "score_chosen": 2, "score_rejected": 3,
    }  # fmt: skip
    (slope,) = torch.autograd.grad(share, scores)
    wrong = [1 / (1 + math.exp(margin)) / 3 for margin in (1.0, 0.0, -2.0)]
    assert slope.tolist() == pytest.approx([side for w in wrong for side in (-w, w)], rel=1e-12)


def test_bradley_terry_shares_add_up():
    scores = torch.randn(8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    loss = RewardModelLoss(4)
    whole = loss(scores, scores, {})[0]
    parts = [loss(scores, scores[6:], {})[0], loss(scores, scores[:0], {})[0], loss(scores, scores[:6], {})[0]]
    torch.testing.assert_close(total(parts), whole, rtol=1e-14, atol=0)
