"""The lines of docs/inference.md do what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "inference.md"


def test_the_documented_lines_start_and_stop_an_endpoint(engine: Any, tokenizer: Any, client: Any) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    answers: list[Any] = []
    token = client.headers["Authorization"].split()[1]

    def ask(url: str) -> None:
        status, body = type(client)(url).get("/models")
        answers.append((status, body["data"][0]["id"]))

    names = {"engine": engine, "tokenizer": tokenizer, "token": token, "ask": ask}
    exec(block.replace("\n...\n", "\nask(base_url)\n"), names)
    assert answers == [(200, "policy")]
    with pytest.raises(aiohttp.ClientConnectionError):
        ask(names["base_url"])
