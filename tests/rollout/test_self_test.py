"""What an engine samples with the run's cuts and penalties is what it scores, at every temperature."""

from __future__ import annotations

import numpy as np
import pytest

from pekoe.pipeline.config.load import from_yaml_text
from pekoe.pipeline.rollout.engine import SamplingParameters
from pekoe.pipeline.rollout.engines.token_sampler import TokenSampler
from pekoe.pipeline.rollout.self_test import COMPLETION_LENGTH, PROMPT_LENGTH, check_engine
from pekoe.pipeline.runs.context import check_sequences

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


@pytest.mark.parametrize("limit", [3, 9])
def test_a_context_that_is_shorter_than_the_check_is_kept_to(models, harness, tiny_model, sums, limit):
    overrides = [f"actor.path={tiny_model}", f"train_dataset.path={sums}", f"gconfig.max_tokens={limit}"]
    sequences = check_sequences(from_yaml_text("", overrides))
    assert {len(sequence) for sequence in sequences} == {limit}
    engine = harness.engine(models.build(), context_limit=limit)
    found = check_engine(engine, 0, sequences, SamplingParameters())
    assert len(found.sampled) == max(1, limit - PROMPT_LENGTH)
    np.testing.assert_allclose(found.sampled, found.scored, atol=1e-5)


def test_logprobs_of_the_cut_distribution_are_found_out(models, harness, prompts, monkeypatch):
    sample = TokenSampler.sample

    def processed(self, logits, uniforms, forbidden=()):
        chosen, logprobs = sample(self, logits, uniforms, forbidden)
        return chosen, logprobs - np.log(0.7)

    monkeypatch.setattr(TokenSampler, "sample", processed)
    found = check_engine(harness.engine(models.build()), 0, [prompts[4]], SamplingParameters(**HARD))
    assert np.abs(np.array(found.sampled) - np.array(found.scored)).mean() > 0.3
