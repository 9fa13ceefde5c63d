"""Turns an AReaL configuration (a GRPO or PPO run) into one of ours, and says of every key that has no place here why.

The tables are in `areal_keys.py`; here is what needs more than a table. Interpolations are resolved, since they may
name keys that are gone; `${oc.env:…}` stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pekoe.pipeline import registry
from pekoe.pipeline.config.areal_algorithm import ALGORITHM_KEYS, settle_algorithm
from pekoe.pipeline.config.areal_keys import DEFAULTS, KEYS, SECTION_DEFAULTS, Gone, Moved, rule_of
from pekoe.pipeline.config.areal_state import ArealImport
from pekoe.pipeline.config.emit import yaml_value
from pekoe.pipeline.config.schema import ConfigError, all_keys, shown


def import_areal(path: str | Path) -> tuple[str, list[str]]:
    """The YAML text of our configuration, and notes: one for each key of the file that did not go over as it is."""
    state = ArealImport(dict(_leaves(_read(Path(path)))))
    for name, value in state.theirs.items():
        special = _SPECIAL.get(name)
        if special is None and _is_vllm_argument(state, name):
            special = _vllm_argument
        if special is not None:
            special(state, name, value)
        else:
            _by_table(state, name, value)
    _write_defaults(state)
    settle_algorithm(state)
    _settle_data(state)
    state.notes += [f"{', '.join(names)}: {said}" for (_, said), names in state.gone.items()]
    return _text(state.ours, Path(path).name), state.notes


def _is_vllm_argument(state: ArealImport, name: str) -> bool:
    return name.startswith("vllm.") and name not in KEYS and name not in state.keys


def _read(path: Path) -> DictConfig:
    try:
        parsed = OmegaConf.load(path)
    except OSError as error:
        raise ConfigError(f"cannot read the file: {error.strerror}", str(path)) from error
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"is not YAML: {' '.join(str(error).split())}", str(path)) from error
    if not isinstance(parsed, DictConfig):
        raise ConfigError("is not a mapping of keys to values", str(path))
    return parsed


def _leaves(tree: DictConfig, section: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values, interpolations resolved where they can be; mappings that are one value stay whole."""
    node = OmegaConf.select(tree, section) if section else tree
    raw = OmegaConf.to_container(node)
    assert isinstance(raw, dict)
    for key, written in raw.items():
        name = ".".join(filter(None, (section, str(key))))
        value = _resolved(tree, name, written) if isinstance(written, str) and "${" in written else written
        if isinstance(value, dict) and value and not isinstance(rule_of(name), Moved):
            if isinstance(written, dict):
                yield from _leaves(tree, name)
            else:
                yield from ((f"{name}.{entry}", inner) for entry, inner in value.items())
        else:
            yield name, value


def _resolved(tree: DictConfig, name: str, written: str) -> Any:
    if "${oc.env:" in written:
        return written
    try:
        value = OmegaConf.select(tree, name, throw_on_missing=True)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException:
        return written


def _by_table(state: ArealImport, name: str, value: Any) -> None:
    rule = rule_of(name)
    if isinstance(rule, Gone):
        state.drop(name, value, rule)
    elif isinstance(rule, Moved):
        # bool is an int to ==, but no value of ours is chosen by one
        ours = next((to for given, to in rule.values if type(given) is type(value) and given == value), value)
        state.put(name, rule.to, ours)
        if rule.to != name or ours is not value:
            state.notes.append(f"{name}: {shown(value)} is {rule.to}: {shown(ours)} here")
    elif name in state.keys and not (state.keys[name].is_section and value == {}):
        state.put(name, name, value)
    else:
        state.drop(name, object(), Gone("is no key of AReaL's that is known here, and none of ours"))


