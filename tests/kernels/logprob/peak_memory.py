"""What log-probs need beside arguments and results at their peak, in MiB, one line: forward, backward.

usage: peak_memory.py K H V DTYPE
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from pekoe.kernels.logprob.logprob import hidden_logprobs

MIB = 1 << 20


def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:"))) / 1024


def measured(work):
    """MiB over what was resident before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    kept = work()
    del kept
    return resident("VmHWM") - before


def main(num_rows, size, num_columns, dtype):
    torch.set_num_threads(1)
    hidden = torch.randn(num_rows, size).to(dtype).requires_grad_()
    weight = torch.randn(num_columns, size).to(dtype).requires_grad_()
    targets = torch.randint(0, num_columns, (num_rows,))
    small = [tensor.detach()[:2].clone().requires_grad_() for tensor in (hidden, weight)]
    sum(hidden_logprobs(*small, torch.zeros(2).long())).sum().backward()
    with torch.no_grad():
        forward = measured(lambda: hidden_logprobs(hidden, weight, targets))
    logprobs, entropy = hidden_logprobs(hidden, weight, targets)
    loss = (logprobs + 0.01 * entropy).sum()
    backward = measured(lambda: torch.autograd.grad(loss, (hidden, weight)))
    grad_weight = weight.numel() * weight.element_size() / MIB
    print(forward, backward - grad_weight)


if __name__ == "__main__":
    main(*(int(text) for text in sys.argv[1:4]), getattr(torch, sys.argv[4]))
