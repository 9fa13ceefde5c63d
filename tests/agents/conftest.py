"""A served engine: the tiny model with a chat template, its endpoint, and a client that knows the token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoTokenizer

from pekoe.pipeline.agents.endpoint import Endpoint, EndpointSettings
from pekoe.pipeline.rollout.engines.hf_engine import HfEngine

TOKEN = "a-token-of-a-run-0123456789"
SECONDS = 60.0
TEMPLATE = "{% for m in messages %}{{ m['content'] }}+{% endfor %}"


class Client:
    """One request after the other, or many at once; gives (status, body)."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.headers = {"Authorization": f"Bearer {TOKEN}"}

    def get(self, path: str, **options: Any) -> tuple[int, Any]:
        return self.run(self.send("GET", path, **options))

    def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        return self.run(self.send("POST", path, json=body, **options))

    def run(self, work: Any) -> Any:
        return asyncio.run(asyncio.wait_for(work, SECONDS))

    async def send(self, verb: str, path: str, **options: Any) -> tuple[int, Any]:
        options.setdefault("headers", self.headers)
        async with aiohttp.ClientSession() as session, session.request(verb, self.url + path, **options) as answer:
            return answer.status, await answer.json()


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Any:
    made = AutoTokenizer.from_pretrained(tiny_model)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="session")
def engine(tiny_model: Path, tokenizer: Any) -> Iterator[HfEngine]:
    torch.set_num_threads(1)
    made = HfEngine(
        str(tiny_model), tokenizer=tokenizer, dtype="float32", device=torch.device("cpu"), max_slots=16,
        context_limit=128, deterministic=False,
    )  # fmt: skip
    yield made
    made.close()


@pytest.fixture
def serve(engine: HfEngine, tokenizer: Any) -> Iterator[Callable[..., tuple[Endpoint, Client]]]:
    """`serve(max_requests=…, …)` gives an endpoint that is stopped at the end of the test, and its client."""
    made: list[Endpoint] = []

    def start(**changes: Any) -> tuple[Endpoint, Client]:
        settings: dict[str, Any] = {"token": TOKEN, "model": "tiny", "max_new_tokens": 12}
        endpoint = Endpoint(engine, tokenizer, EndpointSettings(**settings | changes))
        made.append(endpoint)
        return endpoint, Client(endpoint.start())

    yield start
    for endpoint in made:
        endpoint.stop()


@pytest.fixture
def client(serve: Callable[..., tuple[Endpoint, Client]]) -> Client:
    return serve()[1]
