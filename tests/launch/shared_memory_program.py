"""A rank that joins a world, says what it has mapped, and waits to be killed."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from pekoe.launch import environment
from pekoe.launch.rank_state import RankState
from pekoe.launch.shared_memory import mapped_files
from pekoe.launch.supervisor import Reports, supervise
from pekoe.launch.world import World


def live(reports: Reports) -> int:
    facts = environment.read(os.environ)
    with World.join(2, facts=facts, state=RankState(facts.rank, facts.host, reports)):
        path = Path(sys.argv[1]) / f"{facts.rank}.joined"
        path.with_suffix(".part").write_text(" ".join([str(os.getpid()), *mapped_files()]))
        path.with_suffix(".part").rename(path)
        time.sleep(60)
    return 0


supervise(live, environment.read(os.environ).rank)
