"""What an import of an AReaL configuration has found so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pekoe.pipeline.config.areal_keys import Gone
from pekoe.pipeline.config.check import within_limits
from pekoe.pipeline.config.emit import escape
from pekoe.pipeline.config.schema import Key, all_keys, shown
from pekoe.pipeline.config.values import WrongValue, convert


@dataclass
class ArealImport:
    """What was found so far."""

    theirs: dict[str, Any]
    ours: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    gone: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """(section, what is said) -> keys."""
    keys: dict[str, Key] = field(default_factory=lambda: {key.name: key for key in all_keys()})

    def put(self, source: str, name: str, value: Any) -> None:
        """Sets a key of ours, or notes why the value is not possible here."""
        key = self.keys[name]
        if isinstance(value, str) and "${" in value:
            self.ours[name] = value
            return
        try:
            converted = convert(key, value)
        except WrongValue as error:
            self.notes.append(f"{source}: {shown(value)} {error} here; allowed: {key.allowed}; left at the default")
            return
        if not within_limits(key, converted):
            self.notes.append(
                f"{source}: {shown(value)} is not possible here; allowed: {key.allowed}; left at the default"
            )
            return
        self.ours[name] = escape(converted)

    def drop(self, name: str, value: Any, rule: Gone) -> None:
        lost = not (value is None or value in rule.neutral)
        said = f"no place here: {rule.reason}" if lost else f"changes nothing here ({rule.reason})"
        self.gone.setdefault((name.partition(".")[0], said), []).append(name)

    def given(self, name: str) -> bool:
        """Whether the file says anything of a key, of the section above it or of a key below it."""
        return any(name == key or name.startswith(f"{key}.") or key.startswith(f"{name}.") for key in self.theirs)
