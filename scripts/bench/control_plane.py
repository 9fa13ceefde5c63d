"""Notices per second that one head takes from a thousand virtual rollout ranks, admission and batches included.

    python scripts/bench/control_plane.py [--quick] [--senders N]

The head is the real one (see `control_plane_world.py`); its ranks are played by at most four processes. Measured with
full shards of eight groups, as on big worlds, and with a shard for each group. The baseline, in the same world, is a
post office loop that only receives the same messages. At each admission the bound of `pipeline/control/admission.py` is
checked against groups counted in the table. Meanwhile the leaders of 125 virtual nodes tell of their ranks. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench_result import report

HERE = Path(__file__).resolve().parent
TARGET = 5000.0
NUM_VIRTUAL, ETA = 1000, 2
OLDEST_HEARTBEAT = 8.0
"""Seconds: four intervals."""
GROWTH_MIB = 32.0
MAX_SENDERS = 4


def measure(num_senders: int, seconds: float, shard_groups: int, bare_notices: int) -> dict[str, Any]:
    """One world; what its head measured."""
    from pekoe.launch.local import find_mpiexec, mpiexec_arguments

    settings = {
        "num_virtual": NUM_VIRTUAL, "eta": ETA, "seconds": seconds, "shard_groups": shard_groups,
        "bare_notices": bare_notices,
    }  # fmt: skip
    program = [str(HERE / "control_plane_world.py"), json.dumps(settings)]
    command = mpiexec_arguments(find_mpiexec(), 1 + num_senders, program)
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    found["per_second"] = found["notices"] / found["seconds"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--senders", type=int, default=2, choices=range(1, MAX_SENDERS + 1))
    arguments = parser.parse_args()
    seconds, bare_notices = (6.0, 20_000) if arguments.quick else (30.0, 100_000)
    modes = {"full_shards": 8, "single_groups": 1}
    found = {name: measure(arguments.senders, seconds, size, bare_notices) for name, size in modes.items()}
    for name, one in found.items():
        print(
            f"{name}: {one['per_second']:.0f} notices/s ({one['notices'] / one['cpu_seconds']:.0f} a second of the "
            f"head's CPU), {one['steps']} batches; only received: {one['bare_per_second']:.0f}/s", flush=True,
        )  # fmt: skip
    figures = {
        "notices_per_second": round(min(one["per_second"] for one in found.values()), 1),
        **{f"notices_per_second_{name}": round(one["per_second"], 1) for name, one in found.items()},
        **{f"received_only_per_second_{name}": round(one["bare_per_second"], 1) for name, one in found.items()},
        "ratio": round(min(one["per_second"] / one["bare_per_second"] for one in found.values()), 3),
        "notices_per_cpu_second": round(min(one["notices"] / one["cpu_seconds"] for one in found.values()), 1),
        "admissions": sum(one["admissions"] for one in found.values()),
        "admissions_above_bound": sum(one["violations"] for one in found.values()),
        "highest_share_of_bound": max(one["highest_share"] for one in found.values()),
        "staleness_max": max(one["staleness"] for one in found.values()),
        "ranks_heard": min(one["ranks_heard"] for one in found.values()),
        "oldest_heartbeat_seconds": round(max(one["oldest_heartbeat_seconds"] for one in found.values()), 2),
        "longest_inbox": max(one["longest_inbox"] for one in found.values()),
        "head_mib": round(max(one["rss_bytes"] for one in found.values()) / 2**20, 1),
        "head_growth_mib": round(max(one["rss_growth_bytes"] for one in found.values()) / 2**20, 1),
        "senders": arguments.senders,
    }
    targets = {
        "notices_per_second": (f">= {TARGET}", lambda rate: rate >= TARGET),
        "admissions_above_bound": ("== 0", lambda count: count == 0),
        "staleness_max": (f"<= {ETA}", lambda age: age <= ETA),
        "ranks_heard": (f"== {NUM_VIRTUAL}", lambda count: count == NUM_VIRTUAL),
        "oldest_heartbeat_seconds": (f"<= {OLDEST_HEARTBEAT}", lambda age: 0 <= age <= OLDEST_HEARTBEAT),
        "head_growth_mib": (f"<= {GROWTH_MIB}", lambda size: size <= GROWTH_MIB),
    }
    return 0 if report("control_plane", figures, targets) else 1


if __name__ == "__main__":
    sys.exit(main())
