"""The engine's life: requests from several loops, cancellation, pause, failure, close, and another engine after it."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch
from safetensors import SafetensorError

from pekoe.pipeline.records import Finish
from pekoe.pipeline.rollout.engine import EngineClosedError, EngineFailedError, Instance
from pekoe.pipeline.rollout.engines.vllm.vllm_engine import VllmEngine

pytestmark = pytest.mark.vllm

GAUGES = {"running", "waiting", "tokens", "prefilled_tokens", "steps", "cache_bytes", "version", "serving"}


def test_greedy_equals_transformers(vllm_models, engines, make_request, prompts):
    folder = vllm_models.folder()
    responses = engines.generate(engines(), [make_request(p, greedy=True, max_new_tokens=20) for p in prompts])
    for prompt, response in zip(prompts, responses, strict=True):
        tokens = list(prompt)
        for _ in range(20):
            logits = vllm_models.forward(folder, vllm_models.weights(folder), torch.tensor([tokens]))
            tokens.append(int(logits[-1].argmax()))
        assert response.tokens.tolist() == tokens[len(prompt) :]
        assert response.finish == Finish.LENGTH
        assert response.versions.tolist() == [0] * 20


def test_requests_from_several_loops_are_all_answered(engines, make_request, prompts):
    engine = engines()

    def loop(first: int) -> list:
        requests = [make_request(p, seed=first + i, max_new_tokens=5 + i) for i, p in enumerate(prompts)]
        return engines.generate(engine, requests)

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(loop, (0, 100, 200)))
    for responses in answers:
        assert [len(response.tokens) for response in responses] == [5 + i for i in range(len(prompts))]
    assert engine.gauges()["running"] == engine.gauges()["waiting"] == 0
    assert set(engine.gauges()) >= GAUGES


def test_samples_of_a_prompt_share_its_prefill(engines, make_request):
    engine = engines()
    prompt = [3 + (7 * i) % 13 for i in range(129)]
    before = engine.gauges()["prefilled_tokens"]
    responses = engines.generate(engine, [make_request(prompt, seed=i, max_new_tokens=4) for i in range(8)])
    assert engine.gauges()["prefilled_tokens"] - before == 128
    assert len({tuple(response.tokens) for response in responses}) > 1
    alone = engines(enable_prefix_caching=False)
    before = alone.gauges()["prefilled_tokens"]
    engines.generate(alone, [make_request(prompt, seed=i, max_new_tokens=4) for i in range(8)])
    assert alone.gauges()["prefilled_tokens"] - before == 8 * 128


def test_a_cancelled_request_leaves_its_slot_and_the_others_do_not_notice(engines, make_request, prompts):
    engine = engines()
    requests = [make_request(p, seed=i, max_new_tokens=40) for i, p in enumerate(prompts)]
    wanted = engines.generate(engine, requests)

    async def work() -> list:
        doomed = [asyncio.create_task(engine.generate(make_request([3], max_new_tokens=200))) for _ in range(12)]
        while engine.gauges()["running"] < 8:
            await asyncio.sleep(0.001)
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(0)
        for task in doomed:
            task.cancel()
        return await asyncio.gather(*tasks)

    before = engine.gauges()["tokens"]
    for response, other in zip(engines.run(work()), wanted, strict=True):
        assert response.tokens.tolist() == other.tokens.tolist()
    assert engine.gauges()["tokens"] - before < 12 * 40 + 12 * 200
    assert engine.gauges()["running"] == engine.gauges()["waiting"] == 0


def test_a_pause_stops_at_a_token_and_requests_go_on_after_it(engines, make_request, prompts):
    engine = engines()
    requests = [make_request(p, seed=i, max_new_tokens=60) for i, p in enumerate(prompts)]
    wanted = engines.generate(engine, requests)
    seen = []

    def look() -> None:
        with pytest.raises(RuntimeError, match="while it is paused"):
            engine.pause()
        sampled = engine.gauges()["tokens"]
        busy = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - busy < 0.1, "waiting costs no processor"
        seen.append(engine.gauges()["tokens"] - sampled)
        assert engine.gauges()["serving"] == 0

    responses = engines.interrupted(engine, requests, 50, look)
    assert seen == [0]
    for response, other in zip(responses, wanted, strict=True):
        assert response.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(response.logprobs, other.logprobs, atol=1e-5)


def test_an_idle_engine_costs_no_processor(engines, make_request):
    engine = engines()
    engines.generate(engine, [make_request([3, 4], max_new_tokens=2)])
    time.sleep(0.1)
    busy = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - busy < 0.1


def test_a_request_that_cannot_be_served_is_refused_before_the_engine(engines, make_request):
    engine = engines()
    steps = engine.gauges()["steps"]
    refused = [
        (make_request([]), "the prompt is empty"),
        (make_request([3, 99]), "id 99 is not in the vocabulary; allowed: 0 to 15"),
        (make_request([3], seed=-1), "request.seed: -1"),
        (make_request([3], temperature=0.0), "gconfig.temperature"),
        (make_request([3], top_p=0.0), "gconfig.top_p"),
        (make_request([3], adapter="style"), "request.adapter: .style. is not loaded"),
    ]
    for request, message in refused:
        with pytest.raises(ValueError, match=message):
            engines.generate(engine, [request])
    assert engine.gauges()["steps"] == steps


def test_an_exception_in_a_step_fails_the_requests_and_another_engine_can_be_built(engines, make_request, prompts):
    failures: list[BaseException] = []
    engine = engines.build(engines.settings(), failures.append)
    requests = [make_request(p, seed=i, max_new_tokens=60) for i, p in enumerate(prompts)]
    wanted = engines.generate(engine, requests)
    with ThreadPoolExecutor(1) as pool:
        goal = engine.gauges()["tokens"] + 50

        async def work() -> list:
            return await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)

        running = pool.submit(engines.run, work())
        while engine.gauges()["tokens"] < goal:
            time.sleep(0.0005)

        def explode(*_: object, **__: object) -> None:
            raise ArithmeticError("a device has failed")

        model = weakref.ref(engine._core.model)
        engine._core.model.forward = explode
        outcomes = running.result(60)
    errors = [outcome for outcome in outcomes if isinstance(outcome, EngineFailedError)]
    assert errors
    assert all(isinstance(error.__cause__, ArithmeticError) for error in errors)
    assert failures == [engine.failure]
    with pytest.raises(EngineFailedError, match="a device has failed"):
        engines.generate(engine, requests[:1])
    with pytest.raises(EngineFailedError):
        engine.pause()
    engine.close()
    assert engine.gauges()["tokens"] >= goal, "what it has done is counted still"
    gc.collect()
    assert model() is None, "whoever keeps the error or the engine does not keep the weights"
    again = engines.build(engines.settings())
    for response, other in zip(engines.generate(again, requests), wanted, strict=True):
        assert response.tokens.tolist() == other.tokens.tolist()


def test_logits_that_are_not_numbers_fail_the_engine(engines, vllm_models, make_request):
    engine = engines()
    weights = vllm_models.weights(vllm_models.folder())
    engine.pause()
    engine.load_weights({**weights, "model.norm.weight": weights["model.norm.weight"] * float("nan")}.items(), 5)
    engine.resume()
    with pytest.raises(EngineFailedError, match=r"FloatingPointError: .*weight version 5"):
        engines.generate(engine, [make_request([3, 4])])


def test_a_cache_too_small_for_all_delays_but_changes_nothing(engines, make_request, prompts):
    requests = [make_request(p, seed=i, max_new_tokens=180) for i, p in enumerate(prompts)]
    wanted = engines.generate(engines(), requests)
    small = engines(kv_cache_gib=0.0006)
    before = small.gauges()["prefilled_tokens"]
    responses = engines.generate(small, requests)
    assert small.gauges()["prefilled_tokens"] - before > 400 + sum(map(len, prompts)), "some were computed again"
    for response, other in zip(responses, wanted, strict=True):
        assert response.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(response.logprobs, other.logprobs, atol=1e-5)


def test_the_process_is_left_as_it_was(engines):
    engines.close()
    torch.manual_seed(11), random.seed(11), np.random.seed(11)

    def state() -> tuple:
        affinity = {os.sched_getaffinity(int(task)) == whole for task in os.listdir("/proc/self/task")}
        numbers = (torch.rand(1).item(), random.random(), np.random.random())
        torch.manual_seed(11), random.seed(11), np.random.seed(11)
        return numbers, affinity, torch.set_num_threads, psutil.Process().children()

    whole = os.sched_getaffinity(0)
    before = state()
    engines.build(engines.settings())
    assert state() == before
    assert before[1:] == ({True}, torch.set_num_threads, [])


def test_close_fails_the_requests_and_leaves_nothing_behind(engines, make_request):
    engine = engines()
    with ThreadPoolExecutor(1) as pool:
        goal = engine.gauges()["tokens"] + 20
        running = pool.submit(
            engines.generate, engine, [make_request([3], seed=i, max_new_tokens=250) for i in range(8)]
        )
        while engine.gauges()["tokens"] < goal:
            time.sleep(0.0005)
        engine.close()
        with pytest.raises(EngineClosedError):
            running.result(60)
    engine.close()
    with pytest.raises(EngineClosedError):
        engines.generate(engine, [make_request([3])])
    assert not torch.distributed.is_initialized()
    assert not [thread.name for thread in threading.enumerate() if thread.name == "vllm-engine"]


def test_engines_one_after_the_other_do_not_grow_the_process(engines):
    sizes = []
    for _ in range(3):
        engines.build(engines.settings(kv_cache_gib=0.125))
        engines.close()
        sizes.append(resident_bytes())
    assert sizes[-1] - sizes[0] < 64 << 20, sizes


def test_a_default_group_of_somebody_else_is_refused(engines):
    engines.close()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match=r"rollout.engine_process: .* is taken .*; allowed here: child"):
            VllmEngine.build(engines.settings(), Instance())
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


def test_a_failed_build_leaves_nothing_behind(engines, make_request, tmp_path):
    engines.close()
    with pytest.raises(ValueError, match=r"gconfig.max_tokens: 513; allowed: 2 to the model's 512 positions"):
        VllmEngine.build(engines.settings(context_limit=513), Instance())
    with pytest.raises(ValueError, match=r"rollout.dtype: 'float64' with vllm; allowed: float32"):
        VllmEngine.build(engines.settings(dtype="float64"), Instance())
    with pytest.raises(ValueError, match=r"cluster.device: cuda, but the vLLM installed here is built for cpu"):
        VllmEngine.build(engines.settings(device="cuda"), Instance())
    with pytest.raises(ValueError, match=r"vllm.extra: \['strange'\]; allowed: the engine arguments"):
        VllmEngine.build(engines.settings(extra={"strange": 1}), Instance())
    with pytest.raises(ValueError, match=r"vllm refuses .*vllm\.extra \{'hf_overrides': 3\}: .*should be callable"):
        VllmEngine.build(engines.settings(extra={"hf_overrides": 3}), Instance())
    with pytest.raises(
        ValueError, match=r"vllm\.kv_cache_gib: .* does not hold one sequence of 256 tokens; allowed: >="
    ):
        VllmEngine.build(engines.settings(kv_cache_gib=1e-5), Instance())
    narrow = engines.models.folder(head_dim=16)
    with pytest.raises(ValueError, match=r"rollout\.path: .* heads of size 16, .* on a cpu; allowed: 32, 64"):
        VllmEngine.build(engines.settings(narrow), Instance())
    shutil.copytree(engines.models.folder(), tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 64)
    with pytest.raises(SafetensorError):  # found when vLLM has made its groups
        VllmEngine.build(engines.settings(tmp_path / "damaged"), Instance())
    assert not torch.distributed.is_initialized()
    engine = engines.build(engines.settings(extra={"max_num_batched_tokens": 32}))
    before = engine.gauges()["steps"]
    engines.generate(engine, [make_request([3] * 100, max_new_tokens=1)])
    assert engine.gauges()["steps"] - before == 4


def test_the_trainers_variables_and_the_network_are_not_looked_at(engines, vllm_models):
    """An engine is built and serves with the trainer's RANK and WORLD_SIZE around it and no socket to be had. In the
    log of its rank it says nothing but where its memory is."""
    program = (
        "import asyncio, logging, socket, sys, os\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "logging.captureWarnings(True)\n"
        "from pekoe.pipeline.rollout.engine import *\n"
        "from pekoe.pipeline.rollout.engines.vllm.vllm_engine import VllmEngine\n"
        "def refuse(*_): raise OSError('no network here')\n"
        "if __name__ == '__main__':\n"
        "    socket.socket.connect = refuse\n"
        "    settings = EngineSettings(sys.argv[1], sys.argv[1], 'float32', 'cpu', 0, 4, 64)\n"
        "    engine = VllmEngine.build(settings, Instance())\n"
        "    request = GenerationRequest((3, 4), SamplingParameters(max_new_tokens=5, ignore_eos=True))\n"
        "    print('TOKENS', len(asyncio.run(engine.generate(request)).tokens))\n"
        "    engine.close()\n"
    )
    trainer = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "1"}
    environment = {**os.environ, **trainer}
    found = subprocess.run(
        [sys.executable, "-c", program, str(vllm_models.folder())],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert found.stdout == "TOKENS 5\n", found.stderr[-2000:]
    assert not [line for line in found.stderr.splitlines() if "NUMA binding" not in line], found.stderr
    assert found.returncode == 0


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
