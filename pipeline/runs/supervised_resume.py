"""The way back of a supervised run: what earlier attempts left beyond the start point is set aside."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.resume import done_at, read_state, set_results_aside
from pekoe.pipeline.runs.start import StartPoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SupervisedPast:
    """What earlier attempts left for the head of this one."""

    state: Mapping[str, Any] = field(default_factory=dict)
    """Its snapshot in the checkpoint; empty without one."""
    done: frozenset[str] = frozenset()
    """Which of `export` and `evaluation` exist at the start point."""


def go_back(run: RunDirectory, config: RunConfig, attempt: int, start: StartPoint) -> SupervisedPast:
    """Head only, of an attempt after the first."""
    set_results_aside(run, config, attempt, start.version)
    logger.info("attempt %d goes on from version %d", attempt, start.version)
    state = read_state(Path(start.checkpoint)) if start.checkpoint else {}
    return SupervisedPast(state, done_at(run, start.version))
