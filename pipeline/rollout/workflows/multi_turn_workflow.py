"""Second chances: answer, judgement, feedback, next answer, … in one sequence.

prompt ─► answer ─► judge ─┬─ right, or the last turn, or no room ─► one trajectory
           ▲               │
           └── feedback ◄──┘ wrong
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pekoe.pipeline.prompts import follow_up_ids, prompt_ids
from pekoe.pipeline.records import TURN_REWARDS, Example, Finish, Float32, Int32, Trajectory
from pekoe.pipeline.rollout.engine import GenerationRequest, Response
from pekoe.pipeline.rollout.workflow import EpisodeEngine, RejectEpisode, WorkflowContext

FEEDBACK = "Your answer is wrong or cannot be read. Think about it again, and give your final answer in the same form."


@dataclass
class _Sequence:
    """Tokens that were given and tokens that were sampled, in token alignment; what was sampled stays as it is."""

    tokens: list[int]
    prompt_length: int
    sampled: list[tuple[int, Response]] = field(default_factory=list)
    """(first token, answer) of each turn."""
    rewards: list[float] = field(default_factory=list)
    """Of each turn, as judged."""

    def add_answer(self, response: Response) -> None:
        self.sampled.append((len(self.tokens), response))
        self.tokens += response.tokens.tolist()

    def trajectory(self, reward: float, *, with_turn_rewards: bool) -> Trajectory:
        """Checked; what was given is masked everywhere."""
        size = len(self.tokens)
        mask, turns = np.zeros(size, np.uint8), np.full(size, -1, np.int32)
        logprobs: Float32 = np.zeros(size, np.float32)
        versions: Int32 = np.full(size, -1, np.int32)
        turn_rewards: Float32 = np.zeros(size, np.float32)
        for turn, ((start, response), earned) in enumerate(zip(self.sampled, self.rewards, strict=True)):
            part = slice(start, start + len(response.tokens))
            mask[part], turns[part] = 1, turn
            logprobs[part], versions[part] = response.logprobs, response.versions
            turn_rewards[part.stop - 1] = earned
        made = Trajectory(
            tokens=np.array(self.tokens, np.int32), loss_mask=mask, logprobs=logprobs, versions=versions, turns=turns,
            prompt_length=self.prompt_length, reward=reward, finish=self.sampled[-1][1].finish,
            info={"turn_rewards": self.rewards}, extra={TURN_REWARDS: turn_rewards} if with_turn_rewards else {},
        )  # fmt: skip
        made.check()
        return made


class MultiTurnWorkflow:
    """The model answers until the judge's reward is above `right_above`, at most `max_turns` times; in between the user
    says `feedback`.

    The outcome's reward is the last judgement times `turn_discount` for each turn before it. With `per_turn_rewards`
    each turn earns its own judgement, on its last token, and the outcome's reward is 0: discounts are then those of the
    estimator (`actor.discount` with `actor.gae_unit: turn`), and `turn_discount` must be 1.

    One episode is one sequence; its answers are the tokens that were sampled, also where the template would write them
    otherwise in a longer conversation (without the thoughts of earlier turns, say).
    """

    def __init__(
        self,
        context: WorkflowContext,
        max_turns: int = 2,
        turn_discount: float = 1.0,
        per_turn_rewards: bool = False,
        feedback: str = FEEDBACK,
        right_above: float = 0.0,
        template_args: dict[str, Any] | None = None,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"workflow.args.max_turns: {max_turns} is not allowed; allowed: >= 1")
        if not 0 <= turn_discount <= 1:
            raise ValueError(f"workflow.args.turn_discount: {turn_discount} is not allowed; allowed: 0 to 1")
        if per_turn_rewards and turn_discount != 1:
            raise ValueError(
                f"workflow.args.turn_discount: {turn_discount} is not allowed with per_turn_rewards, where the "
                "estimator discounts (actor.gae_unit: turn, actor.discount); allowed: 1"
            )
        self._context = context
        self._max_turns = max_turns
        self._turn_discount = turn_discount
        self._per_turn_rewards = per_turn_rewards
        self._feedback = {"role": "user", "content": feedback}
        self._right_above = right_above
        self._template_args = template_args

    async def arun_episode(self, engine: EpisodeEngine, example: Example) -> Trajectory | None:
        """None when an answer was aborted. Raises RejectEpisode(`too_long`) when the prompt leaves no room."""
        tokenizer, limit = self._context.tokenizer, self._context.context_limit
        prompt = prompt_ids(tokenizer, example.messages, self._template_args)
        if len(prompt) >= limit:
            raise RejectEpisode(
                "too_long", f"{example.name}: the prompt has {len(prompt)} tokens, the context limit is {limit}"
            )
        messages, sequence = list(example.messages), _Sequence(prompt, len(prompt))
        while True:
            response = await self._answer(engine, sequence.tokens)
            if response.finish == Finish.ABORT or len(response.tokens) == 0:
                return None
            text = str(tokenizer.decode(response.tokens.tolist(), skip_special_tokens=True))
            sequence.rewards.append(await self._judge(sequence.tokens, response, text, example))
            sequence.add_answer(response)
            if sequence.rewards[-1] > self._right_above or len(sequence.sampled) == self._max_turns:
                break
            end_token = sequence.tokens[-1] if response.finish == Finish.STOP else None
            between = follow_up_ids(tokenizer, messages, self._feedback, end_token, self._template_args)
            if len(sequence.tokens) + len(between) >= limit:
                break
            messages += [{"role": "assistant", "content": text}, self._feedback]
            sequence.tokens += between
        return self._trajectory(sequence)

    async def _answer(self, engine: EpisodeEngine, tokens: list[int]) -> Response:
        sampling = self._context.sampling
        max_new_tokens = min(sampling.max_new_tokens, self._context.context_limit - len(tokens))
        sampling = dataclasses.replace(
            sampling, max_new_tokens=max_new_tokens, min_new_tokens=min(sampling.min_new_tokens, max_new_tokens)
        )
        return await engine.generate(GenerationRequest(tokens=tuple(tokens), sampling=sampling))

    async def _judge(self, given: list[int], response: Response, text: str, example: Example) -> float:
        """Of one answer; what stands before it is its prompt."""
        prompt = str(self._context.tokenizer.decode(given))
        return await self._context.judge(prompt, text, list(given), response.tokens.tolist(), example.data)

    def _trajectory(self, sequence: _Sequence) -> Trajectory:
        if self._per_turn_rewards:
            return sequence.trajectory(0.0, with_turn_rewards=True)
        discount = self._turn_discount ** (len(sequence.sampled) - 1)
        return sequence.trajectory(sequence.rewards[-1] * discount, with_turn_rewards=False)
