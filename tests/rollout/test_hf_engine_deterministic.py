"""`rollout.deterministic`: a group's tokens and log-probs are bit-equal whatever else runs, whenever they arrive."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

SIZE = 4


def group_of(make_request, prompts, number, **fields):
    settings = {"max_new_tokens": 20 + 9 * (number % 5), "temperature": 0.9} | fields
    return [
        make_request(
            prompts[number % len(prompts)], seed=1000 * number + i, group=number, sample=i, group_size=SIZE, **settings
        )
        for i in range(SIZE)
    ]  # fmt: skip


def same(first, second):
    for one, other in zip(first, second, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


@pytest.mark.parametrize("kind", ["qwen3", "moe"])
def test_bit_equal_whatever_else_runs(models, harness, make_request, prompts, kind):
    model = models.build(kind)
    groups = [group_of(make_request, prompts, n, max_new_tokens=8 if kind == "moe" else 20 + 9 * n) for n in range(6)]
    alone = [harness.generate(harness.engine(model, deterministic=True), group) for group in groups]
    for response, request in zip(alone[3], groups[3], strict=True):
        wanted = models.logprobs(model, [*request.tokens, *response.tokens], 0.9)[len(request.tokens) :]
        assert np.abs(response.logprobs - wanted).max() < 1e-5

    engine = harness.engine(model, deterministic=True)
    together = harness.generate(engine, [request for group in groups for request in group])
    for n in range(6):
        same(together[n * SIZE : (n + 1) * SIZE], alone[n])
    generator = np.random.default_rng(0)
    for _ in range(3):
        order = generator.permutation(6 * SIZE)

        async def scattered(order=order):
            async def one(place, index):
                await asyncio.sleep(0.004 * place)
                return index, await engine.generate(groups[index // SIZE][index % SIZE])

            return dict(await asyncio.gather(*(one(p, i) for p, i in enumerate(order))))

        found = harness.run(scattered())
        for n in range(6):
            same([found[n * SIZE + i] for i in range(SIZE)], alone[n])


def test_lowest_group_first_and_one_at_a_time(models, harness, make_request, prompts):
    engine = harness.engine(models.build(), deterministic=True)
    ended = []

    async def work():
        async def one(request):
            await engine.generate(request)
            ended.append(request.group)

        engine.pause()
        tasks = [
            asyncio.ensure_future(one(r))
            for n in (4, 2, 5, 1)
            for r in group_of(make_request, prompts, n, max_new_tokens=6)
        ]
        await asyncio.sleep(0)
        engine.resume()
        await asyncio.gather(*tasks)

    harness.run(work())
    assert ended == [n for n in (1, 2, 4, 5) for _ in range(SIZE)]


def test_later_turns_of_some_samples_and_requests_without_a_group(models, harness, make_request, prompts):
    """Only some samples ask again, one of them twice at once, and requests without a group beside: all are served."""
    engine = harness.engine(models.build(), deterministic=True)
    first = group_of(make_request, prompts, 3)
    turns = [make_request(prompts[7], seed=i, group=3, sample=i, group_size=SIZE, max_new_tokens=8) for i in (2, 0, 2)]
    free = [make_request(p, seed=5, max_new_tokens=8) for p in prompts[:3]]
    responses = harness.generate(engine, [*first, *turns, *free])
    assert [len(response.tokens) for response in responses[SIZE:]] == [8] * 6
    assert responses[SIZE].tokens.tolist() == responses[SIZE + 2].tokens.tolist()


def test_a_group_above_the_slots_is_refused(models, harness, make_request, prompts):
    engine = harness.engine(models.build(), deterministic=True, max_slots=3)
    with pytest.raises(
        ValueError, match=r"gconfig.n_samples: a deterministic group of 4; allowed: 1 to rollout.max_slots"
    ):
        harness.generate(engine, group_of(make_request, prompts, 1))


def test_free_mode_answers_are_the_same_up_to_rounding(models, harness, make_request, prompts):
    model = models.build().double()
    group = group_of(make_request, prompts, 4)
    fixed = harness.generate(harness.engine(model, deterministic=True), group)
    free = harness.generate(harness.engine(model), group)
    for one, other in zip(fixed, free, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
