"""From plain values (as YAML and the command line give them) to typed ones; collects all that is wrong."""

from __future__ import annotations

import re
import typing
from typing import Any

from pekoe.pipeline.config.areal_keys import replacement
from pekoe.pipeline.config.schema import Key, keys_of, nearest_key, shown

_WHOLE = re.compile(r"[+-]?\d+")


class WrongValue(ValueError):
    """A value that is not of its key's type; the text says why."""


def build(section: type, container: dict[Any, Any], problems: list[str], prefix: str = "") -> Any:
    """An instance of a section's dataclass from a plain, resolved mapping; what is wrong is appended to `problems`."""
    values: dict[str, Any] = {}
    keys = {key.name[len(prefix) :]: key for key in keys_of(section, prefix)}
    problems += [unknown(f"{prefix}{name}") for name in container if name not in keys]
    for name, key in keys.items():
        if name not in container:
            continue
        value = container[name]
        if key.is_section and isinstance(value, dict):
            values[name] = build(key.type, value, problems, f"{key.name}.")
            continue
        try:
            values[name] = convert(key, value)
        except WrongValue as error:
            problems.append(f"{key.name}: {shown(value)} {error}; allowed: {key.allowed}")
    return section(**values)


def unknown(name: str, source: str = "") -> str:
    """The line that says that a key does not exist, with the nearest one, or what stands here for an AReaL key."""
    where = f" in {source}" if source else ""
    near = nearest_key(name)
    hint = "write it nested, one level per dot" if near == name else f"did you mean {near}?"
    return f"{name}: unknown key{where}; {replacement(name) or hint}"


def convert(key: Key, value: Any) -> Any:
    """A value of the key's type; raises WrongValue. A text that is a number passes for one (environment variables)."""
    if value is None:
        if key.nullable:
            return None
        raise WrongValue("is not a value")
    if key.is_section:
        raise WrongValue("is not a section")
    origin = typing.get_origin(key.type) or key.type
    if origin is list:
        if not isinstance(value, list):
            raise WrongValue("is not a list")
        (item,) = typing.get_args(key.type)
        return [_scalar(item, entry, None) for entry in value]
    if origin is dict:
        if not isinstance(value, dict):
            raise WrongValue("is not a mapping")
        return _mapping(key.type, value)
    return _scalar(key.type, value, key.choices)


def _mapping(kind: Any, value: dict[Any, Any]) -> dict[Any, Any]:
    """Of a typed one, names and entries; a free one is taken as it is. A name from the command line is a text."""
    names, entries = typing.get_args(kind) or (str, Any)
    if entries is Any:
        return value
    return {_scalar(names, name, None): _scalar(entries, entry, None) for name, entry in value.items()}


def _scalar(kind: type, value: Any, choices: tuple[Any, ...] | None) -> Any:
    if kind is bool:
        return _boolean(value)
    if kind is int:
        return _whole(value)
    if kind is float:
        return _number(value)
    if isinstance(value, bool):
        # YAML reads off, no, on, yes as booleans
        words = ("on", "yes") if value else ("off", "no")
        for word in words:
            if choices is not None and word in choices:
                return word
        raise WrongValue("is not text (put quotes around it)")
    if not isinstance(value, str | int | float):
        raise WrongValue("is not text")
    return str(value)


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise WrongValue("is not true or false")


def _whole(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        return int(value)
    raise WrongValue("is not a whole number")


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise WrongValue("is not a number")
    try:
        return float(value)
    except ValueError:
        raise WrongValue("is not a number") from None
