"""How long worlds of 2, 4, 8 and 16 ranks take from the start command until every rank has joined, and where it goes.

    python scripts/bench/startup.py [--quick]

Each rank runs the real launch code (`startup_rank.py`: supervisor, World.join, World.finalize) and does nothing else.
The baseline, measured in turn with it, is the same number of ranks that only import MPI. Started by the embedded
mpiexec, and over the nodes of a Slurm cluster by `srun --mpi=pmi2` where `sinfo` finds one. Phases are those of the
slowest rank. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench_result import report

HERE = Path(__file__).resolve().parent
SIZES = (2, 4, 8, 16)
BARE = ("-c", "from mpi4py import MPI")
PHASES = ("interpreter", "supervisor", "imports", "mpi_init", "forming")
SLOWER = 3.0
"""A world may take so many times what its ranks take to import MPI, formed and left again."""
LIMIT_SECONDS = 120
Start = Callable[[int, Sequence[str]], list[str]]
"""(number of ranks, arguments of python) -> command line."""


def by_mpiexec(num_ranks: int, program: Sequence[str]) -> list[str]:
    from pekoe.launch.local import find_mpiexec, mpiexec_arguments

    return mpiexec_arguments(find_mpiexec(), num_ranks, program)


def by_srun(num_nodes: int) -> Start:
    def command(num_ranks: int, program: Sequence[str]) -> list[str]:
        nodes = min(num_nodes, num_ranks)
        return [
            "srun", f"--nodes={nodes}", f"--ntasks={num_ranks}", f"--ntasks-per-node={-(-num_ranks // nodes)}",
            "--mpi=pmi2", sys.executable, "-u", *program,
        ]  # fmt: skip

    return command


def nodes_of_slurm() -> int:
    """Idle nodes of a cluster that answers; 0 where there is none."""
    try:
        found = subprocess.run(
            ["sinfo", "-h", "-t", "idle", "-o", "%D"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(int(word) for word in found.stdout.split())


def measure(start: Start, num_ranks: int) -> dict[str, float]:
    """Seconds of one world, and of its baseline right after it."""
    with tempfile.TemporaryDirectory() as name:
        began = time.time()
        run(start(num_ranks, [str(HERE / "startup_rank.py"), name]))
        ended = time.time()
        ranks = [json.loads(path.read_text()) for path in Path(name).glob("rank-*.json")]
    assert len(ranks) == num_ranks, f"{len(ranks)} of {num_ranks} ranks have joined"
    joined = max(rank["joined"] for rank in ranks)
    seconds = {
        "joined": joined - began, "left": ended - joined, "whole": ended - began,
        "spawned": max(rank["began"] for rank in ranks) - began,
        **{phase: max(rank[phase] for rank in ranks) for phase in PHASES},
    }  # fmt: skip
    began = time.time()
    run(start(num_ranks, BARE))
    return {**seconds, "bare": time.time() - began}


def run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, timeout=LIMIT_SECONDS, stdin=subprocess.DEVNULL)


def measure_all(start: Start, how: str, sizes: Sequence[int], rounds: int) -> dict[str, float]:
    """Medians over the rounds, by `<how>_<size>_<what>`."""
    figures: dict[str, float] = {}
    for size in sizes:
        found = [measure(start, size) for _ in range(rounds)]
        median = {what: statistics.median(one[what] for one in found) for what in found[0]}
        median["ratio"] = statistics.median(one["whole"] / one["bare"] for one in found)
        figures |= {f"{how}_{size}_{what}": round(value, 3) for what, value in median.items()}
        phases = ", ".join(f"{phase} {median[phase]:.2f}" for phase in ("spawned", *PHASES))
        print(
            f"{how}, {size} ranks: joined after {median['joined']:.2f} s ({phases}), gone {median['left']:.2f} s "
            f"later; only import MPI: {median['bare']:.2f} s", flush=True,
        )  # fmt: skip
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    rounds = 1 if parser.parse_args().quick else 5
    run(by_mpiexec(2, BARE))
    figures = measure_all(by_mpiexec, "mpiexec", SIZES, rounds)
    num_nodes = nodes_of_slurm()
    if num_nodes:
        figures |= measure_all(by_srun(num_nodes), "srun", SIZES, rounds)
    figures |= {"ratio": max(value for name, value in figures.items() if name.endswith("_ratio"))}
    return 0 if report("startup", figures, {"ratio": (f"<= {SLOWER}", lambda value: value <= SLOWER)}) else 1


if __name__ == "__main__":
    sys.exit(main())
