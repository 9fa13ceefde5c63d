"""Builds the models beside the policy over the trainer ranks, from the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pekoe.pipeline.algorithm.token_values import head_outputs
from pekoe.pipeline.batch.plan import plan_batch
from pekoe.pipeline.config.actor import FsdpConfig, MicroBatchConfig, ModelConfig
from pekoe.pipeline.config.companions import FrozenModelConfig, RewardModelConfig
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.records import Int32
from pekoe.pipeline.runs.trainer_setup import TrainerRank, build_engine
from pekoe.pipeline.train.companions import Companions, RewardModel
from pekoe.pipeline.train.engine import TrainEngine
from pekoe.pipeline.train.reward_models import Cut, GenerativeRewardModel, ScalarRewardModel
from pekoe.pipeline.train.trainer_group import TrainerGroup
from pekoe.pipeline.train.vocabulary import check_same_vocabulary, has_tokenizer


def build_companions(config: RunConfig, where: TrainerRank) -> Companions:
    """Those that `config` has a section for; collective over the trainer ranks.

    Raises ValueError on all ranks when one of them reads token ids otherwise than the policy does.
    """
    teacher = config.teacher if config.teacher is not None and config.teacher.place == "trainer" else None
    return Companions(
        reference=None if config.ref is None else build_frozen(config, config.ref, "ref", "lm", where),
        teacher=None if teacher is None else build_frozen(config, teacher, "teacher", "lm", where),
        critic=build_critic(config, where),
        reward_model=build_reward_model(config, where),
    )


def build_critic(config: RunConfig, where: TrainerRank) -> TrainEngine | None:
    """The value model with its optimiser and schedule."""
    if config.critic is None:
        return None
    model = replace(config.critic, path=config.critic.path or config.actor.path)
    return _build(config, model, where, section="critic", head="value")


def build_frozen(
    config: RunConfig, model: FrozenModelConfig, section: str, head: str, where: TrainerRank
) -> TrainEngine:
    """A model that is only asked, with the attention of the policy; `head` is `lm` or `value`."""
    fsdp = FsdpConfig(offload_params=model.offload_params, attention=config.actor.fsdp.attention)
    frozen = ModelConfig(path=model.path or config.actor.path, dtype=model.dtype, fsdp=fsdp)
    return _build(config, frozen, where, section=section, head=head, trainable=False)


def build_reward_model(config: RunConfig, where: TrainerRank) -> RewardModel | None:
    """Of the kind that is configured."""
    settings = config.reward_model
    if settings is None:
        return None
    if settings.kind == "scalar":
        engine = build_frozen(config, settings, "reward_model", "value", where)
        return ScalarRewardModel(engine, settings, head_outputs)
    question, answer = _texts(config, settings)
    engine = build_frozen(config, settings, "reward_model", "lm", where)
    over = TrainerGroup(where.device.torch_device(where.device_index))
    return GenerativeRewardModel(engine, settings, question, answer, cut_evenly(config.actor.mb_spec, over))


def cut_evenly(limits: MicroBatchConfig, over: TrainerGroup) -> Cut:
    """Cuts rows into micro-batches within `limits`, of which empty ones make as many as the rank with most has.

    A row that is longer than `max_tokens_per_mb`, by the question put after it, does not fail: it raises the limit.
    """

    def cut(lengths: Sequence[int]) -> list[list[int]]:
        sizes = np.asarray(lengths, dtype=np.int64)
        budget = max(limits.max_tokens_per_mb, int(sizes.max(initial=0)))
        (minibatches,) = plan_batch(sizes, np.arange(len(sizes)), 1, budget, limits.max_sequences_per_mb)
        parts = [rows.tolist() for minibatch in minibatches for rows in minibatch]
        most = over.max(torch.tensor(float(len(parts)), dtype=torch.float64))
        return parts + [[] for _ in range(int(most) - len(parts))]

    return cut


def _build(config: RunConfig, model: ModelConfig, where: TrainerRank, *, section: str, **options: Any) -> TrainEngine:
    check_same_vocabulary(section, model.path, config.actor.path, config.tokenizer_path or config.actor.path)
    return build_engine(config, model, where, section=section, **options)


def _texts(config: RunConfig, settings: RewardModelConfig) -> tuple[Int32, Int32]:
    """Token ids of question and answer, each by itself, without special tokens."""
    from transformers import AutoTokenizer

    own = settings.path or config.actor.path
    folder = own if has_tokenizer(own) else config.tokenizer_path or config.actor.path
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    question, answer = (
        np.asarray(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
        for text in (settings.question, settings.answer)
    )
    if not len(answer):
        raise ValueError(f"reward_model.answer: {settings.answer!r} has no tokens, so it has no probability")
    return question, answer
