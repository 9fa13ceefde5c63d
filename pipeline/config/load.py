"""From a YAML file and `key=value` overrides to one typed `RunConfig`.

    defaults ─► presets that the YAML names ─► YAML ─► presets given as algorithm=NAME, cluster.site=NAME ─► key=value
             ─► interpolation

A preset that the YAML names is its base: the YAML's own keys win. A preset asked for on the command line wins over the
YAML. Explicit key=value wins over everything. So an effective configuration loads again to itself.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pekoe.pipeline.config.emit import escape, yaml_lines
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.schema import ConfigError, keys_of
from pekoe.pipeline.config.settle import give_dpo_a_reference, inherit_eval_gconfig, settle_overlong, share_dtype
from pekoe.pipeline.config.values import build, unknown

CLOCK_TIME = re.compile(r"\d+(:\d+)+")
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PRESETS = CONFIGS / "algorithm"
SITES = CONFIGS / "clusters"


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a YAML file and applies overrides; raises ConfigError with one line for everything that is wrong."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the file: {error.strerror}", str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError("is not a text file (UTF-8)", str(path)) from error
    return from_yaml_text(text, overrides, str(path))


def from_yaml_text(text: str, overrides: Sequence[str] = (), source: str = "configuration") -> RunConfig:
    """As `load`, from the text itself; `source` names it in errors."""
    written = _parse_yaml(text, source)
    given = _parse_overrides(overrides)
    problems = _unknown_keys(RunConfig, written, source) + _unknown_keys(RunConfig, given, "the command line")
    if problems:
        raise ConfigError(problems, source)
    under, over = [], []
    for name, read in (("algorithm", read_preset), ("cluster.site", read_site)):
        if _has(given, name):
            over.append(read(OmegaConf.select(given, name)))
        else:
            under.append(read(OmegaConf.select(written, name)))
    merged = OmegaConf.merge(*under, written, *over, given)
    assert isinstance(merged, DictConfig)
    return _typed(OmegaConf.to_container(merged), source)


def to_yaml(config: RunConfig) -> str:
    """The whole configuration as YAML; `from_yaml_text` gives an equal one back."""
    return "".join(f"{line}\n" for line, _ in yaml_lines(config))


def preset_names() -> list[str]:
    """The presets that `algorithm` may name."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def read_preset(name: Any) -> DictConfig:
    """The keys of a preset; of None, none."""
    if name is None:
        return OmegaConf.create({})
    return _read_named("algorithm", name, PRESETS)


def site_names() -> list[str]:
    """The presets that `cluster.site` may name."""
    return sorted(path.stem for path in SITES.glob("*.yaml"))


def read_site(name: Any) -> DictConfig:
    """The keys of a site: a preset's name, or the path of a YAML file; of None, none."""
    if name is None:
        return OmegaConf.create({})
    if str(name).endswith((".yaml", ".yml")) and Path(name).is_file():
        return _read_partial(Path(name))
    return _read_named("cluster.site", name, SITES)


def _read_named(key: str, name: Any, folder: Path) -> DictConfig:
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in names:
        near = difflib.get_close_matches(str(name), names, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"{key}: {name!r} is no preset{hint}; allowed: {', '.join(names)}, or null")
    return _read_partial(folder / f"{name}.yaml")


def _read_partial(path: Path) -> DictConfig:
    preset = _parse_yaml(path.read_text(encoding="utf-8"), str(path))
    problems = _unknown_keys(RunConfig, preset, str(path))
    if problems:
        raise ConfigError(problems, str(path))
    return preset


def _has(given: DictConfig, name: str) -> bool:
    """Whether a dotted key was given, be it as null."""
    section, _, key = name.rpartition(".")
    inside = OmegaConf.select(given, section) if section else given
    return isinstance(inside, DictConfig) and key in inside


def _parse_yaml(text: str, source: str) -> DictConfig:
    try:
        parsed = OmegaConf.create(_keep_clock_times(text)) if text.strip() else OmegaConf.create({})
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"is not YAML: {' '.join(str(error).split())}", source) from error
    if not isinstance(parsed, DictConfig):
        raise ConfigError("is not a mapping of keys to values", source)
    return parsed


def _keep_clock_times(text: str) -> str:
    """`1:30:00` stays text: YAML 1.1 reads it as a number to the base of 60."""
    tokens = [token for token in yaml.scan(text) if isinstance(token, yaml.ScalarToken)]
    for token in reversed(tokens):
        if token.plain and CLOCK_TIME.fullmatch(token.value):
            start, end = token.start_mark.index, token.end_mark.index
            text = f'{text[:start]}"{text[start:end]}"{text[end:]}'
    return text


def _parse_overrides(overrides: Sequence[str]) -> DictConfig:
    """Overrides in their order, later ones over earlier ones; `key=` sets the empty text, `key=null` nulls."""
    given = OmegaConf.create({})
    problems = []
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals or not re.fullmatch(r"\w+(\.\w+)*", name):
            problems.append(
                f"{override!r} is no override; allowed: key=value with a dotted key, e.g. actor.optimizer.lr=1e-6"
            )
            continue
        try:
            one: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={_keep_clock_times(value)}"]))
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            problems.append(f"{name}: {value!r} is not a YAML value: {' '.join(str(error).split())}")
            continue
        merged = OmegaConf.merge(given, _nested(name, one["value"] if value else ""))
        assert isinstance(merged, DictConfig)
        given = merged
    if problems:
        raise ConfigError(problems, "command line")
    return given


def _nested(name: str, value: Any) -> Any:
    """The tree with one value at a dotted name; a part that is a whole number is one (`gconfig.logit_bias.5`)."""
    for part in reversed(name.split(".")):
        value = {int(part) if part.isdecimal() else part: value}
    return value


def _unknown_keys(section: type, written: DictConfig, source: str, prefix: str = "") -> list[str]:
    container = OmegaConf.to_container(written)
    assert isinstance(container, dict)
    return _unknown_in(section, container, source, prefix)


def _unknown_in(section: type, container: dict[Any, Any], source: str, prefix: str) -> list[str]:
    keys = {key.name[len(prefix) :]: key for key in keys_of(section, prefix)}
    problems = []
    for name, value in container.items():
        if name not in keys:
            problems.append(unknown(f"{prefix}{name}", source))
        elif keys[name].is_section and isinstance(value, dict):
            problems += _unknown_in(keys[name].type, value, source, f"{prefix}{name}.")
    return problems


def _typed(container: Any, source: str) -> RunConfig:
    inherit_eval_gconfig(container)
    give_dpo_a_reference(container)
    share_dtype(container)
    complete = OmegaConf.create(_with_defaults(RunConfig, container))
    try:
        resolved = OmegaConf.to_container(complete, resolve=True)
    except OmegaConfBaseException as error:
        what = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key}: cannot be interpolated: {what}", source) from error
    assert isinstance(resolved, dict)
    problems: list[str] = []
    config = build(RunConfig, resolved, problems)
    if problems:
        raise ConfigError(problems, source)
    assert isinstance(config, RunConfig)
    settle_overlong(config)
    return config


def _with_defaults(section: type, container: dict[Any, Any]) -> dict[Any, Any]:
    """The mapping with every absent key at its default, so that interpolation may name any key."""
    complete = dict(container)
    for key in keys_of(section):
        if key.is_section and isinstance(complete.get(key.name), dict):
            complete[key.name] = _with_defaults(key.type, complete[key.name])
        elif key.name not in complete:
            default = dataclasses.asdict(key.default) if key.is_section and key.default is not None else key.default
            complete[key.name] = escape(default)
    return complete
