"""Tokens a second of the engines `hf` and `vllm` against transformers' own `generate`: SmolLM2, the same prompts.

32 prompts, 4 completions of 64 tokens each, sampled at temperature 1; the engines also record log-probs. Each side
lives in a process of its own with the same number of threads; rounds alternate between them, and a figure is the ratio
of medians. `long_tail_*`: lognormal lengths; `generate` computes every batch to its longest completion. A figure counts
only when the engine's log-probs are those of the plain model. In the environment with vLLM all sides are measured, in
the other one `hf` alone.

    python scripts/bench/generation.py [--quick] [--dtypes float32,bfloat16] [--rounds N] [--threads N]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench_result import report
from smollm2_material import MODEL, find_model, prompts

HERE = Path(__file__).resolve().parent
TARGET = 1.3
GAP_LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean |log-prob(engine) - log-prob(plain model)|: bfloat16 rounds in another order."""


class Side:
    """The other end of `generation_side.py`."""

    def __init__(self, name: str, model: Path, dtype: str, threads: int) -> None:
        self.name = name
        command = [sys.executable, str(HERE / "generation_side.py"), name, str(model), dtype, str(threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.answer() == "ready"

    def ask(self, **order: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the side {self.name} has ended with {self.process.wait()}; its output is above")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


@contextmanager
def sides(names: list[str], model: Path, dtype: str, threads: int) -> Iterator[dict[str, Side]]:
    opened: dict[str, Side] = {}
    try:
        for name in names:
            opened[name] = Side(name, model, dtype, threads)
        yield opened
    finally:
        for side in opened.values():
            side.close()


@dataclass(frozen=True)
class Speed:
    """Medians of one side's rounds."""

    tokens_per_second: float
    tokens_per_cpu_second: float
    """What the machine's other work disturbs least."""


def compare(opened: dict[str, Side], ids: list[list[int]], lengths: list[list[int]], rounds: int) -> dict[str, Speed]:
    """The speed of each side; the rounds alternate between them."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in opened}
    for _ in range(rounds):
        for name, side in opened.items():
            found[name].append(side.ask(do="run", prompts=ids, lengths=lengths))
    return {
        name: Speed(
            statistics.median(one["tokens"] / one["seconds"] for one in all_rounds),
            statistics.median(one["tokens"] / one["cpu_seconds"] for one in all_rounds),
        )
        for name, all_rounds in found.items()
    }


def gap(opened: dict[str, Side], name: str, ids: list[list[int]], num_samples: int) -> float:
    """Warms the side up, and gives the mean gap of its log-probs to the plain model's."""
    rows = opened[name].ask(do="run", prompts=ids, lengths=[[24] * num_samples] * len(ids))["rows"]
    return float(opened["generate"].ask(do="score", rows=rows))


def long_tail(count: int, num_samples: int, longest: int) -> list[list[int]]:
    tail = np.random.default_rng(2).lognormal(3.3, 1.0, (count, num_samples)).clip(4, longest)
    return [[int(x) for x in row] for row in tail]


def measure(options: argparse.Namespace, dtype: str, names: list[str]) -> dict[str, float]:
    model = find_model(options.model)
    ids = prompts(model, 32)
    figures: dict[str, float] = {}
    with sides(["generate", *names], model, dtype, options.threads) as opened:
        opened["generate"].ask(do="run", prompts=ids[:4], lengths=[[8] * 4] * 4)
        for name in names:
            found = gap(opened, name, ids[:4], 4)
            figures[f"{name}_logprob_gap"] = round(found, 6)
            if not found <= GAP_LIMITS[dtype]:
                sys.exit(f"{dtype} {name}: log-probs differ by {found} on average; at most {GAP_LIMITS[dtype]}")
        count, samples, tokens = (16, 4, 24) if options.quick else (32, 4, 64)
        kinds = [("", [[tokens] * samples] * count, options.rounds)]
        if not options.quick:
            kinds.append(("long_tail_", long_tail(count, samples, 192), 1))
        for kind, lengths, rounds in kinds:
            speeds = compare(opened, ids[:count], lengths, rounds)
            for name, speed in speeds.items():
                figures[f"{kind}{name}_tokens_per_second"] = round(speed.tokens_per_second, 1)
                figures[f"{kind}{name}_tokens_per_cpu_second"] = round(speed.tokens_per_cpu_second, 1)
                if name != "generate":
                    ratio = speed.tokens_per_second / speeds["generate"].tokens_per_second
                    figures[f"{kind}{name}_over_generate"] = round(ratio, 3)
            print(f"{dtype:9s} {kind or 'equal_'}lengths: {figures}", flush=True)
    return figures


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one dtype, one short round, under a minute")
    parser.add_argument("--dtypes", default="", help="default: float32,bfloat16; with --quick float32")
    parser.add_argument("--rounds", type=int, default=0, help="default: 3; with --quick 1")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engines", default="", help="default: hf, and vllm where it is installed")
    parser.add_argument("--model", type=Path, default=MODEL)
    options = parser.parse_args()
    options.dtypes = options.dtypes or ("float32" if options.quick else "float32,bfloat16")
    options.rounds = options.rounds or (1 if options.quick else 3)
    has_vllm = importlib.util.find_spec("vllm") is not None
    options.engines = options.engines or ("hf,vllm" if has_vllm else "hf")
    return options


def main() -> int:
    options = arguments()
    names = options.engines.split(",")
    figures: dict[str, Any] = {"threads": options.threads}
    for dtype in options.dtypes.split(","):
        figures[dtype] = measure(options, dtype, names)
    found = [figures[dtype] for dtype in options.dtypes.split(",")]
    for name in names:
        figures[f"{name}_over_generate"] = min(one[f"{name}_over_generate"] for one in found)
    targets = {"hf_over_generate": (f">= {TARGET}", lambda ratio: ratio >= TARGET)} if "hf" in names else {}
    return 0 if report("generation", figures, targets) else 1


if __name__ == "__main__":
    sys.exit(main())
