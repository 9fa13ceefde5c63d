"""Tokenizers with the chat templates of common families."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runs"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from chat_tokenizers import CHATML, TEMPLATES, make_tokenizer


@pytest.fixture(scope="session", params=sorted(TEMPLATES))
def templated(request: pytest.FixtureRequest) -> Any:
    return make_tokenizer(TEMPLATES[request.param])


@pytest.fixture(scope="session")
def chatml() -> Any:
    return make_tokenizer(CHATML)


@pytest.fixture(scope="session")
def plain() -> Any:
    return make_tokenizer(None)
