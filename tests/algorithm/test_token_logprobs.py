"""The one shift between logits and tokens."""

from __future__ import annotations

import pytest
import torch

from pekoe.kernels.logprob.logprob import logits_logprobs
from pekoe.pipeline.algorithm.token_logprobs import token_logprobs


def test_alignment_with_a_model_whose_logprob_tells_the_token():
    """A model that puts a log-prob of -id/100, up to a constant, on each id."""
    tokens = torch.tensor([10, 11, 12, 13, 20, 21, 30])
    cu_seqlens, mask = torch.tensor([0, 4, 6, 7]), torch.tensor([0, 0, 1, 0, 0, 1, 0])
    asked = []

    def logprobs_at(positions, targets):
        asked.append((positions.tolist(), targets.tolist()))
        row = -torch.arange(40, dtype=torch.float64) / 100
        return logits_logprobs(row.expand(len(positions), -1), targets)

    logprobs, entropy = token_logprobs(logprobs_at, tokens, cu_seqlens, mask)
    lse = torch.logsumexp(-torch.arange(40, dtype=torch.float64) / 100, 0)
    expected = torch.tensor([0, 0, -0.12 - lse, 0, 0, -0.21 - lse, 0], dtype=torch.float64)
    torch.testing.assert_close(logprobs, expected)
    assert asked == [([1, 4], [12, 21])]
    assert entropy.nonzero().flatten().tolist() == [2, 5]


def test_mask_on_a_first_token_is_refused():
    with pytest.raises(ValueError, match="first token"):
        token_logprobs(lambda *_: (torch.zeros(1), torch.zeros(1)), torch.zeros(3).long(), torch.tensor([0, 2, 3]),
                       torch.tensor([0, 0, 1]))  # fmt: skip
