"""Deterministic mode: tokens and log-probs are equal to the bit, whatever else arrives and when."""

from __future__ import annotations

import asyncio
import random

import pytest

pytestmark = pytest.mark.vllm


@pytest.fixture
def groups(make_request, prompts):
    """Four groups of three samples; every sample asks twice."""
    return [
        make_request(
            prompts[group], seed=100 * group + 10 * sample, group=group, sample=sample, group_size=3,
            max_new_tokens=10 + 7 * sample,
        )
        for group in range(4)
        for sample in range(3)
    ]  # fmt: skip


def test_answers_are_equal_to_the_bit_in_whatever_company(engines, groups, make_request, prompts):
    engine = engines(deterministic=True)

    async def work(seed: int, crowd: int) -> dict:
        chance = random.Random(seed)
        found = {}

        async def one(request) -> None:
            await asyncio.sleep(chance.random() * 0.05)
            first = await engine.generate(request)
            longer = make_request(
                [*request.tokens, *first.tokens.tolist(), 4], seed=request.seed + 1, group=request.group,
                sample=request.sample, group_size=3, max_new_tokens=12,
            )  # fmt: skip
            second = await engine.generate(longer)
            found[request.group, request.sample] = [
                (answer.tokens.tolist(), answer.logprobs.tobytes()) for answer in (first, second)
            ]

        others = [make_request(prompts[i], seed=i, group=50 + i, max_new_tokens=9) for i in range(crowd)]
        order = chance.sample(groups, len(groups))
        await asyncio.gather(*map(one, order), *map(engine.generate, others))
        return found

    alone = engines.run(work(0, 0))
    for seed, crowd in ((1, 0), (2, 5), (3, 9)):
        assert engines.run(work(seed, crowd)) == alone
    again = engines.build(engines.settings(deterministic=True))
    assert again is not engine
    engine = again
    assert engines.run(work(4, 3)) == alone


def test_lower_groups_come_first(engines, groups):
    engine = engines(deterministic=True)
    finished: list[tuple[int, int]] = []

    async def one(request) -> None:
        await engine.generate(request)
        finished.append((request.group, request.sample))

    async def work() -> None:
        engine.pause()
        tasks = [asyncio.create_task(one(request)) for request in reversed(groups)]
        await asyncio.sleep(0.05)
        assert engine.gauges()["waiting"] == len(groups)
        engine.resume()
        await asyncio.gather(*tasks)

    engines.run(work())
    assert finished == sorted(finished)
