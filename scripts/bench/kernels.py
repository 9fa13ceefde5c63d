"""Every kernel against named baselines in the same run, on one thread: plans, packed tokens, log-probs, attention.

    python scripts/bench/kernels.py [--quick] [--rooms packing,tokens,sharing,attention,logprob] [--smollm2]

    packing     best fit against TRL's packer (1.16.0), Karmarkar-Karp against verl's (0.9.1), equal counts, joint plan
    tokens      GAE against a copy of as many bytes, a Python loop, verl's padded loop; pack and unpack against masks
    sharing     the prefix trie; samples that share a prompt against the same ones without sharing
    attention   packed attention of the CPU against one scaled_dot_product_attention per sequence, and padded
    logprob     log-probs and entropies against the bare matrix product and log_softmax of every logit; memory

A figure `a_over_b` in times is how often ours goes into the baseline's time, but `gae_over_stream`,
`logprob_over_gemm` and `attention_over_fastest`: ours in units of what no implementation can beat. Each is measured
only after results were compared. `--smollm2` trains one micro-batch of 8,192 tokens of SmolLM2-135M in a process of its
own, and measures its memory (`smollm2_memory.py`; minutes). TRL and verl come by themselves into build/parity.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from bench_result import report

ROOMS = {
    "packing": "kernels_packing:packing_figures",
    "tokens": "kernels_tokens:token_figures",
    "sharing": "kernels_sharing:sharing_figures",
    "attention": "kernels_attention:attention_figures",
    "logprob": "kernels_logprob:logprob_figures",
    "smollm2": "smollm2_memory:memory_figures",
}
Judge = Callable[[Any], bool]


def at_least(limit: float) -> tuple[str, Judge]:
    return f">= {limit:g}", lambda figure: figure >= limit


def at_most(limit: float) -> tuple[str, Judge]:
    return f"<= {limit:g}", lambda figure: figure <= limit


TARGETS: dict[str, dict[str, tuple[str, Judge]]] = {
    "packing": {
        "bfd_over_trl": at_least(100), "bfd_bins_over_bound": at_most(1.002), "bfd_100k_ms": at_most(20),
        "kk_over_verl": at_least(500), "equal_count_imbalance": at_most(1.001), "equal_count_ms": at_most(1),
        "plan_over_budget": at_most(0), "plan_barrier_loss": at_most(0.01), "plan_ms": at_most(3),
        "plan_100k_seconds": at_most(0.3),
    },
    "tokens": {
        "gae_over_stream": at_most(3), "gae_over_python": at_least(300), "gae_over_padded": at_least(1500),
        "gae_error": at_most(1e-5), "pack_over_mask": at_least(50), "unpack_over_mask": at_least(10),
    },
    "sharing": {
        "trie_bytes_per_token": at_most(4), "sharing_flops_prompt_512": at_least(1.4),
        "sharing_flops_prompt_4096": at_least(3.1),
    },
    "attention": {"attention_over_fastest": at_most(1.05)},
    "logprob": {
        "logprob_over_gemm": at_most(1.1), "logprob_over_naive": at_least(1.4), "logprob_extra_mib": at_most(32),
        "logprob_backward_extra_mib": at_most(64), "logprob_gradient_error": at_most(1e-5),
    },
    "smollm2": {"smollm2_extra_mib": at_most(1024)},
}  # fmt: skip


def measure(rooms: list[str], quick: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for room in rooms:
        module, _, function = ROOMS[room].partition(":")
        found: Mapping[str, Any] = getattr(importlib.import_module(module), function)(quick)
        for name, value in found.items():
            figures[name] = float(f"{value:.4g}") if isinstance(value, float) else value
            print(f"{name:>36} {figures[name]}", flush=True)
    return figures


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and smaller log-probs")
    parser.add_argument("--rooms", default=",".join(room for room in ROOMS if room != "smollm2"))
    parser.add_argument("--smollm2", action="store_true", help="the memory of a micro-batch of SmolLM2, too")
    options = parser.parse_args()
    options.rooms = options.rooms.split(",") + ["smollm2"] * options.smollm2
    unknown = sorted(set(options.rooms) - set(ROOMS))
    if unknown:
        parser.error(f"--rooms: {unknown} not known; allowed: {', '.join(ROOMS)}")
    return options


def main() -> int:
    options = arguments()
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    if any(os.environ.get(name) != value for name, value in one.items()):
        # Libraries read these when they are loaded.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **one})
    figures = measure(options.rooms, options.quick)
    targets = {name: target for room in options.rooms for name, target in TARGETS[room].items()}
    missed = [f"{name} {figures[name]} ({text})" for name, (text, judge) in targets.items() if not judge(figures[name])]
    if missed:
        print(f"missed: {'; '.join(missed)}", flush=True)
    return 0 if report("kernels", figures, targets) else 1


if __name__ == "__main__":
    sys.exit(main())
