"""Whether models, tokenizers and data sets of a configuration are there, every file of them, and what it needs of the
disk."""

from __future__ import annotations

import logging
from pathlib import Path

from pekoe.launch.allocation import place
from pekoe.pipeline.config.check import check
from pekoe.pipeline.config.paths import resolve_paths
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.schema import ConfigError
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.disk_estimate import checkpoint_bytes, estimate, model_facts, shortage_of
from pekoe.pipeline.runs.finding import Finding, note, ok, problem

AREA = "model and data"


def judge(config: RunConfig) -> list[Finding]:
    """Asks nobody: what lacks on this disk is a problem now, not at the start of a job."""
    try:
        placement = place(config)
        found = [note(AREA, warning) for warning in check(config, placement)]
        resolved = resolve_paths(config)
    except ConfigError as error:
        return [problem(AREA, line, _step(line)) for line in error.problems]
    except ValueError as error:
        return [problem(AREA, str(error), _step(str(error)))]
    found.append(ok(AREA, f"model {resolved.actor.path}: every file is there"))
    found += _disk(resolved, len(placement.trainer_ranks), len(placement.rollout_ranks))
    for name in ("train_dataset", "valid_dataset"):
        data = getattr(resolved, name)
        if data is not None:
            found.append(ok(AREA, f"{name}: {data.type} {data.path}".rstrip()))
    return found


def _step(text: str) -> str:
    if " lacks " in text or "does not exist" in text or "cache" in text:
        return "download or copy it to this filesystem first: nothing is downloaded at the start of a run"
    return "pekoe config show CONFIG prints every key with its meaning"


def _disk(config: RunConfig, num_trainers: int, num_rollouts: int) -> list[Finding]:
    """What the run will need of the disk, against what is free."""
    run = RunDirectory(Path(config.cluster.fileroot) / config.experiment_name / config.trial_name)
    try:
        model = model_facts(Path(config.actor.path))
    except (ValueError, OSError) as error:
        return [note(AREA, f"the disk that the run needs cannot be told: {error}")]
    made = estimate(config, model, num_trainers=num_trainers, num_rollouts=num_rollouts)
    shortage = shortage_of(run, made, checkpoint_bytes(config, model, num_trainers))
    if shortage is None:
        return [ok(AREA, f"disk: {made.sentence()}")]
    wrong = problem if shortage.level >= logging.ERROR else note
    return [wrong(AREA, f"disk: {made.sentence()}", shortage.sentence)]
