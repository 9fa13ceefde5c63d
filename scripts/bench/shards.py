"""Shards against plain numpy on the same bytes, and against pickle, safetensors and JSON lines on the same rows.

Each round writes and reads the same shard in every way, in turns, to a new file, fsynced, and from the page cache:

    ours          publish (checked, laid out, sealed, fsync, rename, fsync of the folder) + verified rows, as records
    plain         `tofile` of exactly the bytes that ours has on the disk, already in memory, fsync + `fromfile`
    from rows     numpy from rows to rows: joined to columns, one file each, fsync; slices of what is read back
    pickle        the groups as they are; safetensors: one tensor a column, texts in its header; JSON lines: one a row

Ratios are medians over the rounds of their time divided by ours: above 1, ours is faster. Read amplification is bytes
fetched over bytes of the rows asked for. Many short rows are measured too. What is written was frozen before, so that
Python's garbage collector does not walk through the bench's own input while somebody's time is taken.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from bench_result import report

from pekoe.pipeline.records import Finish, Group, Trajectory
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory import schema
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.shard import Shard, write_shard
from pekoe.pipeline.trajectory.writer import ShardWriter

ATTRIBUTES = ShardAttributes(run="bench", attempt=0, writer="rank-0", temperature=1.0)
TOKEN_BYTES = sum(np.dtype(dtype).itemsize for _, dtype in schema.TOKEN_COLUMNS.values())
SAMPLES = 8
TARGETS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "throughput_ratio": (">= 0.5", lambda ratio: ratio >= 0.5),
    "vs_jsonl": (">= 1", lambda ratio: ratio >= 1),
    "amplification_one_row": ("<= 16", lambda ratio: ratio <= 16),
    "files_per_million_tokens": ("<= 4", lambda count: count <= 4),
}
Write = Callable[[Path, list[Group]], object]
Read = Callable[[Path], list[tuple[int, Trajectory]]]


def make_groups(num_groups: int, mean_length: int) -> list[Group]:
    """Groups of 8 samples; lengths are log-normal with this mean and a long tail."""
    rng = np.random.default_rng(0)
    spread = 0.6

    def make(sample: int) -> Trajectory:
        drawn = rng.lognormal(np.log(mean_length) - spread**2 / 2, spread)
        length = int(np.clip(drawn, 16, 16 * mean_length))
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

    return [Group(number, 0, f"bench/{number}", [make(s) for s in range(SAMPLES)]) for number in range(num_groups)]


def rows_of(groups: Sequence[Group]) -> list[tuple[int, Trajectory]]:
    return [(group.number, trajectory) for group in groups for trajectory in group.trajectories]


def num_tokens(groups: Sequence[Group]) -> int:
    return sum(len(trajectory.tokens) for group in groups for trajectory in group.trajectories)


def write_ours(path: Path, groups: list[Group]) -> None:
    write_shard(path, groups, ATTRIBUTES)


def read_ours(path: Path) -> list[tuple[int, Trajectory]]:
    with Shard(path) as shard:
        return shard.read(range(shard.num_rows))


def write_durably(path: Path, data: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())


def write_pickle(path: Path, groups: list[Group]) -> None:
    write_durably(path, pickle.dumps(groups, protocol=pickle.HIGHEST_PROTOCOL))


def read_pickle(path: Path) -> list[tuple[int, Trajectory]]:
    groups: list[Group] = pickle.loads(path.read_bytes())
    return rows_of(groups)


def write_safetensors(path: Path, groups: list[Group]) -> None:
    texts = {
        name: json.dumps([line.decode() for line in lines]) for name, lines in schema.sequence_texts(groups).items()
    }
    columns = {**schema.sequence_arrays(groups)}
    for name, (field, _) in schema.TOKEN_COLUMNS.items():
        columns[f"tokens/{name}"] = np.concatenate([getattr(t, field) for t in schema.trajectories_in(groups)])
    write_durably(path, safetensors.numpy.save(columns, metadata=texts))


def read_safetensors(path: Path) -> list[tuple[int, Trajectory]]:
    with safetensors.safe_open(path, framework="numpy") as file:
        columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        infos = [line.encode() for line in json.loads(file.metadata()["info"])]
    tokens = {name: columns[f"tokens/{name}"] for name in schema.TOKEN_COLUMNS}
    rows = schema.trajectories_of(tokens, columns["offset"], columns, infos)
    return list(zip(columns["group"].tolist(), rows, strict=True))


def write_jsonl(path: Path, groups: list[Group]) -> None:
    def line(group: Group, trajectory: Trajectory) -> str:
        row = {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in fields(trajectory)}
        return json.dumps({"group": group.number, "try": group.try_number, "example": group.example, **row})

    write_durably(path, "\n".join(line(group, row) for group in groups for row in group.trajectories).encode())


def fields(trajectory: Trajectory) -> list[tuple[str, Any]]:
    return [(name, getattr(trajectory, name)) for name in Trajectory.__slots__]


def read_jsonl(path: Path) -> list[tuple[int, Trajectory]]:
    arrays = dict(schema.TOKEN_COLUMNS.values())
    rows = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            number = row.pop("group")
            del row["try"], row["example"]
            row.update({field: np.array(row[field], dtype) for field, dtype in arrays.items()})
            row["finish"] = Finish(row["finish"])
            rows.append((number, Trajectory(**row)))
    return rows


FORMATS: dict[str, tuple[str, Write, Read]] = {
    "ours": (".h5", write_ours, read_ours),
    "pickle": (".pickle", write_pickle, read_pickle),
    "safetensors": (".safetensors", write_safetensors, read_safetensors),
    "jsonl": (".jsonl", write_jsonl, read_jsonl),
}


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def write_plain(path: Path, content: np.ndarray[Any, Any]) -> None:
    with path.open("wb") as file:
        content.tofile(file)
        file.flush()
        os.fsync(file.fileno())


def plain_from_rows(folder: Path, groups: list[Group]) -> None:
    """Plain numpy with the same start and end as ours: rows in memory, to the disk, and to slices of columns."""
    rows = schema.trajectories_in(groups)
    for name, (field, dtype) in schema.TOKEN_COLUMNS.items():
        with (folder / name).open("wb") as file:
            np.concatenate([getattr(row, field) for row in rows], dtype=dtype).tofile(file)
            file.flush()
            os.fsync(file.fileno())
    ends = np.cumsum([len(row.tokens) for row in rows])[:-1]
    for name, (_, dtype) in schema.TOKEN_COLUMNS.items():
        np.split(np.fromfile(folder / name, dtype), ends)
        (folder / name).unlink()


def compare_with_plain(groups: list[Group], rounds: int, folder: Path) -> dict[str, float]:
    """Write and read times of plain numpy over ours, on the same bytes."""
    path = folder / "ours.h5"
    write_ours(path, groups)
    content = np.fromfile(path, np.uint8)
    path.unlink()
    plain = folder / "plain.bin"
    names = ("throughput_ratio", "write_ratio", "read_ratio", "vs_numpy_from_rows")
    ratios: dict[str, list[float]] = {name: [] for name in names}
    speeds: dict[str, list[float]] = {"write_mb_per_second": [], "read_mb_per_second": []}
    for number in range(rounds + 1):
        plain_write = timed(lambda: write_plain(plain, content))
        plain_read = timed(lambda: np.fromfile(plain, np.uint8))
        plain.unlink()
        write = timed(lambda: write_ours(path, groups))
        read = timed(lambda: read_ours(path))
        path.unlink()
        from_rows = timed(lambda: plain_from_rows(folder, groups))
        if number == 0:
            continue
        ratios["vs_numpy_from_rows"].append(from_rows / (write + read))
        ratios["throughput_ratio"].append((plain_write + plain_read) / (write + read))
        ratios["write_ratio"].append(plain_write / write)
        ratios["read_ratio"].append(plain_read / read)
        speeds["write_mb_per_second"].append(len(content) / write / 1e6)
        speeds["read_mb_per_second"].append(len(content) / read / 1e6)
    return {name: statistics.median(values) for name, values in (ratios | speeds).items()}


def compare_formats(groups: list[Group], rounds: int, folder: Path) -> dict[str, float]:
    """Total time and size of other formats on the same rows."""
    seconds: dict[str, list[float]] = {name: [] for name in FORMATS}
    figures: dict[str, float] = {}
    for _ in range(rounds):
        for name, (suffix, write, read) in FORMATS.items():
            path = folder / f"rows{suffix}"
            seconds[name].append(timed(lambda: write(path, groups)) + timed(lambda: read(path)))  # noqa: B023
            figures[f"bytes_per_million_tokens_{name}"] = path.stat().st_size / num_tokens(groups) * 1e6
            path.unlink()
    for name in FORMATS:
        if name != "ours":
            pairs = zip(seconds[name], seconds["ours"], strict=True)
            figures[f"vs_{name}"] = statistics.median(theirs / ours for theirs, ours in pairs)
    return figures


def check_formats(groups: list[Group], folder: Path) -> None:
    """Every format gives the same rows back: a figure counts only then."""
    expected = rows_of(groups)
    for name, (suffix, write, read) in FORMATS.items():
        path = folder / f"check{suffix}"
        write(path, groups)
        for (number, found), (wanted, row) in zip(read(path), expected, strict=True):
            same = all(np.array_equal(a, b) for a, b in zip(asdict(found).values(), asdict(row).values(), strict=True))
            if number != wanted or not same:
                raise AssertionError(f"{name} does not give back what was written")
        path.unlink()


def amplification(groups: list[Group], folder: Path) -> dict[str, float]:
    """Bytes fetched, opening included, over the bytes of the tokens of the rows."""
    path = folder / "amplification.h5"
    write_ours(path, groups)
    with Shard(path) as shard:
        n = shard.num_rows
    rng = np.random.default_rng(1)
    subsets = {
        "one_row": [n // 2],
        "random_eighth": sorted(rng.choice(n, n // 8, replace=False).tolist()),
        "contiguous_eighth": list(range(n // 2, n // 2 + n // 8)),
        "all_rows": list(range(n)),
    }
    figures = {}
    for name, rows in subsets.items():
        with Shard(path) as shard:
            opened = shard.bytes_read if name == "one_row" else 0
            wanted = TOKEN_BYTES * sum(len(row.tokens) for _, row in shard.read(rows))
            figures[f"amplification_{name}"] = (shard.bytes_read - opened) / wanted
            figures["kib_to_open"] = opened / 1024 if opened else figures["kib_to_open"]
    path.unlink()
    return figures


def files_per_million_tokens(groups: list[Group], folder: Path) -> float:
    """What a writer leaves that publishes when a shard is full."""
    run = RunDirectory(folder / "run")
    run.create()
    writer = ShardWriter(run, ATTRIBUTES, max_seconds=1e9)
    for group in groups:
        writer.add(group)
        if writer.due():
            writer.flush()
    writer.flush()
    return sum(path.is_file() for path in run.shards.rglob("*")) / num_tokens(groups) * 1e6


def measure(quick: bool, folder: Path) -> dict[str, float]:
    num_groups, rounds = 256, 9 if quick else 25
    groups = make_groups(num_groups, 1000)
    check_formats(groups[:8], folder)
    gc.freeze()
    figures = compare_with_plain(groups, rounds, folder)
    figures |= compare_formats(groups, 3, folder)
    figures |= amplification(groups, folder)
    figures["files_per_million_tokens"] = files_per_million_tokens(groups, folder)
    short = make_groups(8 * num_groups, 100)
    gc.freeze()
    for name, value in compare_with_plain(short, max(3, rounds // 3), folder).items():
        figures[f"short_rows_{name}"] = value
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller shard and fewer rounds")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        figures = measure(args.quick, Path(name))
    for figure, value in figures.items():
        print(f"{figure:>40} {value:12.3f}")
    return 0 if report("shards", {figure: round(value, 3) for figure, value in figures.items()}, TARGETS) else 1


if __name__ == "__main__":
    sys.exit(main())
