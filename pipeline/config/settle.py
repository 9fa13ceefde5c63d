"""Values that follow from others where nobody has given them; applied when a configuration is loaded."""

from __future__ import annotations

from typing import Any

from pekoe.pipeline.config.run import RunConfig

MODELS_BESIDE = ("critic", "ref", "teacher", "reward_model")
OVERLONG_SHARE = 5
"""DAPO's window is 4,096 of 20,480 tokens."""


def inherit_eval_gconfig(container: dict[Any, Any]) -> None:
    """Keys that `eval_gconfig` leaves out are `gconfig`'s."""
    own = container.get("eval_gconfig")
    inherited = container.get("gconfig")
    if isinstance(own, dict) and isinstance(inherited, dict):
        container["eval_gconfig"] = inherited | own


def give_dpo_a_reference(container: dict[Any, Any]) -> None:
    """There is no DPO without one; the policy at its start unless `ref` names another."""
    if container.get("task") == "dpo" and container.get("ref") is None:
        container["ref"] = {}


def share_dtype(container: dict[Any, Any]) -> None:
    """Models beside the policy compute as it does: equal policies have equal log-probs."""
    actor = container.get("actor")
    if not isinstance(actor, dict) or "dtype" not in actor:
        return
    for name in MODELS_BESIDE:
        section = container.get(name)
        if isinstance(section, dict):
            section.setdefault("dtype", actor["dtype"])


def settle_overlong(config: RunConfig) -> None:
    """`actor.overlong_tokens` 0 is a fifth of `gconfig.max_new_tokens` where the penalty is on."""
    if config.actor.overlong_reward_penalty and config.actor.overlong_tokens == 0:
        config.actor.overlong_tokens = max(1, config.gconfig.max_new_tokens // OVERLONG_SHARE)
