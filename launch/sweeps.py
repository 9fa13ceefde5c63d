"""Sweeps: which runs the product of values and seeds makes, and which of them were submitted as what.

    FILEROOT/EXPERIMENT/sweeps/TRIAL/sweep.json   the elements, in order: run directory, overrides, job once accepted
                                     code/        the code of all of them
                                     slurm/       submitit's files of the arrays

`sweep.json` is written after each array that Slurm accepted. So the same call again submits what is not there yet, and
nothing twice.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pekoe.launch.attempts import RunDirectoryError
from pekoe.pipeline import files

NAME = "sweep.json"
LONGEST_NAME = 120
"""Characters of a value's part in a folder's name."""


@dataclass(frozen=True)
class Element:
    """One run of a sweep."""

    trial_name: str
    overrides: tuple[str, ...]
    """Beyond those of the whole sweep; the trial_name not among them."""
    run: str = ""
    """Run directory."""
    job_id: str = ""
    """Empty until accepted."""
    kind: str = "slurm"


@dataclass(frozen=True)
class Sweep:
    """A sweep's folder and its elements."""

    path: Path
    elements: tuple[Element, ...]
    base: Mapping[str, Any]
    """What all elements have in common: another base is another sweep."""

    @property
    def file(self) -> Path:
        return self.path / NAME

    @property
    def rest(self) -> tuple[Element, ...]:
        """Not accepted yet."""
        return tuple(element for element in self.elements if not element.job_id)

    def accepted(self, runs_to_jobs: Mapping[str, str], kind: str = "slurm") -> Sweep:
        """With the jobs of some elements, by run directory; written down."""
        elements = tuple(
            replace(one, job_id=runs_to_jobs[one.run], kind=kind) if one.run in runs_to_jobs else one
            for one in self.elements
        )
        sweep = replace(self, elements=elements)
        sweep.write()
        return sweep

    def write(self) -> None:
        """Whole or not at all."""
        files.make_folder(self.path)
        files.write_json(self.file, {"base": self.base, "elements": [vars(one) for one in self.elements]})


def plan_elements(trial_name: str, sweep: Mapping[str, Sequence[Any]], seeds: Sequence[int]) -> list[Element]:
    """The product, the last key fastest, seeds fastest of all; each with a name that is readable and its own."""
    axes = {key: [_text(value) for value in values] for key, values in sweep.items()}
    if seeds:
        axes["seed"] = [str(seed) for seed in seeds]
    for key, values in axes.items():
        if not values or len(set(values)) < len(values):
            raise ValueError(f"sweep: {key} has {'no value' if not values else 'a value twice'} ({', '.join(values)})")
        if key in ("trial_name", "experiment_name"):
            raise ValueError(f"sweep: {key} cannot be swept; every element gets a trial_name of its own")
    short = _short_names(list(axes))
    elements, taken = [], set()
    for combination in itertools.product(*axes.values()):
        chosen = list(zip(axes, combination, strict=True))
        name = "-".join([trial_name, *(f"{short[key]}_{_as_name(value)}" for key, value in chosen)])
        count = 1
        unique = name
        while unique in taken:
            count += 1
            unique = f"{name}.{count}"
        taken.add(unique)
        elements.append(Element(unique, tuple(f"{key}={value}" for key, value in chosen)))
    return elements


def parse_sweep(texts: Sequence[str]) -> dict[str, list[str]]:
    """`key=v1,v2` of the command line; a comma inside brackets, braces or quotes belongs to a value."""
    sweep: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not key or not values:
            raise ValueError(f"--sweep: {text!r} is not allowed; allowed: key=value1,value2,…")
        if key in sweep:
            raise ValueError(f"--sweep: {key} is given twice")
        sweep[key] = _split(values)
    return sweep


def array_text(num_elements: int, limit: int | None) -> str:
    """`0-15%4`."""
    return f"0-{num_elements - 1}" + (f"%{limit}" if limit is not None else "")


def check_array_text(text: str) -> None:
    """ValueError unless it is what sbatch takes for `--array`."""
    if not re.fullmatch(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", text):
        raise ValueError(f"--array: {text!r} is not allowed; allowed: indices and a limit as sbatch takes them, 0-15%4")


def open_sweep(path: Path, base: Mapping[str, Any], elements: Sequence[Element]) -> Sweep:
    """The sweep with these elements and those that it had; what was accepted stays so.

    RunDirectoryError when the folder holds a sweep over another configuration.
    """
    known = read_sweep(path)
    if known is None:
        return Sweep(path, tuple(elements), base)
    differing = sorted(key for key in {*known.base, *base} if known.base.get(key) != base.get(key))
    if differing:
        raise RunDirectoryError(
            f"{path} holds a sweep over another configuration ({', '.join(differing[:5])} differ); "
            "give another trial_name=…"
        )
    present = {one.run for one in known.elements}
    return replace(known, elements=(*known.elements, *(one for one in elements if one.run not in present)))


def read_sweep(path: Path) -> Sweep | None:
    """None where none was written."""
    if not (path / NAME).exists():
        return None
    record = files.read_json(path / NAME)
    elements = (Element(**{**one, "overrides": tuple(one["overrides"])}) for one in record["elements"])
    return Sweep(path, tuple(elements), record["base"])


def _text(value: Any) -> str:
    """As an override writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last words of each key that tell it from the others."""
    for length in range(1, max(len(key.split(".")) for key in keys) + 1):
        names = {key: ".".join(key.split(".")[-length:]) for key in keys}
        ambiguous = [name for name, count in Counter(names.values()).items() if count > 1]
        if not ambiguous:
            break
    return names


def _as_name(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", value).strip("_")[:LONGEST_NAME] or "empty"


def _split(text: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in ")}]":
            depth -= 1
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