def _allocation(state: ArealImport, name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        state.drop(name, None, Gone("actor.backend and rollout.backend compose it"))
        return
    parts: list[str] = []
    for joint, part in re.findall(r"(^|[+|])((?:\([^)]*\)|[^+|(])*)", value.replace(" ", "")):
        if part in ("eval", "cpu"):
            state.notes.append(f"{name}: +{part} is left out: evaluation runs on the rollout ranks")
        else:
            parts.append((joint if parts else "") + _part(state, name, part))
    ours = "".join(parts)
    key = "allocation" if name == "allocation_mode" else name
    state.put(name, key, ours)
    if ours != value or key != name:
        state.notes.append(f"{name}: {shown(value)} is {key}: {shown(ours)} here")
    available = {*registry.INFERENCE_ENGINES, *registry.TRAIN_ENGINES}
    wanted = set(re.findall(r"(?:^|[+|])([a-z]+)", ours)) - available
    if wanted:
        engines = f"{', '.join(sorted(wanted))}: not in this version; available: {', '.join(sorted(available))}"
        state.notes.append(f"{key}: {engines} (e.g. hf:d1+fsdp:d1)")


def _part(state: ArealImport, name: str, part: str) -> str:
    """One part in our grammar: `sglang.d4` and parts without an engine are older forms."""
    part = re.sub(r"^([a-z]+)\.(?=[dtpce]\d)", r"\1:", part)
    if re.match(r"[dtpce]\d|\(", part):
        megatron = part.startswith("(") or re.search(r"[pe](?!1(?!\d))\d", part)
        return f"{'megatron' if megatron else 'fsdp'}:{part}"
    if part.startswith("archon"):
        state.notes.append(f"{name}: AReaL's archon engine is native here")
        return "native" + part[len("archon") :]
    return part


def _backend(state: ArealImport, name: str, value: Any) -> None:
    if isinstance(value, str) and ":" in value:
        _allocation(state, name, value)
    else:
        state.drop(name, value, Gone("an engine without dimensions: allocation names it"))


def _data_type(state: ArealImport, name: str, value: Any) -> None:
    section = name.partition(".")[0]
    if value in registry.DATASETS:
        state.put(name, name, value)
    elif value != "rl":
        state.drop(name, value, Gone("runs of this version are reinforcement learning (type: rl)"))
    else:
        state.notes.append(f"{name}: 'rl' is task: rl here; {section}.type names the kind of data set")


def _context(state: ArealImport, name: str, value: Any) -> None:
    """Of two limits, the one of sampling is ours."""
    if value is None or state.theirs.get("gconfig.max_tokens") is not None:
        state.drop(name, None, Gone("gconfig.max_tokens is the context limit"))
        return
    state.put(name, "gconfig.max_tokens", value)
    state.notes.append(f"{name}: {shown(value)} is gconfig.max_tokens: {shown(value)} here")


def _vllm_argument(state: ArealImport, name: str, value: Any) -> None:
    """Arguments of vLLM that are no keys here are handed on."""
    argument = name.partition(".")[2]
    if value is None:
        state.drop(name, None, Gone("vLLM's own default"))
        return
    state.put(name, "vllm.extra", {**state.ours.get("vllm.extra", {}), argument: value})
    state.notes.append(f"{name}: {shown(value)} is vllm.extra.{argument} here")


_SPECIAL: dict[str, Callable[[ArealImport, str, Any], None]] = {
    "vllm.max_model_len": _context,
    "allocation_mode": _allocation,
    "actor.backend": _backend,
    "rollout.backend": _backend,
    **ALGORITHM_KEYS,
    "train_dataset.type": _data_type,
    "valid_dataset.type": _data_type,
}


def _write_defaults(state: ArealImport) -> None:
    defaults = dict(DEFAULTS)
    for section, keys in SECTION_DEFAULTS.items():
        if any(key.startswith(f"{section}.") for key in state.theirs):
            defaults |= {f"{section}.{key}": value for key, value in keys.items()}
    for name, value in defaults.items():
        if not state.given(name):
            state.put(name, name, value)
            state.notes.append(f"{name}: not in the file; AReaL's default {shown(value)} is written out (ours differs)")
    if state.ours.get("actor.mb_spec.max_tokens_per_mb") is None:
        default = state.keys["actor.mb_spec.max_tokens_per_mb"].default
        state.notes.append(
            f"actor.mb_spec.max_tokens_per_mb: not in the file; it is required here: {default} is the default"
        )


def _settle_data(state: ArealImport) -> None:
    """The kind of data set is told by its path; AReaL names the reward in its script."""
    for section in ("train_dataset", "valid_dataset"):
        path, key = state.ours.get(f"{section}.path"), f"{section}.type"
        if not isinstance(path, str) or key in state.ours:
            continue
        kind = "gsm8k" if "gsm8k" in path.lower() else "jsonl"
        state.put(key, key, kind)
        state.notes.append(f"{key}: {kind}, told by the path; change it if that is wrong (or name module:Class)")
    if not state.given("reward"):
        kind = "gsm8k" if state.ours.get("train_dataset.type") == "gsm8k" else "math"
        state.put("reward.name", "reward.name", kind)
        state.notes.append(
            f"reward.name: AReaL names the reward in its script; {kind} is written "
            "(a function with its signature works as module:function)"
        )


def _text(ours: dict[str, Any], source: str) -> str:
    """YAML of the keys that were set, in the order of the schema."""
    lines = [f"# imported from AReaL's {source}"]
    opened: list[str] = []
    for key in all_keys():
        if key.name not in ours:
            continue
        *sections, last = key.name.split(".")
        common = 0
        while common < min(len(opened), len(sections)) and opened[common] == sections[common]:
            common += 1
        lines += [f"{'  ' * depth}{sections[depth]}:" for depth in range(common, len(sections))]
        opened = sections
        lines.append(f"{'  ' * len(sections)}{last}: {yaml_value(ours[key.name])}")
    return "\n".join(lines) + "\n"
