"""The independent implementations: what the extra `parity` names, installed on first use beside the environment."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build" / "parity"
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def implementations() -> Path:
    """Folder of the packages; last on the path, so that nothing in it hides what is there.

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


@pytest.fixture(scope="session")
def algos(implementations: Path) -> ModuleType:
    """verl's algorithms."""
    return importlib.import_module("verl.trainer.ppo.core_algos")


@pytest.fixture(scope="session")
def correction(implementations: Path) -> ModuleType:
    """verl's correction for rollouts by another policy."""
    return importlib.import_module("verl.trainer.ppo.rollout_corr_helper")


@pytest.fixture(scope="session")
def trl(implementations: Path) -> ModuleType:
    return importlib.import_module("trl")
