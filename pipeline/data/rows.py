"""Reads tables of rows from disk: JSON lines, Parquet, and folders that Hugging Face `datasets` made. No network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(path: str, split: str, subset: str | None = None) -> list[Row]:
    """All rows of a file, or of one split of a folder.

    A folder may hold `SPLIT.jsonl`, Parquet files (`SPLIT.parquet`, `SPLIT-00000-of-00001.parquet`, also below a
    folder named like the subset, as on the Hub) or what `Dataset.save_to_disk` wrote. Raises ValueError naming the
    path and what was looked for.
    """
    place = Path(path).expanduser()
    if not path or not place.exists():
        raise ValueError(f"path: {path!r} does not exist; give a local file or folder")
    if place.is_file():
        return _read_parquet([place]) if place.suffix == ".parquet" else _read_json_lines(place)
    if (place / "dataset_dict.json").is_file() or (place / "state.json").is_file():
        return _read_saved(place, split)
    lines = place / f"{split}.jsonl"
    if lines.is_file():
        return _read_json_lines(lines)
    return _read_parquet(_parquet_files(place, split, subset))


def _read_json_lines(path: Path) -> list[Row]:
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"path: {path}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"path: {path}, line {number} is not a JSON object")
            rows.append(row)
    return rows


def _parquet_files(folder: Path, split: str, subset: str | None) -> list[Path]:
    found = [
        file
        for pattern in (f"{split}-*.parquet", f"{split}.parquet", f"{split}/*.parquet")
        for file in sorted(folder.glob(f"**/{pattern}"))
        if subset is None or subset in file.relative_to(folder).parts
    ]
    if not found:
        wanted = f"{split}.jsonl or {split}*.parquet" if subset is None else f"{subset}/{split}*.parquet"
        raise ValueError(f"path: {str(folder)!r} has no split {split!r} (looked for {wanted})")
    parents = sorted({str(file.parent.relative_to(folder)) for file in found})
    if len(parents) > 1:
        raise ValueError(
            f"args.subset: {str(folder)!r} has the split {split!r} in {', '.join(parents)}; name one of them"
        )
    return found


def _read_parquet(files: list[Path]) -> list[Row]:
    import pyarrow.parquet

    rows: list[Row] = []
    for file in files:
        rows.extend(pyarrow.parquet.read_table(file).to_pylist())
    return rows


def _read_saved(folder: Path, split: str) -> list[Row]:
    import datasets

    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise ValueError(f"split: {split!r} is not in {str(folder)!r}; it has {', '.join(sorted(saved))}")
        saved = saved[split]
    return list(saved)
