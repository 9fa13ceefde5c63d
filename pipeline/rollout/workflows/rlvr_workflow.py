"""Reinforcement learning with verifiable rewards: one question, one completion, one judgement."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pekoe.pipeline.prompts import prompt_ids
from pekoe.pipeline.records import Example, Finish, Trajectory
from pekoe.pipeline.rollout.engine import GenerationRequest, Response
from pekoe.pipeline.rollout.workflow import EpisodeEngine, RejectEpisode, WorkflowContext


class RlvrWorkflow:
    """Renders the example's messages, samples once, and asks the judge for the reward of the decoded text.

    `template_args` are passed to the chat template (`enable_thinking`, …).
    """

    def __init__(self, context: WorkflowContext, template_args: dict[str, Any] | None = None) -> None:
        self._context = context
        self._template_args = template_args

    async def arun_episode(self, engine: EpisodeEngine, example: Example) -> Trajectory | None:
        """None when the completion was aborted. Raises RejectEpisode(`too_long`) when the prompt leaves no room."""
        context = self._context
        prompt = prompt_ids(context.tokenizer, example.messages, self._template_args)
        room = context.context_limit - len(prompt)
        if room < 1:
            detail = (
                f"{example.name}: the prompt has {len(prompt)} tokens, the context limit is {context.context_limit}"
            )
            raise RejectEpisode("too_long", detail)
        max_new_tokens = min(context.sampling.max_new_tokens, room)
        sampling = dataclasses.replace(
            context.sampling,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min(context.sampling.min_new_tokens, max_new_tokens),
        )
        response = await engine.generate(GenerationRequest(tokens=tuple(prompt), sampling=sampling))
        if response.finish == Finish.ABORT or len(response.tokens) == 0:
            return None
        completion = response.tokens.tolist()
        reward = await context.judge(
            str(context.tokenizer.decode(prompt)),
            str(context.tokenizer.decode(completion, skip_special_tokens=True)),
            prompt,
            completion,
            example.data,
        )
        return single_turn(prompt, response, reward)


def single_turn(prompt: list[int], response: Response, reward: float) -> Trajectory:
    """A prompt and its completion in token alignment, checked."""
    num_prompt, num_sampled = len(prompt), len(response.tokens)
    trajectory = Trajectory(
        tokens=np.concatenate([np.array(prompt, np.int32), response.tokens.astype(np.int32)]),
        loss_mask=np.repeat(np.array([0, 1], np.uint8), [num_prompt, num_sampled]),
        logprobs=np.concatenate([np.zeros(num_prompt, np.float32), response.logprobs.astype(np.float32)]),
        versions=np.concatenate([np.full(num_prompt, -1, np.int32), response.versions.astype(np.int32)]),
        turns=np.repeat(np.array([-1, 0], np.int32), [num_prompt, num_sampled]),
        prompt_length=num_prompt,
        reward=reward,
        finish=response.finish,
    )
    trajectory.check()
    return trajectory
