"""The independent implementations: what the extra `parity` names, installed on first use beside the environment."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "scripts" / "bench")]

from independent import find_independent  # noqa: E402


@pytest.fixture(scope="session")
def implementations() -> Path:
    """Folder of the packages."""
    return find_independent()


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
