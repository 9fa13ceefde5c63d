"""A vocabulary that is cut over real ranks gives what the whole one gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sharded_rank import SHAPE, TEMPERATURE, case

from pekoe.kernels.logprob.reference import logprobs_and_entropy

pytestmark = pytest.mark.kernels
PROGRAM = Path(__file__).with_name("sharded_rank.py")


def whole(dtype, with_entropy):
    """Log-probs, entropies, gradients of hidden states, weight and bias, in float64."""
    hidden, weight, bias, targets, g, h = case(dtype)
    leaves = [tensor.double().requires_grad_() for tensor in (hidden, weight, bias)]
    logprobs, entropy = logprobs_and_entropy(leaves[0] @ leaves[1].T + leaves[2], targets, TEMPERATURE)
    loss = logprobs @ g.double() + (entropy @ h.double() if with_entropy else 0)
    return [logprobs.detach(), entropy.detach() * with_entropy, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("bounds", [[0, 300, 517], [0, 64, 64, 517]], ids=["two", "three-one-empty"])
def test_ranks_together_give_what_one_gives(tmp_path, bounds):
    size, text = len(bounds) - 1, ",".join(map(str, bounds))
    outs = [tmp_path / f"{rank}.pt" for rank in range(size)]
    ranks = [
        subprocess.Popen([sys.executable, str(PROGRAM), str(tmp_path / "store"), str(rank), text, str(outs[rank])])
        for rank in range(size)
    ]
    try:
        assert [rank.wait(timeout=100) for rank in ranks] == [0] * size
    finally:
        for rank in ranks:
            rank.kill()
    saved = [torch.load(out) for out in outs]
    assert len(saved[0]["found"]) == 6
    for key in saved[0]["found"]:
        dtype, with_entropy = getattr(torch, key.partition("-")[0]), key.endswith("True")
        limit = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 4e-3}[dtype]
        found = [one["found"][key] for one in saved]
        for others in found[1:]:
            assert all(torch.equal(one, two) for one, two in zip(found[0][:3], others[:3], strict=True))
        together = [*found[0][:3], *(torch.cat([one[place] for one in found]) for place in (3, 4))]
        for one, two in zip(together, whole(dtype, with_entropy), strict=True):
            assert one.shape == two.shape
            assert float((one.double() - two).norm()) <= limit * float(two.norm())
    assert [one["refusal"] for one in saved] == [f"targets[7]: {SHAPE[2]} is not allowed; one rank must have it"] * size
