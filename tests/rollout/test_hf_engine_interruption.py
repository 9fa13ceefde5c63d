"""Weights in flight: interrupted at any token, failing loads, waiting for a version, sleep, cancel, failure, idling."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
import torch

from pekoe.pipeline.records import Finish
from pekoe.pipeline.rollout.engine import EngineClosedError
from pekoe.pipeline.rollout.engines.batch_decoder import BatchDecoder
from pekoe.pipeline.rollout.engines.sequence_state import SequenceState
from pekoe.pipeline.rollout.engines.served_model import ServedModel
from pekoe.pipeline.rollout.engines.stop_check import StopCheck


def weights_of(model):
    return [(name, tensor.clone()) for name, tensor in model.state_dict().items()]


def borrowed(weights):
    """Each tensor is only valid until the next one is asked for."""
    for name, tensor in weights:
        buffer = tensor.clone()
        yield name, buffer
        buffer.fill_(float("nan"))


async def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.002)


def decoder_over(model, **changes):
    served = ServedModel("", "float32", torch.device("cpu"), model)
    settings = {"max_slots": 6, "context_limit": 256, "deterministic": False, "prefill_tokens": 16}
    return BatchDecoder(served, **settings | changes)


def turn(decoder, version):
    decoder.admit(version)
    while decoder.prefill():
        pass
    return decoder.decode(version)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_prefix_matches_the_old_weights_and_suffix_the_new_at_every_position(
    models, make_request, prompts, kind, deterministic
):
    old, new = models.build(kind, seed=0), models.build(kind, seed=1)
    served = models.build(kind, seed=0)
    length = 12
    for position in range(length + 1):
        decoder = decoder_over(served, deterministic=deterministic)
        decoder.model.load_weights(weights_of(old))
        chosen = [prompts[4], prompts[4], prompts[4], prompts[2], prompts[9], prompts[1]]
        sequences = [
            SequenceState(
                make_request(p, seed=i, sample=i, group_size=6, max_new_tokens=length),
                StopCheck(frozenset(), (), 0, length, None),
                lambda _: None,
            )
            for i, p in enumerate(chosen)
        ]
        decoder.waiting.extend(sequences)
        for _ in range(position):
            turn(decoder, 3)
        decoder.model.load_weights(borrowed(weights_of(new)))
        decoder.invalidate()
        while decoder.has_work(4):
            turn(decoder, 4)
        for prompt, sequence in zip(chosen, sequences, strict=True):
            response = sequence.response()
            whole = [*prompt, *response.tokens]
            before = models.logprobs(old, whole)[len(prompt) :]
            after = models.logprobs(new, whole)[len(prompt) :]
            assert response.versions.tolist() == [3] * position + [4] * (length - position)
            assert np.abs(response.logprobs[:position] - before[:position]).max(initial=0) < 1e-4
            assert np.abs(response.logprobs[position:] - after[position:]).max(initial=0) < 1e-4


def test_recomputing_shares_the_prompt_of_a_group(models, make_request, prompts):
    decoder = decoder_over(models.build(), prefill_tokens=1000)
    prompt = prompts[9]
    for i in range(5):
        request = make_request(prompt, seed=i, max_new_tokens=20)
        decoder.waiting.append(SequenceState(request, StopCheck(frozenset(), (), 0, 20, None), lambda _: None))
    for _ in range(7):
        turn(decoder, 0)
    assert decoder.num_prefilled == len(prompt) - 1
    decoder.invalidate()
    turn(decoder, 0)
    assert decoder.num_prefilled == 2 * (len(prompt) - 1) + 5 * 7


def test_engine_updates_in_flight(models, harness, make_request, prompts):
    """Many updates at arbitrary moments while requests come and go: every token fits the weights it names."""
    versions = [models.build(seed=i) for i in range(6)]
    engine = harness.engine(versions[0], max_slots=5)

    async def work():
        requests = [make_request(p, seed=i, max_new_tokens=60 + 7 * i) for i, p in enumerate(prompts)]
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        for version in range(1, 6):
            seen = engine.gauges()["tokens"]
            await until(lambda seen=seen: engine.gauges()["tokens"] >= seen + 120)
            await asyncio.to_thread(engine.pause)
            assert engine.gauges()["serving"] == 0
            stopped = engine.gauges()["tokens"]
            await asyncio.to_thread(engine.load_weights, borrowed(weights_of(versions[version])), version)
            assert engine.gauges()["tokens"] == stopped
            assert engine.gauges()["version"] == version
            engine.resume()
        return await asyncio.gather(*tasks)

    mixed = 0
    for prompt, response in zip(prompts, harness.run(work()), strict=True):
        whole = [*prompt, *response.tokens]
        assert (np.diff(response.versions) >= 0).all()
        mixed += len(set(response.versions.tolist())) > 1
        for version in set(response.versions.tolist()):
            wanted = models.logprobs(versions[version], whole)[len(prompt) :]
            at = response.versions == version
            assert np.abs(response.logprobs[at] - wanted[at]).max() < 1e-4
    assert mixed >= 3


@pytest.mark.parametrize("tied", [False, True])
def test_load_of_every_name_and_of_wrong_ones(models, harness, make_request, prompts, tied):
    old, new = models.build(seed=0, tie_word_embeddings=tied), models.build(seed=1, tie_word_embeddings=tied)
    engine = harness.engine(old)
    weights = weights_of(new)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= dict(weights).keys()
    wrong = [
        (weights[:-1], r"weights: 1 of \d+ tensors are missing"),
        ([*weights, ("model.extra", torch.zeros(1))], "weights: 'model.extra' is not in the model"),
        ([weights[0], *weights], f"weights: {weights[0][0]!r} was given twice"),
        ([(weights[0][0], torch.zeros(3, 2)), *weights[1:]], r"has shape \(3, 2\); allowed: the model's \(96, 32\)"),
    ]
    if tied:
        parted = [(n, t + 1 if n == "lm_head.weight" else t) for n, t in weights]
        wrong.append((parted, "weights: 'lm_head.weight' is tied to 'model.embed_tokens.weight'"))
    engine.pause()
    for bad, message in wrong:
        with pytest.raises(ValueError, match=message):
            engine.load_weights(iter(bad), 1)
        assert engine.gauges()["version"] == 0
    engine.load_weights(borrowed(weights), 1)
    engine.resume()
    response = harness.generate(engine, [make_request(prompts[1], max_new_tokens=10)])[0]
    wanted = models.logprobs(new, [*prompts[1], *response.tokens])[len(prompts[1]) :]
    assert np.abs(response.logprobs - wanted).max() < 1e-4
    assert response.versions.tolist() == [1] * 10


def test_nothing_is_served_between_a_failed_load_and_a_full_one(models, harness, make_request, prompts):
    old, new = models.build(seed=0), models.build(seed=1)
    engine = harness.engine(old)

    def breaking():
        yield from weights_of(new)[:5]
        raise ConnectionError("the sender is gone")

    async def work():
        running = asyncio.ensure_future(engine.generate(make_request(prompts[1], seed=4, max_new_tokens=100)))
        await until(lambda: engine.gauges()["tokens"] >= 10)
        await asyncio.to_thread(engine.pause)
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(engine.load_weights, breaking(), 1)
        engine.resume()
        later = asyncio.ensure_future(engine.generate(make_request(prompts[3], seed=4, max_new_tokens=5)))
        sampled = engine.gauges()["tokens"]
        await asyncio.sleep(0.3)
        assert engine.gauges()["tokens"] == sampled
        assert engine.gauges()["serving"] == 0
        assert not running.done()
        assert not later.done()
        await asyncio.to_thread(engine.pause)
        await asyncio.to_thread(engine.load_weights, weights_of(new), 1)
        engine.resume()
        return await asyncio.gather(running, later)

    first, second = harness.run(work())
    assert set(first.versions) == {0, 1}
    assert set(second.versions) == {1}
    wanted = models.logprobs(new, [*prompts[1], *first.tokens])[len(prompts[1]) :]
    assert np.abs((first.logprobs - wanted)[first.versions == 1]).max() < 1e-4


def test_a_request_waits_for_its_minimum_version(models, harness, make_request, prompts):
    engine = harness.engine(models.build())

    async def work():
        late = asyncio.ensure_future(engine.generate(make_request(prompts[0], min_version=2, max_new_tokens=4)))
        now = await engine.generate(make_request(prompts[1], max_new_tokens=4))
        assert not late.done()
        assert now.versions.tolist() == [0] * 4
        for version in (1, 2):
            assert not late.done()
            await asyncio.to_thread(engine.pause)
            await asyncio.to_thread(engine.load_weights, weights_of(models.build(seed=version)), version)
            engine.resume()
            await engine.generate(make_request(prompts[1], max_new_tokens=4))
        return await late

    assert harness.run(work()).versions.tolist() == [2] * 4


def test_sleep_frees_the_cache_and_sequences_go_on_after_waking(models, harness, make_request, prompts):
    model = models.build().double()
    request = make_request(prompts[1], seed=8, max_new_tokens=150)
    wanted = harness.generate(harness.engine(model), [request])[0]
    engine = harness.engine(model)

    async def work():
        task = asyncio.ensure_future(engine.generate(request))
        await until(lambda: engine.gauges()["tokens"] >= 20)
        await asyncio.to_thread(engine.pause)
        assert engine.gauges()["cache_bytes"] > 0
        engine.sleep()
        assert engine.gauges()["cache_bytes"] == 0
        with pytest.raises(RuntimeError, match="sleeps"):
            engine.resume()
        engine.wake()
        engine.resume()
        return await task

    response = harness.run(work())
    assert response.tokens.tolist() == wanted.tokens.tolist()
    np.testing.assert_allclose(response.logprobs, wanted.logprobs, atol=1e-5)


def test_pause_is_not_nested_and_what_needs_a_pause_says_so(models, harness):
    engine = harness.engine(models.build())
    for call in (
        engine.resume,
        engine.sleep,
        engine.wake,
        lambda: engine.load_weights([], 1),
        lambda: engine.logprobs([]),
    ):
        with pytest.raises(RuntimeError, match="needs a paused engine"):
            call()
    engine.pause()
    with pytest.raises(RuntimeError, match="while it is paused"):
        engine.pause()
    engine.resume()
    engine.pause()


def test_cancelling_frees_the_slot_at_once(models, harness, make_request, prompts):
    model = models.build().double()
    engine = harness.engine(model, max_slots=2)

    async def work():
        long = [
            asyncio.ensure_future(engine.generate(make_request(p, seed=1, max_new_tokens=200))) for p in prompts[:2]
        ]
        await until(lambda: engine.gauges()["tokens"] >= 10)
        waiting = asyncio.ensure_future(engine.generate(make_request(prompts[3], seed=2, max_new_tokens=6)))
        queued = asyncio.ensure_future(engine.generate(make_request(prompts[5], seed=2, max_new_tokens=6)))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        queued.cancel()
        long[0].cancel()
        sampled = engine.gauges()["tokens"]
        response = await waiting
        assert engine.gauges()["tokens"] - sampled < 60
        assert not long[1].done()
        with pytest.raises(asyncio.CancelledError):
            await long[0]
        return response, await long[1]

    response, survivor = harness.run(work())
    fresh = harness.engine(model)
    same = harness.generate(fresh, [make_request(prompts[3], seed=2, max_new_tokens=6)])[0]
    assert response.tokens.tolist() == same.tokens.tolist()
    same = harness.generate(fresh, [make_request(prompts[1], seed=1, max_new_tokens=200)])[0]
    assert survivor.tokens.tolist() == same.tokens.tolist()
    assert engine.gauges()["running"] == engine.gauges()["waiting"] == 0


def test_cancelling_while_paused(models, harness, make_request, prompts):
    engine = harness.engine(models.build())

    async def work():
        task = asyncio.ensure_future(engine.generate(make_request(prompts[0], max_new_tokens=200)))
        await until(lambda: engine.gauges()["tokens"] >= 5)
        await asyncio.to_thread(engine.pause)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.gauges()["running"] == 0
        engine.resume()
        return await engine.generate(make_request(prompts[1], max_new_tokens=3))

    assert harness.run(work()).finish == Finish.LENGTH


def test_a_failure_in_the_engine_thread_reaches_every_request(models, harness, make_request, prompts):
    model = models.build()
    engine = harness.engine(model, max_slots=2)
    reported = []
    engine.on_failure = reported.append
    broken = weights_of(model)
    broken = [(n, torch.full_like(t, float("nan")) if n == "model.norm.weight" else t) for n, t in broken]

    async def work():
        tasks = [asyncio.ensure_future(engine.generate(make_request(p, max_new_tokens=100))) for p in prompts[:5]]
        await until(lambda: engine.gauges()["tokens"] >= 5)
        await asyncio.to_thread(engine.pause)
        await asyncio.to_thread(engine.load_weights, broken, 7)
        engine.resume()
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = harness.run(work())
    assert len(outcomes) == 5
    for outcome in outcomes:
        assert isinstance(outcome, RuntimeError)
        assert "logits are not finite" in str(outcome)
        assert "version 7" in str(outcome)
        assert isinstance(outcome.__cause__, FloatingPointError)
    assert [type(error) for error in reported] == [FloatingPointError]
    assert isinstance(engine.failure, FloatingPointError)
    with pytest.raises(RuntimeError, match="hf engine failed"):
        harness.generate(engine, [make_request(prompts[0])])
    with pytest.raises(RuntimeError, match="hf engine failed"):
        engine.pause()


def test_close_fails_requests_under_way(models, harness, make_request, prompts):
    engine = harness.engine(models.build())

    async def work():
        task = asyncio.ensure_future(engine.generate(make_request(prompts[0], max_new_tokens=200)))
        await until(lambda: engine.gauges()["tokens"] >= 5)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineClosedError):
            await task
        with pytest.raises(EngineClosedError):
            await engine.generate(make_request(prompts[0]))

    harness.run(work())
    engine.close()
    assert "hf-engine" not in [t.name for t in threading.enumerate() if t is engine._thread]


def test_an_idle_or_paused_engine_burns_no_cpu(models, harness, make_request, prompts):
    engine = harness.engine(models.build())
    harness.generate(engine, [make_request(prompts[0], max_new_tokens=4)])
    for step in (lambda: None, engine.pause):
        step()
        start = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - start < 0.1


def test_penalties_count_the_same_tokens_whoever_comes_and_goes(models, harness, make_request, prompts):
    """Rows are made anew when a sequence enters, leaves or is interrupted: what a completion has is counted again."""
    model = models.build().double()
    fields = {"frequency_penalty": 1.2, "logit_bias": ((3, 2.0), (7, -100.0)), "temperature": 0.8}
    requests = [
        make_request(p, seed=i, max_new_tokens=n, **(fields if i % 3 else {}))
        for i, (p, n) in enumerate(zip(prompts, [40, 90, 5, 60, 12, 70, 3, 33, 80, 20, 9, 50], strict=True))
    ]
    alone = harness.engine(model, max_slots=1)
    wanted = [harness.generate(alone, [request])[0].tokens.tolist() for request in requests]
    engine = harness.engine(model, max_slots=4)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    async def work():
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        for version in range(1, 6):
            before = engine.gauges()["tokens"]
            while engine.gauges()["tokens"] < before + 30 and not all(task.done() for task in tasks):
                await asyncio.sleep(0.001)
            engine.pause()
            engine.load_weights(state.items(), version)
            engine.resume()
        return await asyncio.gather(*tasks)

    answers = harness.run(work())
    assert [answer.tokens.tolist() for answer in answers] == wanted
    assert max(int(answer.versions.max()) for answer in answers) > 1
    for request, answer in zip(requests, answers, strict=True):
        assert not request.sampling.logit_bias or 7 not in answer.tokens
