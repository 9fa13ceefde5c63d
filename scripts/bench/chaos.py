"""Kills a tiny real run again and again at random instants, lets it come to its end, and counts what was lost.

Three worlds: split and colocated with eta 2, where the sets of groups must be those of an undisturbed run, and split
with eta 0 and `rollout.deterministic`, where also the sequence and the final weights must be the same, bit for bit.

    python scripts/bench/chaos.py --kills 20 [--seed 1] [--eta 0|2]
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from bench_result import report  # noqa: E402
from chaos_verdict import Verdict, fingerprint, judge, sequence  # noqa: E402
from chaos_world import EPOCH_STEPS, EXAMPLES, STEP_LIMIT, ChaosWorld, settings, torment  # noqa: E402
from tiny_model import write_sums, write_tiny_model  # noqa: E402

SEED = 5
SECONDS_A_KILL = 60.0


@dataclass(frozen=True)
class Setup:
    """One kind of world."""

    name: str
    allocation: str
    eta: int


SETUPS = (
    Setup("split", "hf:d1+fsdp:d1", 2),
    Setup("synchronous", "hf:d1+fsdp:d1", 0),
    Setup("colocated", "hf:d1|fsdp:d1", 2),
)


@dataclass
class Result:
    """A world that has come to its end."""

    world: ChaosWorld
    verdict: Verdict
    weights_equal: bool | None = None
    """Of eta 0: the exported weights and the ledger's sequence are those of an undisturbed run."""


def run_setup(root: Path, setup: Setup, kills: int, seed: int) -> Result:
    """Torments one world; at eta 0 an undisturbed run of the same settings is made first."""
    model, data = write_tiny_model(root / "model"), write_sums(root / "sums.jsonl", EXAMPLES)
    epochs = -(-(STEP_LIMIT * kills + 4) // EPOCH_STEPS)
    made = [
        ChaosWorld(
            root, name, settings(root, name, model, data, allocation=setup.allocation, eta=setup.eta, epochs=epochs),
            random.Random(f"{setup.name} {seed}"),
        )
        for name in (setup.name, f"{setup.name}-undisturbed")
    ]  # fmt: skip
    world, undisturbed = made
    torment(world, kills, 60.0 + SECONDS_A_KILL * kills)
    result = Result(world, judge(world.run, SEED, epochs, setup.eta))
    if setup.eta == 0:
        undisturbed.finish(180.0)
        result.weights_equal = fingerprint(world.run) == fingerprint(undisturbed.run)
        if sequence(world.run) != sequence(undisturbed.run):
            result.verdict.problems.append("the sequence of the ledger differs from the undisturbed run's")
    return result


def shares(kills: int, setups: Sequence[Setup]) -> list[tuple[Setup, int]]:
    """The kills, dealt out evenly."""
    dealt = [(setup, len(range(number, kills, len(setups)))) for number, setup in enumerate(setups)]
    return [(setup, count) for setup, count in dealt if count]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the instants and victims")
    parser.add_argument("--eta", type=int, choices=(0, 2), help="only the worlds with this limit of staleness")
    parser.add_argument("--quick", action="store_true", help="one kill each of a split and a synchronous world")
    args = parser.parse_args()
    setups = [setup for setup in SETUPS if args.eta in (None, setup.eta)]
    if args.quick:
        setups, args.kills = setups[:2], len(setups[:2])
    began, results = time.monotonic(), []
    for setup, kills in shares(args.kills, setups):
        with tempfile.TemporaryDirectory() as folder:
            result = run_setup(Path(folder), setup, kills, args.seed)
        results.append(result)
        for kill in result.world.kills:
            print(f"{setup.name}: {kill}", flush=True)
        print(f"{setup.name}: {result.verdict}, weights equal: {result.weights_equal}", flush=True)
    return 0 if tell(results, args.kills, time.monotonic() - began) else 1


def tell(results: Sequence[Result], kills: int, seconds: float) -> bool:
    """The figures of all worlds together."""
    verdicts = [result.verdict for result in results]
    done = [kill for result in results for kill in result.world.kills]
    equal = [result.weights_equal for result in results if result.weights_equal is not None]
    figures: dict[str, Any] = {
        "kills": len(done),
        "lost": sum(verdict.lost for verdict in verdicts),
        "trained_twice": sum(verdict.trained_twice for verdict in verdicts),
        "out_of_order": sum(verdict.out_of_order for verdict in verdicts),
        "problems": sum(len(verdict.problems) for verdict in verdicts),
        "weights_equal": int(all(equal)) if equal else None,
        "adopted": sum(verdict.adopted for verdict in verdicts),
        "issued_again": sum(verdict.issued_again for verdict in verdicts),
        "steps": sum(verdict.steps for verdict in verdicts),
        "victims": dict(Counter(kill.victim for kill in done)),
        "aims": dict(Counter(kill.aim for kill in done)),
        "slowest_end_seconds": max((kill.end_seconds for kill in done), default=0.0),
        "seconds": round(seconds, 1),
    }
    targets = {
        "kills": (f"== {kills}", lambda value: value == kills),
        **{name: ("== 0", lambda value: value == 0) for name in ("lost", "trained_twice", "out_of_order", "problems")},
    }
    if equal:
        targets["weights_equal"] = ("== 1", lambda value: value == 1)
    return report("chaos", figures, targets)


if __name__ == "__main__":
    sys.exit(main())
