"""Shards against plain np.save: write and read bandwidth as ratios to it, measured in turns in the same run.

The baseline saves the same arrays with np.save, one file per column, fsynced, without checksums and texts; it reads
them with np.load and makes the same trajectory records. Ratios are medians over the rounds. Also: bytes read for one
row over the bytes of the row, and files per thousand groups.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from bench_result import report

from pekoe.pipeline.records import Finish, Group, Trajectory
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory import schema
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.shard import Shard, write_shard
from pekoe.pipeline.trajectory.writer import ShardWriter

ATTRIBUTES = ShardAttributes(run="bench", attempt=0, writer="rank-0", temperature=1.0)
TARGETS = {
    "write_ratio": (">= 0.3", lambda ratio: ratio >= 0.3),
    "read_ratio": (">= 0.3", lambda ratio: ratio >= 0.3),
    "row_amplification": ("<= 16", lambda ratio: ratio <= 16),
    "files_per_1000_groups": ("<= 4", lambda count: count <= 4),
}
"""Ratios and the rest: at least for ratios, at most for the others."""


def make_groups(num_groups: int, samples: int, mean_length: int) -> list[Group]:
    rng = np.random.default_rng(0)

    def make(sample: int) -> Trajectory:
        length = int(np.clip(rng.lognormal(np.log(mean_length), 0.6), 16, 16 * mean_length))
        mask = (np.arange(length) >= length // 4).astype(np.uint8)
        active = mask.astype(bool)
        return Trajectory(
            tokens=rng.integers(0, 150_000, length, dtype=np.int32),
            loss_mask=mask,
            logprobs=np.where(active, -rng.random(length), 0).astype(np.float32),
            versions=np.where(active, 3, -1).astype(np.int32),
            turns=np.where(active, 0, -1).astype(np.int32),
            prompt_length=length // 4,
            reward=1.0,
            finish=Finish.STOP,
            seed=sample,
            sample=sample,
            info={"score": 1.0},
        )

    return [Group(number, 0, f"bench/{number}", [make(s) for s in range(samples)]) for number in range(num_groups)]


def plain_write(folder: Path, groups: list[Group]) -> None:
    for name, column in {**schema.token_arrays(groups), **schema.sequence_arrays(groups)}.items():
        with open(folder / f"{name}.npy", "wb") as file:
            np.save(file, column)
            file.flush()
            os.fsync(file.fileno())


def plain_read(folder: Path) -> int:
    columns = {path.stem: np.load(path) for path in folder.glob("*.npy")}
    offsets = columns.pop("offset")
    rows = []
    for row, (start, end) in enumerate(itertools.pairwise(offsets)):
        tokens = {name: columns[name][start:end] for name in schema.TOKEN_COLUMNS}
        numbers = {name: columns[name][row] for name in schema.SEQUENCE_COLUMNS}
        rows.append(schema.trajectory_of(tokens, numbers, "{}"))
        rows[-1].check()
    return len(rows)


def shard_read(path: Path) -> int:
    with Shard(path) as shard:
        return len(shard.read(range(shard.num_rows)))


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(groups: list[Group], rounds: int, folder: Path) -> dict[str, float]:
    path, plain = folder / "000000.h5", folder / "plain"
    plain.mkdir()
    size = write_shard(path, groups, ATTRIBUTES)
    plain_write(plain, groups)
    times: dict[str, list[float]] = {"write": [], "plain_write": [], "read": [], "plain_read": []}
    for _ in range(rounds):
        times["plain_write"].append(seconds(lambda: plain_write(plain, groups)))
        times["write"].append(seconds(lambda: write_shard(path, groups, ATTRIBUTES)))
        times["plain_read"].append(seconds(lambda: plain_read(plain)))
        times["read"].append(seconds(lambda: shard_read(path)))
    with Shard(path) as shard:
        before = shard.bytes_read
        (_, trajectory), *_ = shard.read([shard.num_rows // 2])
        amplification = (shard.bytes_read - before) / (17 * len(trajectory.tokens))
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "write_mb_per_second": size / median["write"] / 1e6,
        "read_mb_per_second": size / median["read"] / 1e6,
        "write_ratio": statistics.median(a / b for a, b in zip(times["plain_write"], times["write"], strict=True)),
        "read_ratio": statistics.median(a / b for a, b in zip(times["plain_read"], times["read"], strict=True)),
        "row_amplification": amplification,
        "shard_mib": size / 2**20,
    }


def count_files(folder: Path) -> int:
    run = RunDirectory(folder / "run")
    run.create()
    writer = ShardWriter(run, ATTRIBUTES, max_groups=256, max_seconds=1e9)
    for group in make_groups(1000, 2, 64):
        writer.add(group)
        if writer.due():
            writer.flush()
    writer.flush()
    return sum(path.is_file() for path in run.shards.rglob("*"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller shard and fewer rounds")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    args = parser.parse_args()
    num_groups, rounds = (64, 5) if args.quick else (256, 15)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        groups = make_groups(num_groups, 8, 1000)
        figures = measure(groups, rounds, Path(name)) | {"files_per_1000_groups": float(count_files(Path(name)))}
    for figure, value in figures.items():
        print(f"{figure:>24} {value:10.2f}")
    rounded = {figure: round(value, 3) for figure, value in figures.items()}
    return 0 if report("shards", rounded, TARGETS) else 1


if __name__ == "__main__":
    sys.exit(main())
