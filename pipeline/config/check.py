"""Every value is checked before anything starts: limits of single keys, then what keys ask of each other.

`check` raises one ConfigError that lists all problems, and returns warnings: legal settings that are rarely meant.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from pekoe.pipeline.config.companion_checks import check_companion_contexts, check_companion_vocabularies
from pekoe.pipeline.config.cross_checks import check_keys, check_placement
from pekoe.pipeline.config.engine_checks import check_heads, check_vocabulary
from pekoe.pipeline.config.findings import Findings, PlacementFacts
from pekoe.pipeline.config.generation import GenerationConfig
from pekoe.pipeline.config.paths import (
    lacks_value_head,
    model_context_limit,
    model_heads,
    model_vocabulary,
    resolve_paths,
)
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.schema import ConfigError, Key, keys_of, shown
from pekoe.pipeline.config.supervised_checks import check_supervised_length, longest_labelled
from pekoe.pipeline.config.task_checks import check_scalar_head
from pekoe.pipeline.config.tasks import is_supervised
from pekoe.pipeline.config.values import WrongValue, convert


def check(config: RunConfig, placement: PlacementFacts | None = None) -> list[str]:
    """Warnings; raises ConfigError naming key, value and what is allowed for everything that is wrong.

    Files of models and data sets are looked for too (no network); with a placement, also what it asks of the keys.
    """
    findings = Findings()
    findings.problems += wrong_types(config)
    if findings.problems:
        raise ConfigError(findings.problems)
    findings.problems += wrong_limits(config)
    limits_hold = not findings.problems
    if limits_hold:
        check_keys(config, findings)
        if placement is not None:
            check_placement(config, placement, findings)
    try:
        resolved = resolve_paths(config)
    except ConfigError as error:
        findings.problems += error.problems
    else:
        model = resolved.actor.path
        if limits_hold:
            if placement is not None:
                check_heads(placement, model_heads(resolved.rollout.path or model), findings)
            supervised, model_limit = is_supervised(config), model_context_limit(model)
            (check_supervised_length if supervised else _check_context)(config, model_limit, findings)
            longest = (longest_labelled if supervised else context_limit)(config, model_limit)
            check_companion_contexts(config, resolved, longest, findings)
            check_companion_vocabularies(config, resolved, findings)
            check_vocabulary(config, model_vocabulary(model), findings)
            if config.reward_model is not None and config.reward_model.path and resolved.reward_model is not None:
                check_scalar_head(config.reward_model, lacks_value_head(resolved.reward_model.path), findings)
    if findings.problems:
        raise ConfigError(findings.problems)
    return findings.warnings


def wrong_types(config: RunConfig) -> list[str]:
    """One line for each value that is not of its key's type (a config made by code; `load` gives right types)."""
    problems = []
    for key, value in _leaves(config):
        try:
            convert(key, value)
        except WrongValue as error:
            problems.append(f"{key.name}: {shown(value)} {error}; allowed: {key.allowed}")
    return problems


def wrong_limits(config: RunConfig) -> list[str]:
    """One line for each value outside the limits that its key declares."""
    return [
        f"{key.name}: {shown(value)} is not allowed; allowed: {key.allowed}"
        for key, value in _leaves(config)
        if not within_limits(key, value)
    ]


def _leaves(section: Any, prefix: str = "") -> Iterator[tuple[Key, Any]]:
    for key in keys_of(type(section), prefix):
        value = getattr(section, key.name[len(prefix) :])
        if key.is_section and dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{key.name}.")
        elif not key.is_section or not (value is None and key.nullable):
            yield key, value


def within_limits(key: Key, value: Any) -> bool:
    """Whether a value of the right type is one of the choices, or inside the bounds and finite."""
    if key.choices is not None:
        return value in key.choices
    if value is None or not isinstance(value, int | float):
        return True
    return (
        math.isfinite(value)
        and (key.minimum is None or value >= key.minimum)
        and (key.maximum is None or value <= key.maximum)
        and (key.above is None or value > key.above)
    )


def context_limit(config: RunConfig, model_limit: int | None) -> int | None:
    """Most tokens of a training sequence: `gconfig.max_tokens`; else prompt limit plus completion; else the model's.

    `model_limit` is the model's own (`model_context_limit`); the result never exceeds it. None: nothing limits it.
    """
    limit = config.gconfig.max_tokens
    if limit is None and config.train_dataset.max_length is not None:
        limit = config.train_dataset.max_length + config.gconfig.max_new_tokens
    known = [number for number in (limit, model_limit) if number is not None]
    return min(known) if known else None


def _check_context(config: RunConfig, model_limit: int | None, findings: Findings) -> None:
    for name in ("gconfig", "eval_gconfig"):
        section: GenerationConfig | None = getattr(config, name)
        given = None if section is None else section.max_tokens
        if given is not None and model_limit is not None and given > model_limit:
            allowed = f"is above the model's context; allowed: <= {model_limit}, or null"
            findings.wrong(f"{name}.max_tokens", given, allowed)
    limit = context_limit(config, model_limit)
    budget = config.actor.mb_spec.max_tokens_per_mb // config.actor.mb_spec.granularity
    if limit is None or limit > budget:
        of = "unlimited" if limit is None else str(limit)
        findings.wrong(
            "actor.mb_spec.max_tokens_per_mb",
            config.actor.mb_spec.max_tokens_per_mb,
            f"is below the context limit ({of} tokens{_times(config)}); allowed: at least that (the limit is "
            "gconfig.max_tokens, else train_dataset.max_length + gconfig.max_new_tokens, else the model's)",
        )
    for name in ("gconfig", "eval_gconfig"):
        sampling: GenerationConfig | None = getattr(config, name)
        if sampling is None:
            continue
        own = [number for number in (sampling.max_tokens, model_limit) if number is not None]
        bound = limit if name == "gconfig" else min(own, default=None)
        if bound is not None and sampling.max_new_tokens >= bound:
            findings.wrong(
                f"{name}.max_new_tokens", sampling.max_new_tokens, f"leaves no room for a prompt; allowed: < {bound}"
            )


def _times(config: RunConfig) -> str:
    granularity = config.actor.mb_spec.granularity
    return f" x granularity {granularity}" if granularity > 1 else ""
