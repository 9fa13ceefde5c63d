"""A workflow whose completions have prescribed, long-tailed lengths: the same work in every run."""

from __future__ import annotations

import dataclasses

import numpy as np

from pekoe.pipeline.prompts import prompt_ids
from pekoe.pipeline.records import Example, Trajectory
from pekoe.pipeline.rollout.engine import GenerationRequest
from pekoe.pipeline.rollout.workflow import EpisodeEngine, WorkflowContext


class LongTailWorkflow:
    """The completion of example i has `lengths[i]` tokens; the reward is the share of even tokens."""

    def __init__(self, context: WorkflowContext, lengths: list[int]) -> None:
        self._context, self._lengths = context, lengths

    async def arun_episode(self, engine: EpisodeEngine, example: Example) -> Trajectory:
        prompt = prompt_ids(self._context.tokenizer, example.messages)
        length = int(self._lengths[example.index % len(self._lengths)])
        sampling = dataclasses.replace(self._context.sampling, max_new_tokens=length, min_new_tokens=length)
        response = await engine.generate(GenerationRequest(tuple(prompt), sampling))
        sampled = len(response.tokens)

        def column(before: float, values: object, dtype: type) -> np.ndarray:
            return np.concatenate([np.full(len(prompt), before), np.asarray(values)]).astype(dtype)

        return Trajectory(
            tokens=np.concatenate([np.asarray(prompt, np.int32), response.tokens.astype(np.int32)]),
            loss_mask=column(0, np.ones(sampled), np.uint8),
            logprobs=column(0, response.logprobs, np.float32),
            versions=column(-1, response.versions, np.int32),
            turns=column(-1, np.zeros(sampled), np.int32),
            prompt_length=len(prompt),
            reward=float(np.mean(response.tokens % 2 == 0)),
            finish=response.finish,
        )
