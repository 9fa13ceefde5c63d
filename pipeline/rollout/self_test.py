"""What an engine samples is what it scores: a short completion with the run's own sampling parameters, scored again."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from pekoe.pipeline.messages import LogprobsChecked
from pekoe.pipeline.rollout.engine import GenerationRequest, InferenceEngine, Response, SamplingParameters

PROMPT_LENGTH, COMPLETION_LENGTH = 8, 16


def check_engine(
    engine: InferenceEngine, version: int, sequences: Sequence[Sequence[int]], sampling: SamplingParameters,
    generate: Callable[[GenerationRequest], Coroutine[Any, Any, Response]] | None = None,
) -> LogprobsChecked:  # fmt: skip
    """Log-probs of the check sequences, and of a completion of the first one's beginning as it was sampled and as it is
    scored. The engine must be running; it is paused for the scores. `sampling` decides what is drawn; end tokens and
    stop strings do not end the completion. `generate` is called in place of the engine's own."""
    free = dataclasses.replace(
        sampling, max_new_tokens=COMPLETION_LENGTH, min_new_tokens=0, ignore_eos=True, stop=(), stop_token_ids=()
    )
    prompt = tuple(sequences[0][: min(PROMPT_LENGTH, len(sequences[0]) - 1)])
    answer = asyncio.run((generate or engine.generate)(GenerationRequest(prompt, free)))
    if not len(answer.tokens):
        raise RuntimeError(
            f"the engine has no room to sample after {len(prompt)} tokens (gconfig.max_tokens), or samples nothing"
        )
    ids = [np.asarray(sequence, dtype=np.int32) for sequence in sequences]
    completion = np.concatenate([np.asarray(prompt, dtype=np.int32), answer.tokens])
    engine.pause()
    try:
        *check, scored = engine.logprobs([*ids, completion], sampling.temperature)
    finally:
        engine.resume()
    return LogprobsChecked(
        version,
        tuple(float(x) for row in check for x in row),
        tuple(map(float, answer.logprobs)),
        tuple(float(x) for x in scored[len(prompt) :]),
    )
