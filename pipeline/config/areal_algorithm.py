"""The keys of an AReaL configuration that choose the algorithm, where a table is not enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pekoe.pipeline.config.areal_keys import Gone
from pekoe.pipeline.config.areal_state import ArealImport
from pekoe.pipeline.config.schema import shown

_WEIGHT_MODES = {
    "token_mask": ("token", "mask"),
    "token_truncate": ("token", "clamp"),
    "sequence_mask": ("sequence", "mask"),
    "sequence_truncate": ("sequence", "clamp"),
}
_OBJECTIVES = {"actor.use_sapo_loss": "sapo", "actor.use_cispo_loss": "cispo"}
_DEFAULT_KL_CTL = 0.1
"""AReaL's `actor.kl_ctl`, which has no effect there without a reference model."""


def _weight_cap(state: ArealImport, name: str, value: Any) -> None:
    mode = state.theirs.get("actor.behave_imp_weight_mode") or "token_mask"
    if value is None or mode == "disabled":
        state.ours["actor.rejection_sampling"] = None
        state.notes.append(f"{name}: {shown(value)} is actor.rejection_sampling: null here")
        return
    if mode not in _WEIGHT_MODES:
        state.drop(name, value, Gone(f"behave_imp_weight_mode {mode!r} is not known"))
        return
    level, action = _WEIGHT_MODES[mode]
    for key, ours in (("level", level), ("action", action), ("metric", "ratio"), ("upper", value)):
        state.put(name, f"actor.rejection_sampling.{key}", ours)
    state.notes.append(
        f"{name}: {shown(value)} is actor.rejection_sampling: {level} {action} at ratio {shown(value)} here"
    )


def _weight_mode(state: ArealImport, name: str, value: Any) -> None:
    state.notes.append(f"{name}: {shown(value)} is actor.rejection_sampling.level and action here")
    if not {"actor.behav_imp_weight_cap", "actor.behave_imp_weight_cap"} & set(state.theirs):
        _weight_cap(state, name, None if value == "disabled" else 5.0)


def _recompute(state: ArealImport, name: str, value: Any) -> None:
    reason = "actor.use_decoupled_loss and prox_logp_method decide what is recomputed"
    lost = value is True and state.theirs.get("actor.use_decoupled_loss") is not True
    state.drop(name, value, Gone(reason, () if lost else (True, False)))


def _objective(state: ArealImport, name: str, value: Any) -> None:
    objective = _OBJECTIVES[name]
    if value is not True:
        state.drop(name, value, Gone("actor.objective names the objective", (False,)))
        return
    state.put(name, "actor.objective", objective)
    state.notes.append(f"{name}: true is actor.objective: {objective} here")


def _kl_ctl(state: ArealImport, name: str, value: Any) -> None:
    if state.given("ref"):
        state.put(name, name, value)
    else:
        state.drop(name, value, Gone("has no effect without a ref section, there as here", (0, 0.0)))


def _dynamic(state: ArealImport, name: str, value: Any) -> None:
    """Both of AReaL's keys drop groups of equal rewards and train on what is left."""
    if value is not True:
        state.drop(name, value, Gone("rollout.dynamic_sampling and dynamic_batch_size decide it", (False,)))
        return
    for key in ("rollout.dynamic_sampling", "rollout.dynamic_batch_size"):
        state.put(name, key, True)
    state.notes.append(f"{name}: true is rollout.dynamic_sampling and rollout.dynamic_batch_size: true here")


def _overlong(state: ArealImport, name: str, value: Any) -> None:
    if value is None:
        state.drop(name, None, Gone("the default here"))
    else:
        state.put(name, name, value)


def _gae_lambda(state: ArealImport, name: str, value: Any) -> None:
    if isinstance(value, str) and not value.replace(".", "", 1).isdigit():
        state.drop(name, value, Gone("a function of length is actor.gae_lambda_by_length here: vapo or relative"))
    else:
        state.put(name, name, value)


ALGORITHM_KEYS: dict[str, Callable[[ArealImport, str, Any], None]] = {
    "dynamic_bs": _dynamic,
    "actor.dynamic_sampling": _dynamic,
    "actor.behav_imp_weight_cap": _weight_cap,
    "actor.behave_imp_weight_cap": _weight_cap,
    "actor.behave_imp_weight_mode": _weight_mode,
    "actor.recompute_logprob": _recompute,
    "actor.use_sapo_loss": _objective,
    "actor.use_cispo_loss": _objective,
    "actor.kl_ctl": _kl_ctl,
    "actor.overlong_tokens": _overlong,
    "actor.overlong_penalty_factor": _overlong,
    "actor.gae_lambda": _gae_lambda,
}


def settle_algorithm(state: ArealImport) -> None:
    """What the keys say together: the reference model, the task, and the bounds on the behaviour weight."""
    _settle_reference(state)
    if any(key.startswith("teacher.") for key in state.ours):
        state.ours["task"] = "distill"
        state.notes.append("task: not a key of AReaL's; distill is written, since there is a teacher")
    _settle_rejection(state)


def _settle_reference(state: ArealImport) -> None:
    """AReaL makes the reference model only where `actor.kl_ctl` is above 0."""
    if not state.given("ref"):
        return
    if "actor.kl_ctl" not in state.theirs:
        state.put("actor.kl_ctl", "actor.kl_ctl", _DEFAULT_KL_CTL)
        state.notes.append(
            f"actor.kl_ctl: not in the file; AReaL's default {_DEFAULT_KL_CTL} is written out (ours differs)"
        )
    if state.ours.get("actor.kl_ctl"):
        return
    unused = [key for key in state.ours if key.startswith("ref.")]
    for key in unused:
        del state.ours[key]
    if unused:
        state.notes.append(f"{', '.join(unused)}: changes nothing here (no KL term uses it: actor.kl_ctl is 0)")


def _settle_rejection(state: ArealImport) -> None:
    """AReaL rejects nothing unless told to (its older versions: a cap of 5); ours has bounds by default."""
    if any(key.startswith("actor.rejection_sampling") for key in state.ours):
        return
    state.ours["actor.rejection_sampling"] = None
    if state.ours.get("actor.use_decoupled_loss"):
        state.notes.append(
            "actor.rejection_sampling: not in the file; null is written out, as in AReaL of today "
            "(its versions with behav_imp_weight_cap had 5.0: actor.rejection_sampling.upper=5)"
        )
