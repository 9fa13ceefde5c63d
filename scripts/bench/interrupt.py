"""Interrupted against drained rollouts: trained tokens a second with `weights.update_mode` interrupt and drain.

One rollout and one trainer rank, one thread each, asynchronous, on vLLM; completions have long-tailed lengths that are
the same in both runs. With drain every update waits for the longest completion under way while the engine's rows run
empty; with interrupt sequences stop at a token and go on with the new weights, at the price of computing their keys and
values again. The first steps, in which rollout starts up, are not counted. Pairs of runs alternate their order. The
target is for vLLM and the tiny model.

    python scripts/bench/interrupt.py [--quick] [--engine hf|vllm] [--smollm2]
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
from smollm2_material import find_model, write_questions  # noqa: E402
from tiny_model import write_sums, write_tiny_model  # noqa: E402

TARGET = 1.10
ETA = 4
BATCH = 16
NOT_COUNTED = 2
MODES = ("interrupt", "drain")


def tiny_work(folder: Path, engine: str, steps: int) -> Work:
    model = write_tiny_model(folder / "model", layers=2, hidden=64, positions=1024, head_dim=32)
    data = write_sums(folder / "sums.jsonl", steps * BATCH)
    lengths = long_tailed(steps * BATCH, 900, 60.0)
    return Work(folder, model, data, lengths, steps, BATCH, "interrupt", engine, max_slots=16)


def smollm2_work(folder: Path, engine: str, steps: int) -> Work:
    data = write_questions(folder / "questions.jsonl", steps * 2)
    return Work(folder, find_model(), data, long_tailed(steps * 2, 160), steps, 2, "interrupt", engine, max_slots=16)


def measure(work: Work, mode: str, name: str) -> dict[str, float]:
    """One run; trained tokens a second, and where the time of a step went."""
    overrides = [
        f"rollout.max_head_offpolicyness={ETA}", f"weights.update_mode={mode}",
        "weights.drain_seconds=300", "weights.ready_seconds=300",
    ]  # fmt: skip
    steps = run_once(work, name, overrides)[NOT_COUNTED:]
    seconds = total(steps, "time/step")
    return {
        "tokens_per_second": total(steps, "train/tokens") / seconds,
        "step_seconds": seconds / len(steps),
        "train_share": total(steps, "time/train") / seconds,
        "wait_share": total(steps, "time/wait") / seconds,
        "update_share": total([step for step in steps if "time/update" in step], "time/update") / seconds,
        "staleness_mean": total(steps, "staleness/mean") / len(steps),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one pair of short runs")
    parser.add_argument("--engine", default="vllm", choices=("hf", "vllm"), help="hf: without a target")
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2 instead of the tiny model; without a target")
    options = parser.parse_args()
    steps, pairs = (12, 1) if options.quick else (24, 3)
    if options.smollm2:
        steps, pairs = (5, 1) if options.quick else (8, 1)
    ratios: list[float] = []
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        make = smollm2_work if options.smollm2 else tiny_work
        work = make(Path(name), options.engine, steps)
        for pair in range(pairs):
            for mode in MODES if pair % 2 == 0 else MODES[::-1]:
                found[mode] = measure(work, mode, f"{mode}-{pair}")
                print(f"pair {pair}, {mode}: {found[mode]}", flush=True)
            ratios.append(found["interrupt"]["tokens_per_second"] / found["drain"]["tokens_per_second"])
    figures = {
        "interrupt_over_drain": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        **{mode: {key: round(value, 3) for key, value in found[mode].items()} for mode in MODES},
        "engine": options.engine,
        "model": "SmolLM2-135M" if options.smollm2 else "tiny",
        "eta": ETA,
        "steps_counted": steps - NOT_COUNTED,
    }
    has_target = options.engine == "vllm" and not options.smollm2
    targets = {} if not has_target else {"interrupt_over_drain": (f">= {TARGET}", lambda ratio: ratio >= TARGET)}
    return 0 if report("interrupt", figures, targets) else 1


if __name__ == "__main__":
    sys.exit(main())
