"""What an engine's thread does between two steps, as plain data: ranks that apply the same commands, and step at the
same places, stay equal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pekoe.pipeline.rollout.engine import GenerationRequest


@dataclass(frozen=True, slots=True)
class Add:
    """A sequence enters the batch."""

    number: int
    """Unique within the engine."""
    request: GenerationRequest
    end_ids: tuple[int, ...]
    """Tokens that end it, ascending: not to be sampled before `min_new_tokens`."""
    room: int
    """Most new tokens."""


@dataclass(frozen=True, slots=True)
class Remove:
    """Sequences leave the batch: ended, or cancelled."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Weights are replaced by those that this rank receives."""

    version: int


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probs of given sequences; those under way are computed anew afterwards."""

    sequences: tuple[tuple[int, ...], ...]
    temperature: float


@dataclass(frozen=True, slots=True)
class Sleep:
    """Memory goes back to the device."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Memory is taken again."""


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """A LoRA adapter is loaded, or replaces the one of its name."""

    name: str
    folder: Path
    version: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The engine ends."""


Command = Add | Remove | Load | Score | Sleep | Wake | LoadAdapter | Stop


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of the engine's thread: commands in order, then a step of the batch or none."""

    commands: tuple[Command, ...]
    step: bool
