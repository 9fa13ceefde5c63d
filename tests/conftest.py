"""What many tests share: small real models and data, and a clock that knows of stalls."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from tiny_model import write_sums, write_tiny_model  # noqa: E402


@pytest.fixture
def held_up() -> Iterator[Callable[[], float]]:
    """Seconds for which this process did not get to run since the test began: what a machine that is busy or stalls
    adds to the times measured in it."""
    total, is_over = [0.0], threading.Event()

    def look() -> None:
        last = time.monotonic()
        while not is_over.wait(0.02):
            now = time.monotonic()
            total[0] += now - last - 0.02 if now - last > 0.1 else 0.0
            last = now

    thread = threading.Thread(target=look, name="held-up", daemon=True)
    thread.start()

    def seconds() -> float:
        time.sleep(0.05)
        return total[0]

    yield seconds
    is_over.set()
    thread.join()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sums(tmp_path_factory.mktemp("data") / "sums.jsonl", 40)
