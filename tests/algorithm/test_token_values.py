"""The shift between a value head's outputs and tokens, by hand."""

from __future__ import annotations

import pytest
import torch

from pekoe.pipeline.algorithm.token_values import head_outputs, token_values

BOUNDS = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
OUTPUTS = torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=torch.float64)


def test_a_token_has_the_output_before_it_and_a_sequence_its_last_one():
    values, scores = token_values(OUTPUTS, BOUNDS)
    assert values.tolist() == [0, 1, 2, 0, 0, 5]
    assert scores.tolist() == [3, 4, 6]
    assert head_outputs(values, scores, BOUNDS).tolist() == OUTPUTS.tolist()


def test_gradients_reach_both():
    outputs = OUTPUTS.clone().requires_grad_()
    values, scores = token_values(outputs, BOUNDS)
    (values * torch.arange(6) + 10 * torch.nn.functional.pad(scores, (0, 3))).sum().backward()
    assert outputs.grad.tolist() == [1, 2, 10, 10, 5, 10]
    assert torch.autograd.gradcheck(lambda x: token_values(x, BOUNDS), outputs)


def test_an_empty_batch_has_no_values_and_an_empty_sequence_is_refused():
    values, scores = token_values(torch.zeros(0), torch.tensor([0], dtype=torch.int32))
    assert len(values) == len(scores) == len(head_outputs(values, scores, torch.tensor([0]))) == 0
    with pytest.raises(ValueError, match="without tokens"):
        token_values(torch.zeros(2), torch.tensor([0, 2, 2]))
