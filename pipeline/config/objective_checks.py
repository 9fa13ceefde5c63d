"""What the keys of the objective ask of each other (tasks that sample)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable

from pekoe.pipeline import registry
from pekoe.pipeline.config.findings import Findings
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.tasks import has_policy_loss


def check_registered(key: str, name: str, table: dict[str, str], findings: Findings) -> None:
    """A name of the registry's, or a user's `module:attribute`."""
    if name not in table and not re.fullmatch(r"[\w.]+:\w+", name):
        near = difflib.get_close_matches(name, table, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        findings.wrong(key, name, f"is not known{hint}; allowed: {', '.join(sorted(table))}, or module:attribute")


def _check_names(config: RunConfig, findings: Findings) -> None:
    actor = config.actor
    check_registered("actor.objective", actor.objective, registry.OBJECTIVES, findings)
    check_registered("actor.advantage_estimator", actor.advantage_estimator, registry.ADVANTAGE_ESTIMATORS, findings)


def _check_clip(config: RunConfig, findings: Findings) -> None:
    actor = config.actor
    if actor.objective == "cispo":
        for name in ("eps_clip", "eps_clip_higher"):
            if getattr(actor, name) is None:
                findings.wrong(
                    f"actor.{name}", None, "is not allowed with actor.objective cispo; allowed: a number > 0 (the "
                    "paper's are eps_clip 1.0 and eps_clip_higher 4.0)",
                )  # fmt: skip
    elif actor.eps_clip is None and actor.eps_clip_higher is not None:
        findings.wrong(
            "actor.eps_clip_higher", actor.eps_clip_higher, "needs actor.eps_clip; allowed: null when that is null"
        )
    if actor.objective in ("sapo", "cispo"):
        if actor.c_clip is not None:
            findings.warn("actor.c_clip", actor.c_clip, f"has no effect with actor.objective {actor.objective}")
        if actor.importance_sampling_level == "sequence":
            findings.warn(
                "actor.importance_sampling_level", "sequence", f"is not published for actor.objective {actor.objective}"
            )
    elif actor.importance_sampling_level == "sequence" and actor.loss_aggregation == "token_mean":
        findings.warn(
            "actor.loss_aggregation",
            "token_mean",
            "weighs long sequences more under importance_sampling_level sequence (GSPO: sequence_mean)",
        )


def _check_proximal(config: RunConfig, findings: Findings) -> None:
    """The policy that ratios are taken against."""
    actor = config.actor
    if actor.objective == "sapo" and actor.use_decoupled_loss:
        findings.wrong(
            "actor.use_decoupled_loss", True, "is not allowed with actor.objective sapo, whose ratio is against the "
            "behaviour policy; allowed: false",
        )  # fmt: skip
    if not actor.use_decoupled_loss and actor.prox_logp_method != "recompute":
        findings.warn(
            "actor.prox_logp_method", actor.prox_logp_method, "has no effect without actor.use_decoupled_loss"
        )
    updates = actor.ppo_n_minibatches * actor.ppo_epochs
    if actor.use_decoupled_loss and actor.prox_logp_method == "reuse" and updates > 1:
        findings.warn(
            "actor.prox_logp_method", "reuse", f"takes the policy itself for the proximal one in each of the {updates} "
            "updates of a step: ratios are 1, and nothing is clipped",
        )  # fmt: skip
    if actor.m2_threshold is None:
        return
    if not actor.use_decoupled_loss:
        findings.wrong(
            "actor.m2_threshold", actor.m2_threshold, "needs actor.use_decoupled_loss; allowed: null without it"
        )
    elif actor.prox_logp_method not in ("recompute", "metrics"):
        findings.wrong(
            "actor.m2_threshold", actor.m2_threshold, "looks at proximal log-probs before the update, which "
            f"actor.prox_logp_method {actor.prox_logp_method} does not have; allowed: null, or prox_logp_method "
            "recompute or metrics",
        )  # fmt: skip


def _check_rejection(config: RunConfig, findings: Findings) -> None:
    actor, key = config.actor, "actor.rejection_sampling"
    bounds = actor.rejection_sampling
    if bounds is None:
        if actor.use_decoupled_loss:
            findings.warn(key, None, "leaves the behaviour weight of the decoupled objective unbounded")
        return
    if not actor.use_decoupled_loss:
        findings.warn(f"{key}.metric", bounds.metric, "has no effect without actor.use_decoupled_loss")
    if bounds.upper is None and bounds.lower is None:
        findings.wrong(
            f"{key}.upper", None, f"and lower null bound nothing; allowed: a number for one of them, or {key}: null"
        )
    if bounds.upper is not None and bounds.lower is not None and bounds.lower > bounds.upper:
        findings.wrong(f"{key}.lower", bounds.lower, f"is above upper; allowed: <= {bounds.upper}")
    if bounds.action == "clamp" and bounds.metric != "ratio":
        findings.wrong(
            f"{key}.action", "clamp", f"is not allowed with metric {bounds.metric}; allowed: mask, or metric ratio"
        )
    neutral = 1.0 if bounds.metric == "ratio" else 0.0
    equal = f"drops tokens of equal policies ({bounds.metric} {neutral:g})"
    if bounds.upper is not None and bounds.upper < neutral:
        findings.wrong(f"{key}.upper", bounds.upper, f"{equal}; allowed: >= {neutral:g}")
    if bounds.lower is not None and bounds.lower > neutral:
        findings.wrong(f"{key}.lower", bounds.lower, f"{equal}; allowed: <= {neutral:g}")
    if bounds.level == "token" and bounds.agg != "mean":
        findings.warn(f"{key}.agg", bounds.agg, "has no effect at level token")


def _check_normalisation(config: RunConfig, findings: Findings) -> None:
    actor, n_samples = config.actor, config.gconfig.n_samples
    for name in ("reward_norm", "adv_norm"):
        norm = getattr(actor, name)
        if norm is None:
            continue
        if norm.mean_leave1out and norm.mean_level is None:
            findings.wrong(
                f"actor.{name}.mean_leave1out",
                True,
                f"needs a mean; allowed: false when actor.{name}.mean_level is null",
            )
        # a critic's advantages differ from token to token
        differs = name == "adv_norm" and config.critic is not None
        if norm.mean_level == "group" and n_samples < 2 and has_policy_loss(config) and not differs:
            findings.wrong(
                "gconfig.n_samples",
                n_samples,
                f"makes every advantage 0 with actor.{name}.mean_level group; allowed: >= 2",
            )
            return
    norm = actor.reward_norm
    if config.critic is not None and norm is not None and norm.mean_level == "group":
        findings.warn(
            "actor.reward_norm.mean_level", "group", "takes the mean of the group off rewards whose baseline is the "
            "critic; PPO has actor.reward_norm=null",
        )  # fmt: skip


def _check_kl(config: RunConfig, findings: Findings) -> None:
    actor = config.actor
    for key, value in (("actor.kl_ctl", actor.kl_ctl), ("actor.kl_loss_coef", actor.kl_loss_coef)):
        if value > 0 and config.ref is None:
            findings.wrong(
                key, value, "needs a reference model; allowed: 0, or a ref section (ref: {} is the policy at its start)"
            )
    if config.ref is not None and not actor.kl_ctl and not actor.kl_loss_coef:
        findings.warn(
            "ref.path",
            config.ref.path,
            "is asked in vain: set actor.kl_ctl or actor.kl_loss_coef, or ref=null",
        )


def _check_overlong(config: RunConfig, findings: Findings) -> None:
    actor, most = config.actor, config.gconfig.max_new_tokens
    if not actor.overlong_reward_penalty:
        return
    if not 0 < actor.overlong_tokens <= most:
        findings.wrong(
            "actor.overlong_tokens", actor.overlong_tokens, "is not allowed with overlong_reward_penalty; allowed: "
            f"1 to gconfig.max_new_tokens ({most})",
        )  # fmt: skip
    if actor.mask_truncated:
        findings.warn(
            "actor.mask_truncated", True, "leaves out the sequences that actor.overlong_reward_penalty is most about"
        )


def _check_estimator(config: RunConfig, findings: Findings) -> None:
    actor = config.actor
    if actor.advantage_estimator != "gae":
        return
    if actor.gae_lambda_by_length is not None and actor.gae_lambda != 1:
        findings.warn("actor.gae_lambda", actor.gae_lambda, "has no effect with actor.gae_lambda_by_length")
    key = "gae_lambda" if actor.gae_lambda_by_length is None else "gae_lambda_by_length"
    if config.critic is None and (actor.gae_lambda_by_length is not None or actor.gae_lambda < 1):
        findings.warn(
            f"actor.{key}", getattr(actor, key), "without a critic only weakens the reward of the tokens far from it; "
            "critic-free estimators have actor.gae_lambda=1",
        )  # fmt: skip


def _check_dynamic_sampling(config: RunConfig, findings: Findings) -> None:
    rollout = config.rollout
    if not rollout.dynamic_sampling:
        if rollout.dynamic_batch_size:
            findings.wrong(
                "rollout.dynamic_batch_size", True, "needs rollout.dynamic_sampling; allowed: false without it"
            )
        if rollout.max_resampled_groups is not None:
            findings.warn(
                "rollout.max_resampled_groups", rollout.max_resampled_groups,
                "has no effect without rollout.dynamic_sampling",
            )  # fmt: skip
        return
    if config.gconfig.n_samples < 2:
        findings.wrong(
            "gconfig.n_samples", config.gconfig.n_samples, "makes the rewards of every group equal, and "
            "rollout.dynamic_sampling drops such groups; allowed: >= 2",
        )  # fmt: skip
    if config.reward_model is not None:
        findings.wrong(
            "rollout.dynamic_sampling", True, "is not allowed with a reward_model, which scores groups after they are "
            "chosen; allowed: false",
        )  # fmt: skip
    if rollout.dynamic_batch_size and rollout.max_resampled_groups is not None:
        findings.warn(
            "rollout.max_resampled_groups", rollout.max_resampled_groups,
            "has no effect with rollout.dynamic_batch_size: nothing is replaced",
        )  # fmt: skip


OBJECTIVE_CHECKS: tuple[Callable[[RunConfig, Findings], None], ...] = (
    _check_names,
    _check_clip,
    _check_proximal,
    _check_rejection,
    _check_normalisation,
    _check_kl,
    _check_overlong,
    _check_estimator,
    _check_dynamic_sampling,
)
