"""What one pass of the head over the files of 256 attached worlds costs.

    python scripts/bench/leases.py [--quick] [--worlds N] [--folder FOLDER]

The board and the worlds are the real ones; the worlds take turns in this process, between the head's passes. In each
round every world looks, says that it lives and claims; a third of them tell of a group. The baseline is the bare files:
the same number of listings, reads, writes with rename and removals, in the same folder, with no books kept. `--folder`
names the filesystem to be measured (a shared one, if it is to mean anything there). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from bench_result import report

from pekoe.pipeline import files
from pekoe.pipeline.leases.lease_board import LeaseBoard
from pekoe.pipeline.leases.lease_holder import LeaseHolder
from pekoe.pipeline.leases.lease_records import SharedWeights
from pekoe.pipeline.messages import Assign, Published, PublishedGroup, Row
from pekoe.pipeline.run_directory import RunDirectory

POLL_SECONDS, LEASE_SECONDS = 0.5, 30.0
SLOTS, NUM_SAMPLES = 8, 8
SHARE_TELLING = 1 / 3


class CountingDisk(files.Disk):
    """Counts the head's operations."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def create(self, path: Path) -> BinaryIO:
        self.counts["written"] += 1
        return super().create(path)

    def read(self, path: Path) -> bytes:
        self.counts["read"] += 1
        return super().read(path)

    def remove(self, path: Path) -> None:
        self.counts["removed"] += 1
        super().remove(path)


@contextmanager
def counted(disk: CountingDisk) -> Iterator[None]:
    before, files.disk = files.disk, disk
    try:
        yield
    finally:
        files.disk = before


class Hall:
    """The head and its worlds, on a clock of the test's own."""

    def __init__(self, run: RunDirectory, num_worlds: int) -> None:
        self.now = 0.0
        self.disk = CountingDisk()
        self.rng = random.Random(1)
        self.next_group = self.num_heard = 0
        self.board = LeaseBoard(
            run, 0, "hash", poll_seconds=POLL_SECONDS, lease_seconds=LEASE_SECONDS, clock=lambda: self.now
        )
        self.board.open()
        self.board.announce(0, SharedWeights(0, "weights/shared/v-0", "token"))
        self.board.poll()
        self.worlds = [
            LeaseHolder(run, f"w{number}", num_ranks=1, slots=SLOTS, clock=lambda: self.now)
            for number in range(num_worlds)
        ]
        for world in self.worlds:
            world.look()
            world.follow(0)
        self.num_told = 0

    def head(self) -> tuple[float, float]:
        """One pass: (wall seconds, CPU seconds)."""
        while self.board.capacity() > 0:
            self.board.offer(Assign(self.next_group, 0, self.next_group, NUM_SAMPLES, 0))
            self.next_group += 1
        with counted(self.disk):
            wall, cpu = time.perf_counter(), time.process_time()
            messages = self.board.poll()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.num_heard += len(messages)
        return wall, cpu

    def round(self) -> None:
        """What the worlds do in an interval."""
        self.now += POLL_SECONDS
        for world in self.worlds:
            world.look()
            world.cancelled()
            world.claim(SLOTS - len(world.held), 0)
            world.beat(0)
            if world.held and self.rng.random() < SHARE_TELLING:
                self.num_told += 1
                key = min(world.held)
                rows = tuple(Row(row, row, 500, 300, 1.0, 0, 0, False) for row in range(NUM_SAMPLES))
                path = f"shards/0-{world.world}/{self.num_told}.h5"
                world.tell([Published(path, (PublishedGroup(*key, rows),))])


def bare_files(folder: Path, counts: Counter[str], num_passes: int, num_worlds: int) -> float:
    """Seconds for one pass's share of the same operations."""
    boxes = [folder / str(number) for number in range(num_worlds)]
    for box in boxes:
        box.mkdir(parents=True)
    paths = [folder / f"{number}.file" for number in range(max(counts.values()) // num_passes + 1)]
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        for box in boxes:
            os.listdir(box)
        for path in paths[: counts["written"] // num_passes]:
            part = path.with_suffix(".part")
            part.write_bytes(b"x" * 60)
            os.rename(part, path)
        seconds.append(time.perf_counter() - began)
        for path in paths:
            path.write_bytes(b"x" * 300)
        began = time.perf_counter()
        for path in paths[: counts["read"] // num_passes]:
            path.read_bytes()
        for path in paths[: counts["removed"] // num_passes]:
            path.unlink()
        seconds[-1] += time.perf_counter() - began
    return statistics.median(seconds)


def measure(folder: Path, num_worlds: int, num_rounds: int) -> dict[str, Any]:
    hall = Hall(RunDirectory(folder / "run"), num_worlds)
    for _ in range(6):
        hall.round()
        hall.head()
    hall.disk.counts.clear()
    heard, began = hall.num_heard, time.perf_counter()
    passes = []
    for _ in range(num_rounds):
        hall.round()
        passes.append(hall.head())
    walls, cpus = [wall for wall, _ in passes], [cpu for _, cpu in passes]
    quarter = max(1, num_rounds // 4)
    bare = bare_files(folder / "bare", hall.disk.counts, num_rounds, num_worlds)
    return {
        "worlds": len(hall.board.worlds()),
        "slots": hall.board.num_slots(),
        "poll_milliseconds": round(1000 * statistics.median(walls), 2),
        "poll_milliseconds_max": round(1000 * max(walls), 2),
        "poll_cpu_milliseconds": round(1000 * statistics.median(cpus), 2),
        "bare_files_milliseconds": round(1000 * bare, 2),
        "ratio": round(statistics.median(walls) / bare, 2),
        "late_over_early": round(statistics.median(cpus[-quarter:]) / statistics.median(cpus[:quarter]), 2),
        "notices_per_pass": round((hall.num_heard - heard) / num_rounds, 1),
        "notices_lost": hall.num_told - hall.num_heard,
        "groups_open": hall.board.num_open(),
        "world_milliseconds": round(1000 * (time.perf_counter() - began - sum(walls)) / num_rounds / num_worlds, 2),
        **{f"files_{name}_per_pass": count // num_rounds for name, count in sorted(hall.disk.counts.items())},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worlds", type=int, default=256)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        figures = measure(Path(folder), arguments.worlds, 30 if arguments.quick else 300)
    limit = 1000 * POLL_SECONDS / 4
    targets = {
        "worlds": (f"== {arguments.worlds}", lambda count: count == arguments.worlds),
        "poll_cpu_milliseconds": (f"<= {limit:g}", lambda milliseconds: milliseconds <= limit),
        "ratio": ("<= 5", lambda ratio: ratio <= 5),
        "late_over_early": ("<= 2", lambda ratio: ratio <= 2),
        "notices_lost": ("== 0", lambda count: count == 0),
    }
    return 0 if report("leases", figures, targets) else 1


if __name__ == "__main__":
    sys.exit(main())
