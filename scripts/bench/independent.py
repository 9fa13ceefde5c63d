"""TRL and verl as they are on PyPI, for what is compared with them: the extra `parity`, in `build/parity`."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "parity"


def find_independent() -> Path:
    """The folder of the packages, installed on first use; last on the path, so that nothing in it hides what is there.

    Without their dependencies: verl asks for an older transformers than the environment has.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted: list[str] = project["project"]["optional-dependencies"]["parity"]
    stamp = FOLDER / "installed"
    if not stamp.is_file() or stamp.read_text().split() != wanted:
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--upgrade"]
        subprocess.run([*command, "--target", str(FOLDER), *wanted], check=True, stdout=subprocess.DEVNULL, timeout=900)
        stamp.write_text("\n".join(wanted))
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    importlib.invalidate_caches()
    return FOLDER
