"""Several turns in one sequence: exact tokens, masks, rewards of turns, all the way to the advantages of tokens."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_rlvr import EXAMPLE, PROMPT, TOKENIZER, character_tokenizer

from pekoe.pipeline.algorithm.reduction import OneRank
from pekoe.pipeline.algorithm.reward_to_advantage import find_advantages
from pekoe.pipeline.config.actor import ActorConfig
from pekoe.pipeline.records import Finish, Group, Trajectory, pack
from pekoe.pipeline.registry import REWARDS, WORKFLOWS, resolve
from pekoe.pipeline.rollout.engine import GenerationRequest, Response, SamplingParameters
from pekoe.pipeline.rollout.workflow import RejectEpisode, WorkflowContext
from pekoe.pipeline.rollout.workflows.multi_turn_workflow import FEEDBACK
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.shard import Shard, write_shard

THINKING = (
    "{% for m in messages %}<s>"
    "{% if m['role'] == 'assistant' and '=' in m['content'] %}{{ m['content'].split('=')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)
"""Shows of an answer only what stands behind the last `=`."""


class Script:
    """An engine that gives one answer after the other; each token has its own log-prob and version."""

    def __init__(self, *answers: str, tokenizer: Any = TOKENIZER) -> None:
        self.answers = [tokenizer.encode(answer) for answer in answers]
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Response:
        turn = len(self.requests)
        self.requests.append(request)
        whole = self.answers[turn]
        tokens = whole[: request.sampling.max_new_tokens]
        is_ended = len(tokens) == len(whole) and whole[-1:] == [TOKENIZER.eos_token_id]
        count = len(tokens)
        return Response(
            np.array(tokens, np.int32), np.full(count, -0.5 - turn, np.float32), np.full(count, 4 + turn, np.int32),
            Finish.STOP if is_ended else Finish.LENGTH,
        )  # fmt: skip


class Scores:
    """A judge with its mind made up."""

    def __init__(self, *rewards: float) -> None:
        self.rewards = list(rewards)
        self.asked: list[tuple[str, str]] = []

    async def __call__(
        self, prompt: str, completion: str, prompt_ids: Sequence[int], completion_ids: Sequence[int],
        data: dict[str, Any],
    ) -> float:  # fmt: skip
        assert data == EXAMPLE.data
        self.asked.append((prompt, completion))
        return self.rewards[len(self.asked) - 1]


def episode(
    engine: Script, judge: Scores, limit: int = 200, max_new_tokens: int = 50, tokenizer: Any = TOKENIZER, **args: Any
) -> Trajectory | None:
    sampling = SamplingParameters(max_new_tokens=max_new_tokens, min_new_tokens=8)
    workflow = resolve(WORKFLOWS, "multi_turn", "workflow.name")(
        WorkflowContext(tokenizer, sampling, judge, limit), **{"feedback": "? ?", **args}
    )
    made: Trajectory | None = asyncio.run(workflow.arun_episode(engine, EXAMPLE))
    return made


def test_turns_are_one_sequence_with_everything_given_masked() -> None:
    engine, judge = Script("5</s>", "2 3</s>"), Scores(0.0, 1.0)
    made = episode(engine, judge)
    assert made is not None
    text = f"{PROMPT}5</s><s>? ?</s><s>2 3</s>"
    assert made.tokens.tolist() == TOKENIZER.encode(text), "the sampled end token is the template's closing"
    whole = [*EXAMPLE.messages, {"role": "assistant", "content": "5"}, {"role": "user", "content": "? ?"}]
    rendered = TOKENIZER.apply_chat_template(
        [*whole, {"role": "assistant", "content": "2 3"}], tokenize=True, return_dict=True
    )
    assert made.tokens.tolist() == rendered["input_ids"], "as the template writes the whole conversation"
    assert engine.requests[1].tokens == tuple(TOKENIZER.encode(f"{PROMPT}5</s><s>? ?</s><s>"))
    given, between = [0] * 8, [0] * 6
    assert made.loss_mask.tolist() == given + [1, 1] + between + [1] * 4
    assert made.turns.tolist() == [-1] * 8 + [0, 0] + [-1] * 6 + [1] * 4
    assert made.versions.tolist() == [-1] * 8 + [4, 4] + [-1] * 6 + [5] * 4
    assert made.logprobs.tolist() == [0] * 8 + [-0.5] * 2 + [0] * 6 + [-1.5] * 4
    assert (made.prompt_length, made.reward, made.finish, made.extra) == (8, 1.0, Finish.STOP, {})
    assert judge.asked == [(PROMPT, "5"), (f"{PROMPT}5</s><s>? ?</s><s>", "2 3")]


@pytest.mark.parametrize(
    ("rewards", "args", "num_turns", "reward"),
    [
        ((1.0,), {}, 1, 1.0),
        ((0.0, 1.0), {"turn_discount": 0.9}, 2, 0.9),
        ((0.0, 0.0, 1.0), {"turn_discount": 0.5, "max_turns": 3}, 3, 0.25),
        ((0.0, 0.0), {"turn_discount": 0.5}, 2, 0.0),
        ((-1.0, -1.0), {"turn_discount": 0.5}, 2, -0.5),
        ((0.25, 1.0), {"turn_discount": 0.5, "right_above": 0.5}, 2, 0.5),
        ((0.0,), {"max_turns": 1}, 1, 0.0),
    ],
)
def test_the_last_judgement_is_discounted_for_each_turn_before_it(
    rewards: tuple[float, ...], args: dict[str, Any], num_turns: int, reward: float
) -> None:
    engine = Script(*["5</s>"] * 3)
    made = episode(engine, Scores(*rewards), **args)
    assert made is not None
    assert len(engine.requests) == num_turns == made.turns.max() + 1
    assert made.reward == reward
    assert made.info == {"turn_rewards": list(rewards[:num_turns])}


def test_a_template_that_rewrites_answers_does_not_change_what_was_sampled() -> None:
    tokenizer = character_tokenizer(THINKING)
    made = episode(Script("1+1=5</s>", "3</s>"), Scores(0.0, 1.0), tokenizer=tokenizer)
    assert made is not None
    assert made.tokens.tolist() == TOKENIZER.encode(f"{PROMPT}1+1=5</s><s>? ?</s><s>3</s>")


def test_an_answer_that_was_cut_off_is_closed_by_tokens_that_are_given() -> None:
    made = episode(Script("5555", "3</s>"), Scores(0.0, 1.0), max_new_tokens=3)
    assert made is not None
    assert made.tokens.tolist() == TOKENIZER.encode(f"{PROMPT}555</s><s>? ?</s><s>3</s>")
    assert made.loss_mask.tolist() == [0] * 8 + [1] * 3 + [0] * 7 + [1] * 2
    assert made.finish == Finish.STOP


def test_without_room_for_another_turn_the_episode_ends_as_it_is() -> None:
    """After the first turn there are 8 + 2 tokens; 6 lie between the turns, and one must be sampled."""
    for limit, num_turns in ((16, 1), (17, 2)):
        made = episode(Script("5</s>", "3</s>"), Scores(0.0, 1.0), limit=limit)
        assert made is not None
        assert made.turns.max() + 1 == num_turns
        assert made.truncated == (num_turns == 2)
        assert len(made.tokens) <= limit


def test_a_prompt_without_room_is_rejected_and_an_aborted_answer_gives_nothing() -> None:
    with pytest.raises(RejectEpisode, match="too_long"):
        episode(Script("5"), Scores(0.0), limit=8)

    class Aborted(Script):
        async def generate(self, request: GenerationRequest) -> Response:
            response = await super().generate(request)
            is_second = len(self.requests) == 2
            return Response(response.tokens, response.logprobs, response.versions, Finish(2 * is_second))

    assert episode(Aborted("5</s>", "3</s>"), Scores(0.0, 1.0)) is None


def test_without_a_chat_template_turns_are_separated_by_blank_lines() -> None:
    tokenizer = character_tokenizer(None)
    made = episode(Script("5</s>", "3</s>"), Scores(0.0, 1.0), tokenizer=tokenizer)
    assert made is not None
    assert made.tokens.tolist() == tokenizer.encode("1+2=?5</s>\n\n? ?\n\n3</s>")


def test_a_template_that_hides_answers_is_refused() -> None:
    tokenizer = character_tokenizer(
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="chat template does not show an answer"):
        episode(Script("5</s>"), Scores(0.0), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_turns": 0}, "max_turns: 0 is not allowed; allowed: >= 1"),
        ({"turn_discount": 1.5}, "turn_discount: 1.5 is not allowed"),
        ({"turn_discount": 0.5, "per_turn_rewards": True}, "turn_discount: 0.5 is not allowed with per_turn_rewards"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        episode(Script("5"), Scores(0.0), **args)


def test_the_feedback_has_a_default() -> None:
    assert "wrong" in FEEDBACK


def through_a_shard(tmp_path: Path, rows: list[Trajectory]) -> list[tuple[int, Trajectory]]:
    for sample, row in enumerate(rows):
        row.sample = sample
    path = tmp_path / "000000.h5"
    write_shard(path, [Group(7, 0, "x", rows)], ShardAttributes("r", 0, "rank-1", 1.0))
    with Shard(path) as shard:
        return shard.read(range(shard.num_rows))


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_rewards_of_turns_reach_the_tokens_of_their_turns_and_no_others(tmp_path: Path, discount: float) -> None:
    """Through shard and packing to advantages in turn unit: returns of a turn, on each of its tokens."""
    rows = []
    for rewards, answers in (((-0.25, -0.5, 1.0), ("55</s>", "44 4</s>", "3</s>")), ((0.75,), ("3</s>",))):
        made = episode(Script(*answers), Scores(*rewards), max_turns=3, per_turn_rewards=True)
        assert made is not None
        assert made.reward == 0.0
        assert made.total_reward == sum(rewards)
        rows.append(made)
    batch = pack(through_a_shard(tmp_path, rows))
    config = ActorConfig()
    config.gae_unit, config.discount, config.gae_lambda = "turn", discount, 1.0
    found = find_advantages([batch], config, 50, OneRank(), groups=[7])
    third = 1.0
    second = -0.5 + discount * third
    first = -0.25 + discount * second
    wanted = (
        [0] * 8 + [first] * 3 + [0] * 6 + [second] * 5 + [0] * 6 + [third] * 2
        + [0] * 8 + [0.75] * 2
    )  # fmt: skip
    np.testing.assert_allclose(found.advantages.numpy(), wanted, rtol=0, atol=1e-12)
    assert not found.advantages.numpy()[batch.loss_mask == 0].any()


def test_an_outcome_reaches_the_last_turn_and_by_returns_the_earlier_ones(tmp_path: Path) -> None:
    made = episode(Script("5</s>", "3</s>"), Scores(0.0, 1.0), turn_discount=0.5)
    assert made is not None
    batch = pack(through_a_shard(tmp_path, [made]))
    config = ActorConfig()
    config.discount = 0.5
    config.gae_unit, config.reward_norm = "token", None
    found = find_advantages([batch], config, 50, OneRank(), groups=[7]).advantages.numpy()
    wanted = [0] * 8 + [0.0625, 0.125] + [0] * 6 + [0.25, 0.5]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


def test_the_reward_zero_says_nothing() -> None:
    assert resolve(REWARDS, "zero", "reward.name")("prompt", "completion", [1], [2], answer="3") == 0.0
