"""Asynchronous against synchronous: the same work on the same ranks, eta = 4 against eta = 0.

One rollout rank and one trainer rank, one thread each; completions have long-tailed lengths that are the same in both
runs. With eta 0 the trainer waits for the longest completion of its batch, and rollout waits for the trainer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from bench_result import report  # noqa: E402
from long_tail_runs import Work, long_tailed, run_once, total  # noqa: E402
from tiny_model import write_sums, write_tiny_model  # noqa: E402

TARGET = 1.6
BATCH = 8
ETA = 4


def measure(work: Work, eta: int, name: str) -> dict[str, float]:
    """One run; gives its seconds of steps and the tokens that it trained on."""
    steps = run_once(work, name, [f"rollout.max_head_offpolicyness={eta}"])
    return {
        "seconds": total(steps, "time/step"),
        "tokens": total(steps, "train/tokens"),
        "train_seconds": total(steps, "time/train"),
        "staleness": max(step["staleness/max"] for step in steps),
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
        model = write_tiny_model(folder / "model", layers=4, hidden=128, positions=256)
        data = write_sums(folder / "sums.jsonl", steps * BATCH)
        work = Work(folder, model, data, lengths, steps, BATCH, "speedup")
        for pair in range(pairs):
            sync = measure(work, 0, f"sync-{pair}")
            fast = measure(work, ETA, f"async-{pair}")
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
