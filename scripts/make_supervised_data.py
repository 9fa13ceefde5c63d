"""Demonstrations and preferences for the quickstart's model: what the recipes of supervised tasks train on.

python scripts/make_supervised_data.py FOLDER      FOLDER is what make_quickstart_model.py wrote

Writes FOLDER/demonstrations.jsonl and FOLDER/preferences.jsonl from the training problems, and the same from the
held-out ones as …-valid.jsonl. A demonstration minds the carry; a pair prefers that to the way which forgets it, and
only problems where the two differ make one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from make_quickstart_model import Problem, solution


def problems(path: Path) -> Iterator[Problem]:
    """Of a file that make_quickstart_model.py wrote."""
    for line in path.read_text().splitlines():
        a, b = json.loads(line)["question"].split("+")
        yield int(a), int(b)


def text(problem: Problem, forgets_carries: bool) -> str:
    """A solution as text."""
    return "".join(solution(problem, forgets_carries))


def demonstration(problem: Problem) -> dict[str, str]:
    return {"prompt": f"{problem[0]}+{problem[1]}=", "completion": text(problem, False)}


def preference(problem: Problem) -> dict[str, str]:
    sides = {"chosen": text(problem, False), "rejected": text(problem, True)}
    return {"prompt": f"{problem[0]}+{problem[1]}=", **sides}


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"{len(rows)} rows in {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder: Path = parser.parse_args().folder
    for source, suffix in (("train", ""), ("valid", "-valid")):
        found = list(problems(folder / f"{source}.jsonl"))
        write(folder / f"demonstrations{suffix}.jsonl", [demonstration(problem) for problem in found])
        pairs = [preference(problem) for problem in found]
        write(folder / f"preferences{suffix}.jsonl", [row for row in pairs if row["chosen"] != row["rejected"]])


if __name__ == "__main__":
    main()
