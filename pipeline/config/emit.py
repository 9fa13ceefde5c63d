"""A configuration as YAML lines, written so that loading them gives the same values back, whatever the texts hold."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from pekoe.pipeline.config.schema import Key, keys_of

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = ("true", "false", "null", "on", "off", "yes", "no", "y", "n")
"""Texts that YAML reads as something else."""


def yaml_lines(section: Any, indent: str = "") -> Iterator[tuple[str, Key]]:
    """One `key: value` line per key, sections indented below theirs, and the key of each line."""
    for key in keys_of(type(section)):
        value = getattr(section, key.name)
        if key.is_section and value is not None:
            yield f"{indent}{key.name}:", key
            yield from yaml_lines(value, f"{indent}  ")
        else:
            yield f"{indent}{key.name}: {yaml_value(escape(value))}", key


def yaml_value(value: Any) -> str:
    """A plain value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{yaml_value(name)}: {yaml_value(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(yaml_value, value)) + "]"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value.lower() not in _WORDS else _quoted(value)
    return json.dumps(value)


def escape(value: Any) -> Any:
    """The value with `${` escaped in its texts, so that they load as they are and not as interpolations."""
    if isinstance(value, dict):
        return {name: escape(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [escape(entry) for entry in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def _number(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return f"{text}.0" if text.lstrip("-").isdigit() else text


def _quoted(text: str) -> str:
    characters = []
    for character in json.dumps(text, ensure_ascii=False):
        code = ord(character)
        code_text = f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"
        characters.append(character if character.isprintable() else code_text)
    return "".join(characters)
