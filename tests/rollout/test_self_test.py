"""What an engine samples with the run's cuts and penalties is what it scores, at every temperature."""

from __future__ import annotations

import numpy as np
import pytest

from pekoe.pipeline.rollout.engine import SamplingParameters
from pekoe.pipeline.rollout.engines.token_sampler import TokenSampler
from pekoe.pipeline.rollout.self_test import COMPLETION_LENGTH, check_engine

HARD = {
    "top_p": 0.7, "top_k": 9, "frequency_penalty": 1.0, "logit_bias": ((4, 3.0), (5, -100.0)), "min_new_tokens": 5,
    "stop_token_ids": (4,), "max_new_tokens": 3,
}  # fmt: skip


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("deterministic", [False, True])
def test_sampled_equals_scored_equals_a_plain_forward_pass(models, harness, prompts, temperature, deterministic):
    model = models.build()
    engine = harness.engine(model, deterministic=deterministic)
    sequences = [prompts[4][:16], prompts[9][:16]]
    found = check_engine(engine, 7, sequences, SamplingParameters(temperature=temperature, **HARD))
    wanted = [x for sequence in sequences for x in models.logprobs(model, sequence, temperature)]
    np.testing.assert_allclose(found.check, wanted, atol=1e-5)
    assert len(found.sampled) == len(found.scored) == COMPLETION_LENGTH
    np.testing.assert_allclose(found.sampled, found.scored, atol=1e-5)
    assert found.version == 7
    assert engine.gauges()["serving"] == 1


def test_logprobs_of_the_cut_distribution_are_found_out(models, harness, prompts, monkeypatch):
    sample = TokenSampler.sample

    def processed(self, logits, uniforms, forbidden=()):
        chosen, logprobs = sample(self, logits, uniforms, forbidden)
        return chosen, logprobs - np.log(0.7)

    monkeypatch.setattr(TokenSampler, "sample", processed)
    found = check_engine(harness.engine(models.build()), 0, [prompts[4]], SamplingParameters(**HARD))
    assert np.abs(np.array(found.sampled) - np.array(found.scored)).mean() > 0.3
