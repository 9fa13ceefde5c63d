"""The commands of README and docs, and which of them need a Slurm cluster or vLLM."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CLUSTER_PAGES = ("slurm.md", "rollout_arrays.md")
"""Pages for somebody who sits at a login node."""
CLUSTER_WORDS = ("sbatch ", "salloc ", "pekoe submit ", "pekoe doctor virtual", "pekoe cancel ", "slurm_cluster.sh")
CLUSTER_RUNS = ("submitted", "served", "swept", "sbatch")
"""Names of runs that README starts on a cluster."""


def commands() -> list[tuple[Path, str]]:
    """(page, line) of each command, in the order of reading, each line once."""
    found: dict[str, Path] = {}
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.S):
            for line in block.splitlines():
                if line.strip():
                    found.setdefault(line.split(" #")[0].strip(), page)
    return [(page, line) for line, page in found.items()]


def needs_vllm(line: str) -> bool:
    """Whether a command is for the environment with vLLM."""
    return "vllm:" in line


def needs_cluster(page: Path, line: str) -> bool:
    """Whether a command is for a machine with Slurm."""
    names = any(f"runs/quickstart/{name}" in line for name in CLUSTER_RUNS)
    return page.name in CLUSTER_PAGES or names or any(word in line for word in CLUSTER_WORDS)


def of_algorithms(line: str) -> bool:
    """Whether a command is a run of algorithms.md, on whichever page it stands first: many worlds, in a test of their
    own."""
    page = ROOT / "docs" / "algorithms.md"
    return "pekoe run" in line and line in [text.split(" #")[0].strip() for text in page.read_text().splitlines()]


def of_overrides(page: Path, line: str) -> bool:
    """Whether a command is a run of configuration.md: what it shows is how keys are written."""
    return page.name == "configuration.md" and line.startswith("pekoe run ")
