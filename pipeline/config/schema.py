"""The schema of the configuration tree, read from its dataclasses: each key with type, default, meaning and limits."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from pekoe.pipeline.config.run import RunConfig


class ConfigError(ValueError):
    """A wrong configuration. `problems` has one line per problem; each names the key, the value and what is allowed."""

    def __init__(self, problems: str | Iterable[str], source: str = "configuration") -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        count = "" if len(self.problems) == 1 else f" ({len(self.problems)} problems)"
        super().__init__(f"{source}{count}:\n" + "\n".join(f"  {problem}" for problem in self.problems))


@dataclass(frozen=True)
class Key:
    """One key of the tree."""

    name: str
    """Full dotted name."""
    type: Any
    """Type of a value, without None: str, int, float, bool, list[...], dict[...] or a section's dataclass. A dict's
    entries are checked unless they are Any."""
    nullable: bool
    default: Any
    meaning: str
    choices: tuple[Any, ...] | None
    minimum: float | None
    maximum: float | None
    above: float | None

    @property
    def is_section(self) -> bool:
        return dataclasses.is_dataclass(self.type)

    @property
    def type_name(self) -> str:
        """The type in words that a reader of YAML knows."""
        if self.is_section:
            return "a section"
        origin = typing.get_origin(self.type) or self.type
        if origin is list:
            return f"a list of {_PLURALS[typing.get_args(self.type)[0]]}"
        names, entries = typing.get_args(self.type) if origin is dict else (Any, Any)
        if entries is not Any:
            return f"a mapping of {_PLURALS[names]} to {_PLURALS[entries]}"
        return _NAMES[origin]

    @property
    def allowed(self) -> str:
        """What values are allowed, in words: `a number > 0 and <= 1, or null`."""
        if self.choices is not None:
            return ", ".join("null" if choice is None else str(choice) for choice in self.choices)
        limits = (("above", ">"), ("minimum", ">="), ("maximum", "<="))
        bounds = [f"{sign} {getattr(self, name):g}" for name, sign in limits if getattr(self, name) is not None]
        text = self.type_name + (f" {' and '.join(bounds)}" if bounds else "")
        return f"{text}, or null" if self.nullable else text


_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", dict: "a mapping"}
_PLURALS = {str: "texts", int: "whole numbers", float: "numbers"}


def keys_of(section: Any, prefix: str = "") -> tuple[Key, ...]:
    """The keys directly in a section (a dataclass), in their order, named with the prefix."""
    return tuple(dataclasses.replace(key, name=prefix + key.name) for key in _own_keys(section))


@cache
def _own_keys(section: Any) -> tuple[Key, ...]:
    hints = typing.get_type_hints(section)
    keys = []
    for field in dataclasses.fields(section):
        kind, nullable = _without_none(hints[field.name])
        default = field.default if field.default is not dataclasses.MISSING else None
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        metadata = field.metadata
        limits = [metadata.get(name) for name in ("choices", "minimum", "maximum", "above")]
        keys.append(Key(field.name, kind, nullable, default, metadata.get("meaning", ""), *limits))
    return tuple(keys)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    rest = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    if len(rest) != 1:
        raise TypeError(f"{hint}: a key has one type, or one type and None")
    return rest[0], True


def all_keys(section: type = RunConfig, prefix: str = "") -> Iterator[Key]:
    """Every key below a section, depth first, sections before their keys."""
    for key in keys_of(section, prefix):
        yield key
        if key.is_section:
            yield from all_keys(key.type, f"{key.name}.")


def nearest_key(name: str) -> str:
    """The existing key most like a wrong dotted name: a sibling, the same last word elsewhere, or the closest text."""
    known = {key.name: key for key in all_keys()}
    parent, _, last = name.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
    close = difflib.get_close_matches(last, siblings, n=1, cutoff=0.7)
    if close:
        return siblings[close[0]]
    same = [key for key in known if key.rpartition(".")[2] == last]
    if same:
        return difflib.get_close_matches(name, same, n=1, cutoff=0.0)[0]
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


def shown(value: Any) -> str:
    """A value as a message shows it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
