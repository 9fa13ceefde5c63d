"""A rank of a world that is formed and left again: `python startup_rank.py FOLDER`. Notes where its time went."""

from __future__ import annotations

import time

FIRST_LINE = time.time()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from pekoe.launch import environment  # noqa: E402
from pekoe.launch.rank_state import RankState  # noqa: E402
from pekoe.launch.stop_signals import StopSignals  # noqa: E402
from pekoe.launch.supervisor import Reports, supervise  # noqa: E402


def live(reports: Reports) -> int:
    forked = time.time()
    facts = environment.read(os.environ)
    signals = StopSignals()
    signals.install()
    state = RankState(facts.rank, facts.host, reports)
    from pekoe.launch.world import World

    imported = time.time()
    with World.join(facts.size, facts=facts, state=state, signals=signals) as world:
        joined = time.time()
        began = created(os.getppid())
        spent = dict(state.start_up._spent)
        times = {
            "began": began, "joined": joined, "interpreter": FIRST_LINE - began, "supervisor": forked - FIRST_LINE,
            "imports": imported - forked, "mpi_init": spent["mpi init"], "forming": spent["joining"],
        }  # fmt: skip
        (Path(sys.argv[1]) / f"rank-{world.rank}.json").write_text(json.dumps(times))
    return 0


def created(pid: int) -> float:
    """When a process began, in seconds since 1970, to a hundredth: `btime` of /proc/stat knows whole seconds only."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


if __name__ == "__main__":
    supervise(live, environment.read(os.environ).rank)
