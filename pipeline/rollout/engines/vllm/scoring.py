"""Log-probs of given sequences by vLLM's own passes: all but the last token as a prompt, the last one forced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from pekoe.pipeline.records import Float32
from pekoe.pipeline.rollout.engines.vllm.core_build import model_runner
from pekoe.pipeline.rollout.engines.vllm.core_requests import scoring_request
from pekoe.pipeline.rollout.engines.vllm.row_sampler import RowSampler, Scoring


def score(
    client: Any, sampler: RowSampler, advance: Callable[[], list[Any]], sequences: Sequence[Sequence[int]],
    temperature: float,
) -> list[Float32]:  # fmt: skip
    """Token-aligned log-probs [T] (first is 0). Nothing else may be in vLLM's batch. Memory: the logits of one pass."""
    results: list[Float32] = [np.zeros(len(tokens), np.float32) for tokens in sequences]
    pending = {f"score-{place}": place for place, tokens in enumerate(sequences) if len(tokens) > 1}
    sampler.scoring = Scoring(temperature, {key: sequences[place][-1] for key, place in pending.items()})
    try:
        for key, place in pending.items():
            client.add_request(scoring_request(key, sequences[place][:-1]))
        with no_adapter_on_logits(model_runner(client).get_model()):
            while pending:
                for output in advance():
                    result = results[pending.pop(output.request_id)]
                    if output.new_prompt_logprobs_tensors is not None:
                        result[1:-1] = output.new_prompt_logprobs_tensors.logprobs[:, 0].numpy()
                    result[-1] = output.new_logprobs.logprobs[0, 0]
    finally:
        sampler.scoring = None
    return results


@contextlib.contextmanager
def no_adapter_on_logits(model: torch.nn.Module) -> Iterator[None]:
    """With room for adapters, vLLM's logits expect one row per sequence, and a prompt's log-probs need one per token.
    What is scored is the model itself, so adapters have nothing to add."""
    wrapped = [
        (parent, name, module.base_layer)
        for parent in model.modules() for name, module in parent.named_children()
        if type(module).__name__ == "LogitsProcessorWithLoRA"
    ]  # fmt: skip
    kept = [getattr(parent, name) for parent, name, _ in wrapped]
    for parent, name, base in wrapped:
        setattr(parent, name, base)
    try:
        yield
    finally:
        for (parent, name, _), module in zip(wrapped, kept, strict=True):
            setattr(parent, name, module)
