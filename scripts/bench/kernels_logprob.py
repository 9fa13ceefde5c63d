"""Log-probs and entropies from hidden states and the last layer's weight, against the bare matrix product and against
log_softmax of every logit; their memory, in a process of its own; their errors against float64."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from in_turns import check, seconds_in_turns
from logprob_peak import naive
from torch import Tensor

from pekoe.kernels.logprob.logprob import hidden_logprobs
from pekoe.pipeline.algorithm.objectives.ppo import clipped_loss

PEAK = Path(__file__).with_name("logprob_peak.py")


def logprob_figures(quick: bool) -> dict[str, Any]:
    """Hidden size and vocabulary are those of SmolLM2-135M; unless quick, of Qwen3-0.6B, too, also for memory."""
    small, large = (576, 49_152), (1024, 151_936)
    figures: dict[str, Any] = errors(small[0], 4 * small[0])
    figures |= speeds(256, *small, 3 if quick else 7)
    figures["logprob_loss_share"] = loss_share(256, *small, 3)
    if not quick:
        figures |= {f"{name}_qwen3": value for name, value in speeds(256, *large, 3).items()}
    return figures | (memory(1024, *small) if quick else memory(4096, *large))


def material(tokens: int, hidden_size: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with a standard deviation of 2: a policy that is fairly sure."""
    torch.manual_seed(0)
    weight = torch.randn(vocabulary, hidden_size) * (2 / hidden_size**0.5)
    return torch.randn(tokens, hidden_size), weight, torch.randint(0, vocabulary, (tokens,))


def errors(hidden_size: int, vocabulary: int) -> dict[str, float]:
    """Against the same in float64: of log-probs and entropies the largest, of gradients relative to the largest."""
    hidden, weight, targets = material(193, hidden_size, vocabulary)
    slopes = torch.randn(2, len(targets))

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        leaves = [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        function = naive if dtype == torch.float64 else hidden_logprobs
        found = function(*leaves, targets)
        wide = slopes.to(dtype)
        slope = torch.autograd.grad((found[0] * wide[0] + found[1] * wide[1]).sum(), leaves)
        return [*(one.detach() for one in found), *slope]

    exact, ours = gradients(torch.float64), gradients(torch.float32)
    off = [float((a.double() - b).abs().max()) for a, b in zip(ours, exact, strict=True)]
    slope = max(error / float(b.abs().max()) for error, b in zip(off[2:], exact[2:], strict=True))
    check(max(off[:2]) < 1e-4 and slope < 1e-4, f"log-probs or gradients are off by {off}")
    return {"logprob_error": max(off[:2]), "logprob_gradient_error": slope}


@torch.no_grad()
def speeds(tokens: int, hidden_size: int, vocabulary: int, rounds: int) -> dict[str, float]:
    hidden, weight, targets = material(tokens, hidden_size, vocabulary)
    expected, found = naive(hidden, weight, targets), hidden_logprobs(hidden, weight, targets)
    gap = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    check(gap < 1e-3, f"log-probs differ by {gap} from those of every logit")
    half_hidden, half_weight = hidden.bfloat16(), weight.bfloat16()
    seconds = seconds_in_turns(
        {
            "gemm": lambda: hidden @ weight.T,
            "ours": lambda: hidden_logprobs(hidden, weight, targets),
            "naive": lambda: naive(hidden, weight, targets),
            "half_gemm": lambda: half_hidden @ half_weight.T,
            "half": lambda: hidden_logprobs(half_hidden, half_weight, targets),
            "half_naive": lambda: naive(half_hidden, half_weight, targets),
        },
        rounds,
    )
    return {
        "logprob_over_gemm": seconds["ours"] / seconds["gemm"],
        "logprob_over_naive": seconds["naive"] / seconds["ours"],
        "logprob_ms": seconds["ours"] * 1e3,
        "logprob_bfloat16_over_gemm": seconds["half"] / seconds["half_gemm"],
        "logprob_bfloat16_over_naive": seconds["half_naive"] / seconds["half"],
    }


def loss_share(tokens: int, hidden_size: int, vocabulary: int, rounds: int) -> float:
    """What PPO's clipped loss on the log-probs [K] costs beside them, forward and backward: the most that a form with
    the loss inside could save."""
    hidden, weight, targets = material(tokens, hidden_size, vocabulary)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    old, advantages = hidden_logprobs(*leaves, targets)[0].detach(), torch.randn(tokens)

    def loss(logprobs: Tensor) -> Tensor:
        return clipped_loss((logprobs - old).exp(), advantages, 0.2, 0.28, 3.0).values.sum() / tokens

    def logprobs_alone() -> None:
        torch.autograd.grad(hidden_logprobs(*leaves, targets)[0].sum(), leaves)

    given = old.clone().requires_grad_()
    seconds = seconds_in_turns(
        {"logprobs": logprobs_alone, "loss": lambda: torch.autograd.grad(loss(given), given)}, rounds
    )
    return seconds["loss"] / seconds["logprobs"]


def memory(tokens: int, hidden_size: int, vocabulary: int) -> dict[str, float]:
    """MiB; of the naive way on a quarter of the tokens."""

    def peak(count: int, function: str) -> dict[str, float]:
        command = [sys.executable, str(PEAK), str(count), str(hidden_size), str(vocabulary), function]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
        found: dict[str, float] = json.loads(done.stdout)
        return found

    ours, other = peak(tokens, "ours"), peak(tokens // 4, "naive")
    return {
        "logprob_extra_mib": ours["forward"],
        "logprob_backward_extra_mib": ours["backward"],
        "logprob_extra_mib_naive": 4 * other["forward"],
        "logprob_backward_extra_mib_naive": 4 * other["backward"],
        "logprob_memory_tokens": tokens,
    }
