"""How much memory log-probs take, in a process of its own: `logprob_peak.py TOKENS HIDDEN VOCABULARY {naive,ours}`.

Peak of the resident memory over what was there before the call, in MiB, for a forward pass without gradient and for
forward and backward. Of the latter the gradients of weight and hidden states are reported apart: they are results. A
call on a few tokens comes before, so that libraries and their buffers are there; the kernel's own counter of the peak
is reset before each measurement (Linux).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pekoe.kernels.logprob.logprob import hidden_logprobs

MIB = 1 << 20


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Every logit, and its log-softmax."""
    logits = hidden @ weight.T
    logp = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(dim=-1)


def memory_of(work: Callable[[], object]) -> float:
    """MiB that `work` needed at its peak; what it gives is kept until then."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    kept = work()
    peak = resident("VmHWM") - before
    del kept
    return peak / 1024


def resident(name: str) -> int:
    """KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def main() -> None:
    tokens, hidden_size, vocabulary = (int(number) for number in sys.argv[1:4])
    function = naive if sys.argv[4] == "naive" else hidden_logprobs
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size).requires_grad_()
    weight = (torch.randn(vocabulary, hidden_size) / hidden_size**0.5).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))

    def forward() -> object:
        with torch.no_grad():
            return function(hidden, weight, targets)

    def both() -> object:
        logprobs, entropy = function(hidden, weight, targets)
        return torch.autograd.grad((logprobs + 0.01 * entropy).sum(), (hidden, weight))

    function(hidden[:2].detach(), weight.detach(), targets[:2])
    gradients = (hidden.numel() + weight.numel()) * 4 / MIB
    found = {"forward": memory_of(forward), "backward": memory_of(both) - gradients, "gradients": gradients}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
