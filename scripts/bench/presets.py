"""Every preset of configs/algorithm on the quickstart's task, synchronous (eta 0) and asynchronous (eta 4).

    python scripts/bench/presets.py [--quick] [--presets grpo,ppo,…] [--etas 0,4] [--seeds 1] [--steps 60] [key=value …]

Each line is `configs/quickstart.yaml` with `algorithm=NAME` over it, at one learning rate for all: a check that each
one learns, not a ranking. The training step is that of a run, the lag is exact (`staleness_trainer.py`). `final` is the
mean of the last three held-out accuracies, `area` the mean height of the learning curve. With --pipeline each run is a
whole `pekoe run` in an MPI world instead, whose lag is at most eta and is what timing makes of it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from bench_result import report
from staleness import LEARNING_RATE, make_model, run_config, whole_run
from staleness_trainer import Curve, Task, one_rank, train

from pekoe.pipeline.config.load import preset_names, read_preset

QUICK = ("grpo", "ppo")
STEPS, EVAL_EVERY = 60, 5
LEAST_GAIN = 0.2
"""What every preset must gain over the start, synchronous and asynchronous: far above the noise of 256 problems."""
COMPANION_SETTINGS = {
    "critic": ("critic.dtype=float32", "critic.optimizer.lr=1e-3"),
    "ref": ("ref.dtype=float32",),
}
"""For the tiny model, where a preset has one."""


def settings_of(preset: str) -> list[str]:
    """Overrides that make it a run on the task."""
    sections = read_preset(preset)
    companions = [
        setting
        for section, settings in COMPANION_SETTINGS.items() if sections.get(section) is not None
        for setting in settings
    ]  # fmt: skip
    return [f"algorithm={preset}", *companions]


def by_lag(preset: str, eta: str, model: Path, task: Task, seed: int, options: argparse.Namespace) -> Curve:
    config = run_config(model, seed, options.lr, [*settings_of(preset), *options.overrides])
    return train(config, float(eta), options.steps, task, EVAL_EVERY)


def by_whole_run(preset: str, eta: str, model: Path, place: Path, seed: int, options: argparse.Namespace) -> Curve:
    began = time.monotonic()
    settings = [*settings_of(preset), f"seed={seed}", f"rollout.max_head_offpolicyness={eta}", *options.overrides]
    found = whole_run(model, place, f"{preset}-eta{eta}-{seed}", options.steps, options.lr, settings)
    accuracy = [float(value) for value in found["accuracy"]]
    steps = np.linspace(0, options.steps, len(accuracy)).round().astype(int).tolist()
    return Curve(steps, accuracy, seconds=time.monotonic() - began)


def print_table(curves: dict[tuple[str, str], Sequence[Curve]], presets: Sequence[str], etas: Sequence[str]) -> None:
    heads = [f"{what} eta {eta}" for what in ("final", "area") for eta in etas]
    print(f"\n{'preset':<20}" + "".join(f"{head:>14}" for head in heads))
    for preset in presets:
        cells = [np.mean([getattr(c, what) for c in curves[preset, eta]]) for what in ("final", "area") for eta in etas]
        print(f"{preset:<20}" + "".join(f"{cell:>14.3f}" for cell in cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two presets, a few steps; not judged by what they gain")
    parser.add_argument("--presets", type=lambda text: text.split(","), default=preset_names())
    parser.add_argument("--etas", type=lambda text: text.split(","), default=["0", "4"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lr", type=float, default=LEARNING_RATE)
    parser.add_argument("--pipeline", action="store_true", help="whole runs")
    parser.add_argument("--folder", type=Path, help="where models (and whole runs) are kept; default: a temporary one")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration for every run")
    options = parser.parse_args()
    if options.quick:
        options.presets, options.steps = list(QUICK), 5
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    curves: dict[tuple[str, str], list[Curve]] = {}
    with tempfile.TemporaryDirectory(prefix="pekoe-bench-") as temporary, one_rank():
        place = (options.folder or Path(temporary)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        runs = Path(tempfile.mkdtemp(prefix="runs-", dir=place))
        for seed in range(1, options.seeds + 1):
            model = make_model(place, seed)
            task = Task(model)
            for preset in options.presets:
                for eta in options.etas:
                    if options.pipeline:
                        curve = by_whole_run(preset, eta, model, runs, seed, options)
                    else:
                        curve = by_lag(preset, eta, model, task, seed, options)
                    curves.setdefault((preset, eta), []).append(curve)
                    heights = " ".join(f"{accuracy:.2f}" for accuracy in curve.accuracy)
                    print(f"seed {seed} {preset:>18} eta {eta}: {heights}  {curve.seconds:.0f} s", flush=True)
    print_table(curves, options.presets, options.etas)
    gains = [curve.final - curve.accuracy[0] for many in curves.values() for curve in many]
    figures = {
        "by": "whole runs" if options.pipeline else "exact lag",
        "steps": options.steps,
        "lr": options.lr,
        "seeds": options.seeds,
        "final": {
            preset: {eta: round(float(np.mean([c.final for c in curves[preset, eta]])), 4) for eta in options.etas}
            for preset in options.presets
        },
        "least_gain": round(min(gains), 4),
    }
    targets = {} if options.quick else {"least_gain": (f">= {LEAST_GAIN}", lambda gain: gain >= LEAST_GAIN)}
    return 0 if report("presets", figures, targets) else 1


if __name__ == "__main__":
    sys.exit(main())
