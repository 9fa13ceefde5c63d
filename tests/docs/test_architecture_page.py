"""The page that tells where to read names every file of launch/, and none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_map_of_launch_is_complete() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("## `launch/`, in the order of reading")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    named = set(re.findall(r"`([a-z_]+)`", "\n".join(rows)))
    files = {path.stem for path in (ROOT / "launch").glob("*.py")}
    inside = {path.stem for path in (ROOT / "launch" / "doctor").glob("*.py")}
    assert sorted(files - named) == []
    assert sorted(named - files - inside) == []
