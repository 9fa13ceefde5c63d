"""With frozen weights the ratio is 1, whatever the temperature and the cuts; and what a step says of the gap."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pekoe.kernels.logprob.logprob import logits_logprobs
from pekoe.pipeline.algorithm.objective import PolicyObjective
from pekoe.pipeline.algorithm.token_logprobs import token_logprobs
from pekoe.pipeline.config.actor import ActorConfig
from pekoe.pipeline.records import Finish, PackedBatch, Trajectory, pack
from pekoe.pipeline.rollout.engine import EngineSettings, GenerationRequest, Instance, SamplingParameters
from pekoe.pipeline.rollout.engines.hf_engine import HfEngine
from pekoe.pipeline.train.engines.batch_tensors import batch_tensors
from pekoe.pipeline.train.step_statistics import UpdateSums

VERSION = 0
CUTS = (
    {}, {"top_p": 0.7}, {"top_k": 3}, {"frequency_penalty": 1.5, "logit_bias": ((6, 2.0), (7, -100.0))},
    {"min_new_tokens": 20},
)  # fmt: skip


def sampled(folder: Path, temperature: float) -> PackedBatch:
    """Completions of the hf engine under every cut."""
    settings = EngineSettings(str(folder), str(folder), "float32", "cpu", 0, max_slots=16, context_limit=64)
    engine = HfEngine.build(settings, Instance())

    async def work() -> list[Trajectory]:
        requests = [
            GenerationRequest(
                (4, 13, 5, 14), SamplingParameters(max_new_tokens=24, temperature=temperature, **cut), seed=seed
            )
            for cut in CUTS
            for seed in range(3)
        ]
        answers = await asyncio.gather(*map(engine.generate, requests))
        return [trajectory(request.tokens, answer) for request, answer in zip(requests, answers, strict=True)]

    try:
        return pack([(number, one) for number, one in enumerate(asyncio.run(asyncio.wait_for(work(), 60)))])
    finally:
        engine.close()


def trajectory(prompt, answer) -> Trajectory:
    before, count = len(prompt), len(answer.tokens)
    return Trajectory(
        tokens=np.concatenate([np.array(prompt, np.int32), answer.tokens]),
        loss_mask=np.array([0] * before + [1] * count, np.uint8),
        logprobs=np.concatenate([np.zeros(before, np.float32), answer.logprobs]),
        versions=np.concatenate([np.full(before, -1, np.int32), answer.versions]),
        turns=np.array([-1] * before + [0] * count, np.int32),
        prompt_length=before,
        reward=1.0,
        finish=Finish.STOP,
    )


def trainers(folder: Path, batch: PackedBatch, temperature: float) -> torch.Tensor:
    """Log-probs of the trainer's own function over plain forward passes, a sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parts = np.split(batch.tokens, batch.cu_seqlens[1:-1])
    with torch.inference_mode():
        logits = torch.cat([model(torch.from_numpy(part).long()[None]).logits[0] for part in parts])
        logprobs, _ = token_logprobs(
            lambda positions, targets: logits_logprobs(logits[positions], targets, temperature),
            torch.from_numpy(batch.tokens), torch.from_numpy(batch.cu_seqlens), torch.from_numpy(batch.loss_mask),
        )  # fmt: skip
    return logprobs


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_frozen_weights_give_ratio_one(tiny_model: Path, temperature: float) -> None:
    batch = sampled(tiny_model, temperature)
    mask = batch.loss_mask.astype(bool)
    logprobs = trainers(tiny_model, batch, temperature)
    ratio = np.exp(logprobs.numpy() - batch.logprobs)[mask]
    np.testing.assert_allclose(ratio, 1, atol=1e-4)
    wrong = np.exp(trainers(tiny_model, batch, 1.1 * temperature).numpy() - batch.logprobs)[mask]
    assert np.abs(wrong - 1).max() > 1e-2
    stats = gap_stats(batch, logprobs)
    assert stats["engine_gap/tokens"] == mask.sum()
    assert stats["engine_gap/mean"] <= stats["engine_gap/max"] < 1e-4
    assert stats["engine_gap/share_above_0.1"] == 0
    shifted = torch.where(torch.from_numpy(mask) & (torch.arange(len(mask)) % 10 == 0), logprobs + 0.2, logprobs)
    off = gap_stats(batch, shifted)
    share = (mask & (np.arange(len(mask)) % 10 == 0)).sum() / mask.sum()
    assert off["engine_gap/share_above_0.1"] == pytest.approx(share)
    assert off["engine_gap/drift"] == pytest.approx(0.2 * share, abs=1e-3)


def gap_stats(batch: PackedBatch, logprobs: torch.Tensor) -> dict[str, float]:
    """What a step would say, were these the trainer's log-probs."""
    batch.extra["prox_logprobs"] = logprobs.numpy()
    batch.extra["advantages"] = np.ones(len(batch.tokens), np.float32)
    active = int(batch.loss_mask.sum())
    objective = PolicyObjective(
        ActorConfig(), num_active=active, num_sequences=len(batch.lengths), max_new_tokens=24, version=VERSION
    )
    _, stats = objective(logprobs.clone(), None, batch_tensors(batch, torch.device("cpu")))
    return said({name: float(value) for name, value in stats.items()})


def said(stats: dict[str, float]) -> dict[str, float]:
    """Of a step with one update."""
    sums = UpdateSums()
    sums.add(stats, is_fresh=True)
    return sums.means("train") | sums.engine_gap()


def test_without_tokens_of_the_own_version_nothing_is_said() -> None:
    sums = {"tokens": 10.0, "ratio": 10.0, "fresh_tokens": 0.0, "fresh_gap": 0.0, "fresh_gap_max": 0.0}
    assert said(sums) == {"train/updates": 1.0, "train/tokens": 10.0, "train/ratio": 1.0}
