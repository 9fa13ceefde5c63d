"""GSM8K: grade-school word problems whose answer is a number after `####` (Cobbe et al. 2021, arXiv:2110.14168)."""

from __future__ import annotations

from pathlib import Path

from pekoe.pipeline.config.dataset import DatasetConfig
from pekoe.pipeline.data.rows import read_rows
from pekoe.pipeline.records import Example

MARK = "####"


class Gsm8kDataset:
    """Rows `{"question", "answer"}` from a JSON-lines file, a folder with `SPLIT.jsonl`, or a Hugging Face folder.

    `args.subset` chooses among several in a Hugging Face folder (default `main` where it exists). `data` holds
    `answer`: the final number as text, without thousands separators.
    """

    def __init__(self, config: DatasetConfig) -> None:
        unknown = set(config.args) - {"subset"}
        if unknown:
            raise ValueError(f"args: {sorted(unknown)} not known for gsm8k; allowed: subset")
        folder = Path(config.path).expanduser()
        subset = config.args.get("subset") or ("main" if (folder / "main").is_dir() else None)
        self._rows = read_rows(config.path, config.split, subset)
        self._split = config.split
        for number, row in enumerate(self._rows):
            if not isinstance(row.get("question"), str) or MARK not in str(row.get("answer")):
                raise ValueError(f"path: row {number} of {config.path!r} lacks a question or an answer with {MARK}")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        row = self._rows[index]
        answer = row["answer"].rpartition(MARK)[2].strip().replace(",", "")
        messages = ({"role": "user", "content": row["question"]},)
        return Example(index, f"gsm8k/{self._split}/{index}", messages, {"answer": answer})
