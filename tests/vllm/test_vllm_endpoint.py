"""The endpoint over vLLM, used by OpenAI's own client: what an agent of any framework would do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from pekoe.pipeline.agents.endpoint import Endpoint, EndpointSettings

openai: Any = pytest.importorskip("openai", reason="OpenAI's client comes with vLLM")
pytestmark = pytest.mark.vllm

TOKEN = "a-token-of-a-run-0123456789"
MESSAGES = [{"role": "system", "content": "12"}, {"role": "user", "content": "3+4"}]


@pytest.fixture(scope="module")
def engine(engines: Any) -> Any:
    return engines()


@pytest.fixture(scope="module")
def tokenizer(vllm_models: Any) -> Any:
    made = AutoTokenizer.from_pretrained(vllm_models.folder())
    made.chat_template = "{% for m in messages %}{{ m['content'] }}+{% endfor %}"
    return made


@pytest.fixture
def base_url(engine: Any, tokenizer: Any) -> Iterator[str]:
    endpoint = Endpoint(engine, tokenizer, EndpointSettings(token=TOKEN, model="policy", max_new_tokens=20))
    yield endpoint.start()
    endpoint.stop()


@pytest.fixture
def client(base_url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=base_url, api_key=TOKEN, max_retries=0, timeout=60) as made:
        yield made


def test_the_client_reads_what_the_engine_sampled(client: Any, vllm_models: Any, tokenizer: Any) -> None:
    answer: Any = client.chat.completions.create(
        model="policy", messages=MESSAGES, n=3, temperature=0.7, seed=5, logprobs=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    prompt = tokenizer.encode("12+3+4+")
    assert answer.prompt_token_ids == prompt
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3
    for choice in answer.choices:
        assert len(choice.token_ids) == 20
        expected = vllm_models.logprobs(vllm_models.folder(), [*prompt, *choice.token_ids], 0.7)[len(prompt) :]
        given = [entry.logprob for entry in choice.logprobs.content]
        np.testing.assert_allclose(given, expected, atol=1e-4)
        assert choice.message.content == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 60


def test_completions_and_models_by_the_client(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["policy"]
    first, second = (
        client.completions.create(model="policy", prompt=[3, 4, 5], max_tokens=8, seed=1, logprobs=0) for _ in range(2)
    )
    assert first.choices[0].text == second.choices[0].text
    assert first.choices[0].logprobs is not None


def test_refusals_are_the_clients_own_errors(client: Any, base_url: str) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=base_url, api_key="another", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="policy", messages=MESSAGES, stream=True)
    assert refused.value.param == "stream"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)


def test_many_agents_at_once_over_an_update_of_the_weights(base_url: str, engine: Any, vllm_models: Any) -> None:
    """64 agents, 8 places in the batch; none of them notices that the policy changes on the way."""
    weights = vllm_models.weights(vllm_models.folder(), 3)

    async def work() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=TOKEN, max_retries=0, timeout=60) as agent:
            body = {"return_token_ids": True, "ignore_eos": True}
            asking = [
                asyncio.create_task(
                    agent.completions.create(model="policy", prompt="1+2=", max_tokens=30, seed=i, extra_body=body)
                )
                for i in range(64)
            ]
            begin = engine.gauges()["tokens"]
            while engine.gauges()["tokens"] < begin + 200:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(engine.pause)
            await asyncio.to_thread(engine.load_weights, weights.items(), 1)
            engine.resume()
            return list(await asyncio.gather(*asking))

    answers = asyncio.run(asyncio.wait_for(work(), 60))
    versions = [answer.choices[0].weight_versions for answer in answers]
    assert all(len(each) == 30 and each == sorted(each) for each in versions)
    assert any(set(each) == {0, 1} for each in versions)
    assert sum(set(each) == {1} for each in versions) > 30
