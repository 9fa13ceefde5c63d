"""The quickstart for three seeds, through the command that a user types: held-out accuracy before and after, and time.

For each seed the model is made (warm start included), trained by `pekoe run configs/quickstart.yaml`, and judged on 256
problems that were never shown. `seconds` is the wall-clock time of both. `--quick` takes one seed and fewer steps; it
checks that everything works and is not judged by the accuracy target. `--allocation vllm:d1+fsdp:d1` is the same with
vLLM, to the same accuracy, in the environment that has it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench_result import report

ROOT = Path(__file__).resolve().parents[2]
TARGET_INITIAL = 0.6
TARGET_FINAL = 0.85
TARGET_SECONDS = 600.0
QUICK_STEPS = 10


@dataclass(frozen=True)
class Outcome:
    """One seed."""

    initial_accuracy: float
    final_accuracy: float
    seconds: float


def accuracies(metrics: Path) -> list[float]:
    """`eval/accuracy` in the order of steps, the last write of each step."""
    by_step: dict[int, float] = {}
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        if "eval/accuracy" in row:
            by_step[row["step"]] = row["eval/accuracy"]
    if 0 not in by_step or len(by_step) < 2:
        sys.exit(f"{metrics}: eval/accuracy is there for steps {sorted(by_step)}; step 0 and a later one are needed")
    return [by_step[step] for step in sorted(by_step)]


def run_seed(seed: int, place: Path, overrides: list[str]) -> Outcome:
    """Makes the model of a seed and trains it; output goes to stderr, so that stdout keeps the figures."""
    model = place / f"model-{seed}"
    started = time.monotonic()
    make = [sys.executable, str(ROOT / "scripts" / "make_quickstart_model.py"), str(model), "--seed", str(seed)]
    subprocess.run(make, check=True, stdout=sys.stderr)
    command = [
        sys.executable, "-m", "pekoe.launch.cli", "run", "configs/quickstart.yaml",
        f"seed={seed}", f"cluster.fileroot={place}", f"trial_name=seed-{seed}", f"actor.path={model}",
        f"train_dataset.path={model}/train.jsonl", f"valid_dataset.path={model}/valid.jsonl",
        "stats_logger.progress=lines", *overrides,
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=sys.stderr, cwd=ROOT)
    seconds = time.monotonic() - started
    curve = accuracies(place / "quickstart" / f"seed-{seed}" / "metrics" / "metrics.jsonl")
    print(f"seed {seed}: {' '.join(f'{accuracy:.3f}' for accuracy in curve)} in {seconds:.0f} s", flush=True)
    return Outcome(curve[0], curve[-1], seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps, under a minute after warm start")
    parser.add_argument("--keep", type=Path, help="folder for models and runs; default: a temporary one")
    parser.add_argument("--allocation", default="hf:d1+fsdp:d1", help="engine and trainer")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration for every run")
    arguments = parser.parse_args()
    overrides = [f"total_train_steps={QUICK_STEPS}"] if arguments.quick else []
    overrides += [f"allocation={arguments.allocation}", *arguments.overrides]
    with tempfile.TemporaryDirectory(prefix="pekoe-bench-") as temporary:
        place = arguments.keep.resolve() if arguments.keep else Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        outcomes = [run_seed(seed, place, overrides) for seed in ((1,) if arguments.quick else (1, 2, 3))]
    figures = {
        "allocation": arguments.allocation,
        "initial_accuracy": [round(outcome.initial_accuracy, 4) for outcome in outcomes],
        "final_accuracy": [round(outcome.final_accuracy, 4) for outcome in outcomes],
        "seconds": [round(outcome.seconds, 1) for outcome in outcomes],
    }
    targets = {
        "initial_accuracy": (f"each <= {TARGET_INITIAL}", lambda values: max(values) <= TARGET_INITIAL),
        "seconds": (f"each <= {TARGET_SECONDS:.0f}", lambda values: max(values) <= TARGET_SECONDS),
    }
    if not arguments.quick:
        targets["final_accuracy"] = (f"each >= {TARGET_FINAL}", lambda values: min(values) >= TARGET_FINAL)
    sys.exit(0 if report("quickstart", figures, targets) else 1)


if __name__ == "__main__":
    main()
