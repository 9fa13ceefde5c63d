"""What the checks of a configuration find, and what they know of a placement."""

from __future__ import annotations

from typing import Any, Protocol

from pekoe.pipeline.config.schema import shown


class RolloutFacts(Protocol):
    """What the checks need of the rollout part."""

    @property
    def engine(self) -> str: ...
    @property
    def instances(self) -> tuple[tuple[int, ...], ...]: ...


class PlacementFacts(Protocol):
    """What the checks need of a placement of roles on ranks."""

    @property
    def rollout(self) -> RolloutFacts | None: ...
    @property
    def colocated(self) -> bool: ...

    @property
    def world_size(self) -> int: ...
    @property
    def trainer_ranks(self) -> tuple[int, ...]: ...
    @property
    def rollout_ranks(self) -> tuple[int, ...]: ...


class Findings:
    """Problems and warnings, in the order of the checks."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def wrong(self, key: str, value: Any, why: str) -> None:
        self.problems.append(f"{key}: {shown(value)} {why}")

    def warn(self, key: str, value: Any, why: str) -> None:
        self.warnings.append(f"{key}: {shown(value)} {why}")
