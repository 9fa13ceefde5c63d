"""Whether models beside the policy can read what it writes: their vocabulary, and the length of their context."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pekoe.pipeline.config.findings import Findings
from pekoe.pipeline.config.paths import (
    TOKENIZERS,
    model_context_limit,
    model_vocabulary,
    tokenizer_vocabulary,
)
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.settle import MODELS_BESIDE
from pekoe.pipeline.config.tasks import is_supervised

CHARACTERS_PER_TOKEN = 4
"""Of an English text, about."""


def check_companion_vocabularies(config: RunConfig, resolved: RunConfig, findings: Findings) -> None:
    """An id is the same token for all models.

    Of the tokens only those count that both `tokenizer.json` name: what else a tokenizer knows is seen when the model
    is built, which is refused unless it knows every token of the policy.
    """
    policy = resolved.actor.path
    for name, folder in _beside(resolved):
        if Path(folder).resolve() == Path(policy).resolve():
            continue
        why = _other_vocabulary(folder, policy, resolved.tokenizer_path or policy)
        if why:
            findings.wrong(
                f"{name}.path", getattr(config, name).path, f"{why}; allowed: a model with the policy's vocabulary"
            )


def _other_vocabulary(folder: str, policy: str, tokenizer: str) -> str:
    """What differs in words, or ""."""
    size, policy_size = model_vocabulary(folder), model_vocabulary(policy)
    if not any((Path(folder) / name).is_file() for name in (*TOKENIZERS, "tokenizer_config.json")):
        if size != policy_size and None not in (size, policy_size):
            return f"has {size} tokens and no tokenizer, the policy {policy_size}"
        return ""
    known, theirs = tokenizer_vocabulary(tokenizer), tokenizer_vocabulary(folder)
    # An id that the policy has no embedding for is never written.
    ours = {token: number for token, number in known.items() if policy_size is None or number < policy_size}
    differing = sorted((number, token) for token, number in ours.items() if theirs.get(token, number) != number)
    if differing:
        number, token = differing[0]
        return (
            f"has another vocabulary than the policy: token {token!r} is {number} in {tokenizer} and {theirs[token]} "
            f"here ({len(differing)} such tokens)"
        )
    largest = max(ours.values(), default=-1)
    if size is not None and largest >= size:
        return f"has embeddings for {size} tokens, and the policy's ids go up to {largest}"
    return ""


def check_companion_contexts(config: RunConfig, resolved: RunConfig, longest: int | None, findings: Findings) -> None:
    """A model beside the policy takes the longest sequence of the run (`longest` tokens; None: not known).

    A generative reward model also needs room for question and answer, whose tokens are estimated by their characters:
    a warning.
    """
    if longest is None:
        return
    key = "max_length of the data set" if is_supervised(config) else "gconfig.max_tokens"
    for name, folder in _beside(resolved):
        limit = model_context_limit(folder)
        if limit is None:
            continue
        path = getattr(config, name).path
        if longest > limit:
            findings.wrong(
                f"{name}.path", path, f"has a context of {limit} tokens, and the run's sequences have up to {longest}; "
                f"allowed: a model that takes them, or {key} <= {limit}",
            )  # fmt: skip
        elif name == "reward_model" and longest + (more := _asked_tokens(config)) > limit:
            findings.warn(
                f"{name}.path", path, f"has a context of {limit} tokens, and the run's sequences have up to {longest}, "
                f"with question and answer about {longest + more}; advised: {key} <= {limit - more}",
            )  # fmt: skip


def _asked_tokens(config: RunConfig) -> int:
    """About how many tokens a reward model reads after a trajectory."""
    model = config.reward_model
    if model is None or model.kind != "generative":
        return 0
    return sum(-(-len(text) // CHARACTERS_PER_TOKEN) for text in (model.question, model.answer))


def _beside(resolved: RunConfig) -> Iterator[tuple[str, str]]:
    """Section and folder of each model that is there."""
    for name in MODELS_BESIDE:
        section = getattr(resolved, name)
        if section is not None:
            yield name, section.path
