"""The last line of every benchmark: one JSON object."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

Judge = Callable[[Any], bool]


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": _processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def report(name: str, figures: Mapping[str, Any], targets: Mapping[str, tuple[str, Judge]]) -> bool:
    """Prints the result and returns whether every target is met.

    `targets` gives for a figure's name the target as people read it (`>= 1.6`) and the function that judges the figure.
    A figure that has a target but was not measured raises KeyError.
    """
    met = all(judge(figures[figure]) for figure, (_, judge) in targets.items())
    result = {
        "name": name,
        "figures": dict(figures),
        "targets": {figure: text for figure, (text, _) in targets.items()},
        "met": met,
        "machine": machine(),
    }
    print(json.dumps(result), flush=True)
    return met


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
