"""Log-probs, entropies and their gradients with Triton's epilogue in the interpreter, against torch's log_softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pekoe.kernels.logprob import triton_logprob
from pekoe.kernels.logprob.logprob import hidden_logprobs, logits_logprobs
from pekoe.kernels.logprob.reference import logprobs_and_entropy
from pekoe.kernels.registry import VARIABLE

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "logprob=triton")
    monkeypatch.setattr(triton_logprob, "BLOCK", 64)
    monkeypatch.setattr(triton_logprob, "TILE_ELEMENTS", 16 * 90)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def assert_near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize(
    ("rows", "size", "vocabulary", "with_bias"),
    [(0, 3, 5, True), (1, 3, 1, False), (7, 5, 33, True), (37, 16, 131, False)],
)
def test_hidden(dtype: torch.dtype, with_entropy: bool, rows: int, size: int, vocabulary: int, with_bias: bool) -> None:
    draw = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, size, generator=draw).to(dtype)
    weight = torch.randn(vocabulary + 3, size, generator=draw).to(dtype)
    bias = torch.randn(vocabulary + 3, generator=draw).to(dtype) * with_bias
    targets = torch.randint(0, vocabulary, (rows,), generator=draw)
    slopes = torch.randn(2, rows, generator=draw)
    ours, theirs = leaves(hidden, weight, bias), leaves(hidden.double(), weight.double(), bias.double())
    logp, entropy = hidden_logprobs(
        *ours[:2], targets, 0.7, bias=ours[2] if with_bias else None, num_valid=vocabulary, with_entropy=with_entropy
    )
    plain_logp, plain_entropy = logprobs_and_entropy(
        theirs[0] @ theirs[1][:vocabulary].T + theirs[2][:vocabulary], targets, 0.7
    )
    assert logp.dtype == entropy.dtype == torch.float32
    assert_near(logp, plain_logp, 5e-6)
    assert_near(entropy, plain_entropy if with_entropy else torch.zeros(rows), 5e-6)
    (logp @ slopes[0] + (entropy @ slopes[1] if with_entropy else 0)).backward()
    (plain_logp @ slopes[0].double() + (plain_entropy @ slopes[1].double() if with_entropy else 0)).backward()
    for one, other in zip(ours[: 2 + with_bias], theirs, strict=False):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.dtype == dtype
        assert_near(one.grad, other.grad, 1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(5)
    logits = (5 * torch.randn(203, 19, generator=draw)).to(dtype).T
    logits[3, 5:100] = -torch.inf
    logits[4, :200] = -torch.inf
    targets = torch.full((19,), 201)
    (ours,), (theirs,) = leaves(logits), leaves(logits.double())
    logp, entropy = logits_logprobs(ours, targets, 1.3)
    plain_logp, plain_entropy = logprobs_and_entropy(theirs, targets, 1.3)
    assert_near(logp, plain_logp, 5e-6)
    assert_near(entropy, plain_entropy, 5e-6)
    (logp.sum() + 0.5 * entropy.sum()).backward()
    (plain_logp.sum() + 0.5 * plain_entropy.sum()).backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert_near(ours.grad, theirs.grad.nan_to_num(), 1e-5 if dtype == torch.float32 else 0.01)
