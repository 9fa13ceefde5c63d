"""Asynchronous against synchronous: the same work on the same ranks, eta = 4 against eta = 0.

One rollout rank and one trainer rank, one thread each; completions have long-tailed lengths that are the same in both
runs. With eta 0 the trainer waits for the longest completion of its batch, and rollout waits for the trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from bench_result import report  # noqa: E402
from tiny_model import write_sums, write_tiny_model  # noqa: E402

TARGET = 1.6
BATCH, SAMPLES = 8, 4
ETA = 4


def long_tailed(count: int, longest: int) -> list[int]:
    """Lognormal lengths, cut at `longest`: most are short, a few are ten times the median."""
    rng = np.random.Generator(np.random.Philox(7))
    return np.clip(rng.lognormal(3.0, 1.1, count), 4, longest).astype(int).tolist()


def run_once(folder: Path, eta: int, steps: int, lengths: list[int], name: str) -> dict[str, float]:
    """One run; gives its seconds of steps and the tokens that it trained on."""
    overrides = [
        f"experiment_name=speedup trial_name={name} allocation=hf:d1+fsdp:d1 total_train_steps={steps}",
        f"cluster.fileroot={folder} cluster.device=cpu cluster.threads_per_rank=1",
        f"train_dataset.type=jsonl train_dataset.path={folder / 'sums.jsonl'} train_dataset.batch_size={BATCH}",
        f"gconfig.n_samples={SAMPLES} gconfig.max_new_tokens={max(lengths)}",
        f"rollout.max_head_offpolicyness={eta} rollout.max_slots=128",
        "workflow.name=long_tail_workflow:LongTailWorkflow reward.name=gsm8k",
        f"actor.path={folder / 'model'} actor.dtype=float32 actor.mb_spec.max_tokens_per_mb=2048",
        "actor.optimizer.lr=1e-4 saver.at_end=false stats_logger.progress=off stats_logger.tensorboard=false",
    ]
    config = folder / f"{name}.yaml"
    config.write_text(f"workflow:\n  args: {{lengths: {json.dumps(lengths)}}}\n")
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run(
        [sys.executable, "-m", "pekoe.launch.cli", "run", str(config), *" ".join(overrides).split()],
        check=True, env=environment, timeout=900, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    lines = [json.loads(x) for x in (folder / "speedup" / name / "metrics" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "time/step" in line]
    assert len(lines) == steps, f"{len(lines)} of {steps} steps"
    return {
        "seconds": sum(line["time/step"] for line in lines),
        "tokens": sum(line["train/tokens"] for line in lines),
        "train_seconds": sum(line["time/train"] for line in lines),
        "staleness": max(line["staleness/max"] for line in lines),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one pair of short runs")
    args = parser.parse_args()
    steps, pairs = (8, 1) if args.quick else (20, 3)
    lengths = long_tailed(steps * BATCH, 240)
    ratios, sync, fast = [], {}, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "model", layers=4, hidden=128, positions=256)
        write_sums(folder / "sums.jsonl", steps * BATCH)
        for pair in range(pairs):
            sync = run_once(folder, 0, steps, lengths, f"sync-{pair}")
            fast = run_once(folder, ETA, steps, lengths, f"async-{pair}")
            assert sync["tokens"] == fast["tokens"], "the two did not do the same work"
            ratios.append(sync["seconds"] / fast["seconds"])
            print(f"pair {pair}: eta=0 {sync['seconds']:.1f} s, eta={ETA} {fast['seconds']:.1f} s", flush=True)
    figures = {
        "speedup": round(statistics.median(ratios), 3),
        "speedups": [round(ratio, 3) for ratio in ratios],
        "seconds_sync": round(sync["seconds"], 2),
        "seconds_async": round(fast["seconds"], 2),
        "train_share_sync": round(sync["train_seconds"] / sync["seconds"], 3),
        "train_share_async": round(fast["train_seconds"] / fast["seconds"], 3),
        "tokens": sync["tokens"],
        "staleness_max": fast["staleness"],
    }
    targets = {"speedup": (f">= {TARGET}", lambda value: value >= TARGET)}
    return 0 if report("async_speedup", figures, targets) else 1


if __name__ == "__main__":
    sys.exit(main())
