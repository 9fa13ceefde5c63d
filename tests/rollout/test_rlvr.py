from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pekoe.pipeline.config.rollout import RewardConfig
from pekoe.pipeline.records import Example, Finish, Trajectory
from pekoe.pipeline.registry import WORKFLOWS, resolve
from pekoe.pipeline.reward.pool import RewardPool
from pekoe.pipeline.rollout.engine import GenerationRequest, Response, SamplingParameters
from pekoe.pipeline.rollout.workflow import RejectEpisode, WorkflowContext
from pekoe.pipeline.rollout.workflows.rlvr_workflow import RlvrWorkflow

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}{% if think is defined %}={% endif %}"
)
CHARACTERS = "0123456789+= ?"


def character_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    words = ["[UNK]", "<s>", "</s>", *CHARACTERS]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


TOKENIZER = character_tokenizer()
EXAMPLE = Example(0, "sum/0", ({"role": "user", "content": "1+2=?"},), {"answer": "3"})
PROMPT = "<s>1+2=?</s><s>"


class Scribe:
    """An engine that writes a given text, as far as there is room."""

    def __init__(self, text: str, finish: Finish = Finish.STOP) -> None:
        self.tokens = TOKENIZER.encode(text)
        self.finish = finish
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Response:
        self.requests.append(request)
        tokens = self.tokens[: request.sampling.max_new_tokens]
        finish = self.finish if len(tokens) == len(self.tokens) else Finish.LENGTH
        count = len(tokens)
        logprobs = -np.arange(1, count + 1, dtype=np.float32)
        return Response(np.array(tokens, np.int32), logprobs, np.arange(count, dtype=np.int32) + 4, finish)


class Asked:
    """A judge that remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def __call__(
        self,
        prompt: str,
        completion: str,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        data: dict[str, Any],
    ) -> float:
        self.calls.append((prompt, completion, list(prompt_ids), list(completion_ids), data))
        return 0.75


def episode(
    engine: Scribe,
    judge: Any,
    context_limit: int = 100,
    max_new_tokens: int = 50,
    tokenizer: PreTrainedTokenizerFast = TOKENIZER,
    **arguments: Any,
) -> Trajectory | None:
    sampling = SamplingParameters(max_new_tokens=max_new_tokens, min_new_tokens=8, temperature=0.7)
    workflow = resolve(WORKFLOWS, "rlvr", "workflow.name")(
        WorkflowContext(tokenizer, sampling, judge, context_limit), **arguments
    )
    assert isinstance(workflow, RlvrWorkflow)
    return asyncio.run(workflow.arun_episode(engine, EXAMPLE))


def test_a_trajectory_is_in_token_alignment_and_keeps_the_end_token() -> None:
    engine, judge = Scribe("12 3</s>"), Asked()
    trajectory = episode(engine, judge)
    assert trajectory is not None
    prompt = TOKENIZER.encode(PROMPT)
    completion = TOKENIZER.encode("12 3</s>")
    assert engine.requests[0].tokens == tuple(prompt)
    assert trajectory.tokens.tolist() == [*prompt, *completion]
    assert completion[-1] == TOKENIZER.eos_token_id
    assert trajectory.loss_mask.tolist() == [0] * 8 + [1] * 5
    assert trajectory.logprobs.tolist() == [0.0] * 8 + [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert trajectory.versions.tolist() == [-1] * 8 + [4, 5, 6, 7, 8]
    assert trajectory.turns.tolist() == [-1] * 8 + [0] * 5
    assert (trajectory.prompt_length, trajectory.reward, trajectory.finish) == (8, 0.75, Finish.STOP)
    assert [getattr(trajectory, n).dtype for n in ("tokens", "loss_mask", "logprobs", "versions", "turns")] == [
        np.int32, np.uint8, np.float32, np.int32, np.int32,
    ]  # fmt: skip
    assert judge.calls == [(PROMPT, "12 3", prompt, completion, {"answer": "3"})]
    assert engine.requests[0].sampling.temperature == 0.7


@pytest.mark.parametrize(("limit", "room"), [(100, 50), (58, 50), (57, 49), (12, 4), (9, 1)])
def test_new_tokens_are_clamped_to_the_room_in_the_context(limit: int, room: int) -> None:
    engine = Scribe("1" * 200)
    trajectory = episode(engine, Asked(), context_limit=limit)
    assert trajectory is not None
    assert engine.requests[0].sampling.max_new_tokens == room
    assert engine.requests[0].sampling.min_new_tokens == min(8, room)
    assert len(trajectory.tokens) == 8 + room <= limit
    assert trajectory.truncated


@pytest.mark.parametrize("limit", [8, 5])
def test_a_prompt_that_leaves_no_room_is_rejected_with_the_reason(limit: int) -> None:
    engine = Scribe("3")
    with pytest.raises(RejectEpisode, match=f"sum/0: the prompt has 8 tokens, the context limit is {limit}") as caught:
        episode(engine, Asked(), context_limit=limit)
    assert caught.value.reason == "too_long"
    assert engine.requests == []


def test_aborted_and_empty_completions_are_never_judged() -> None:
    judge = Asked()
    assert episode(Scribe("12", Finish.ABORT), judge) is None
    assert episode(Scribe("", Finish.LENGTH), judge) is None
    assert judge.calls == []


def test_arguments_reach_the_chat_template() -> None:
    engine = Scribe("3")
    episode(engine, Asked(), template_args={"think": True})
    assert engine.requests[0].tokens == tuple(TOKENIZER.encode(f"{PROMPT}="))


def test_without_a_chat_template_the_text_is_the_prompt() -> None:
    engine = Scribe("3")
    episode(engine, Asked(), tokenizer=character_tokenizer(None))
    assert engine.requests[0].tokens == tuple(TOKENIZER.encode("1+2=?"))


def test_the_real_pool_judges() -> None:
    with RewardPool(RewardConfig(name="gsm8k")) as pool:
        right = episode(Scribe("1+2=3</s>"), pool)
        wrong = episode(Scribe("1+2=4</s>"), pool)
    assert right is not None
    assert wrong is not None
    assert (right.reward, wrong.reward) == (1.0, 0.0)
