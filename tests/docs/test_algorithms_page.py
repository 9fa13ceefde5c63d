"""docs/algorithms.md tells of each preset what the preset says, and of the metrics what a run reports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from pekoe.pipeline.config.load import PRESETS, preset_names
from pekoe.pipeline.config.schema import all_keys

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text()
BATCH = {"mean_level": "batch", "std_level": "batch", "mean_leave1out": False}


def told() -> dict[str, str]:
    """The text of each algorithm."""
    part = PAGE.partition("## The sixteen")[2].partition("\n## ")[0]
    return dict(re.findall(r"### `(\w+)`\n(.*?)(?=\n### |\Z)", part, re.S))


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        whole = not isinstance(value, dict) or not value or value == BATCH
        found |= {f"{prefix}{key}": value} if whole else leaves(value, f"{prefix}{key}.")
    return found


def preset(name: str) -> dict[str, Any]:
    return leaves(yaml.safe_load((PRESETS / f"{name}.yaml").read_text()))


def test_every_algorithm_is_told_with_its_formula_paper_and_use() -> None:
    assert sorted(told()) == preset_names()
    for name, text in told().items():
        papers = re.findall(r"arXiv:(\d{4}\.\d{5})\]\(https://arxiv\.org/abs/\1\)", text)
        assert papers or "Paper: as `" in text or "(no arXiv number)" in text, name
        comment = (PRESETS / f"{name}.yaml").read_text().partition("actor:")[0]
        assert all(paper in comment for paper in papers), name
        assert len(text.split()) > 25, name


def test_the_keys_that_are_told_are_those_that_differ() -> None:
    base = preset("grpo")
    for name, text in told().items():
        keys = re.search(r"Keys: (.*?)\.\n\n", text, re.S)
        assert keys is not None, name
        written = dict(re.findall(r"`([\w.]+): ([^`]+)`", keys[1]))
        differs = {
            key: "batch / batch" if value == BATCH else "{}" if value == {} else yaml.safe_dump(value).split("\n")[0]
            for key, value in preset(name).items()
            if key not in base or base[key] != value
        }
        assert written == differs, name


def test_keys_named_on_the_page_exist() -> None:
    known = {key.name for key in all_keys()}
    sections = {name.partition(".")[0] for name in known if "." in name}
    for name in re.findall(r"`([a-z_]+\.[\w.]+)(?:[=:][^`]*)?`", PAGE):
        if name.partition(".")[0] in sections:
            assert name in known, name


def documented_metrics() -> set[str]:
    pages = (PAGE, (ROOT / "docs" / "supervised.md").read_text())
    table = "".join(page.partition("## Metrics")[2] for page in pages)
    names = {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`([^`]+)`", row)}
    return names | {f"staleness/share_{age}" for age in range(8)}


def undocumented(names: set[str]) -> set[str]:
    """Metrics of a run that neither page of them names; `…` stands for the end of a name."""
    known = documented_metrics()
    beginnings = tuple(name.removesuffix("…") for name in known if name.endswith("…"))
    return {name for name in names - known if not name.startswith(beginnings)} - {"step", "time", "attempt"}
