"""Configuration and placement of a run, every value checked before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pekoe.launch.placement import Placement
    from pekoe.pipeline.config.run import RunConfig


def load_unchecked(source: str | Path | RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Keys and types are right, nothing else is looked at. ValueError lists what is wrong."""
    from pekoe.pipeline.config.load import from_yaml_text, load, to_yaml

    if isinstance(source, (str, Path)):
        return load(source, overrides)
    return from_yaml_text(to_yaml(source), overrides)


def load_checked(
    source: str | Path | RunConfig, overrides: Sequence[str], quiet: bool = True
) -> tuple[RunConfig, Placement]:
    """Paths are absolute in what is returned. ValueError lists what is wrong; warnings go to standard error."""
    from pekoe.kernels.registry import check_overrides
    from pekoe.launch.allocation import check_engines, check_has_rollout, place
    from pekoe.launch.node_layout import torn_warnings
    from pekoe.pipeline.config.check import check
    from pekoe.pipeline.config.paths import resolve_paths
    from pekoe.pipeline.config.tasks import is_supervised

    check_overrides()
    config = load_unchecked(source, overrides)
    placement = place(config)
    warnings = check(config, placement)
    check_engines(placement)
    if not config.rollout_array.enabled and not is_supervised(config):
        check_has_rollout(placement)
    warnings += torn_warnings(config, placement)
    if not quiet:
        for warning in warnings:
            print(f"pekoe: warning: {warning}", file=sys.stderr)
    return resolve_paths(config), placement
