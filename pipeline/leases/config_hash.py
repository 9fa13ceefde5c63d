"""One word for everything that sampling depends on: a world whose configuration says otherwise must not sample."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from pekoe.pipeline.config.run import RunConfig

NUM_DIGITS = 32
DATASET_KEYS = ("type", "path", "split", "args", "size", "seed", "prompt_template", "system_prompt", "max_length")
"""They decide which example an index means and how its prompt reads; batch size and order are the head's alone."""
ROLLOUT_KEYS = ("path", "dtype", "deterministic")
REWARD_KEYS = ("name", "args", "timeout_seconds", "error_value")
ACTOR_KEYS = ("path",)
TEACHER_KEYS = ("path", "dtype", "place")
"""Of a teacher on the engines, which adds to what is sampled."""


def config_hash(config: RunConfig) -> str:
    """32 hex digits over the keys that decide what is sampled for an assignment and how it is judged.

    Left out is what may differ from world to world: cluster, allocation, number of slots and processes; and what the
    head alone uses. Paths are compared as they are written: both sides have the absolute ones of the prepared run.
    """
    chosen = {
        "seed": config.seed,
        "tokenizer_path": config.tokenizer_path or config.actor.path,
        "actor": {key: getattr(config.actor, key) for key in ACTOR_KEYS},
        "gconfig": dataclasses.asdict(config.gconfig),
        "workflow": dataclasses.asdict(config.workflow),
        "reward": {key: getattr(config.reward, key) for key in REWARD_KEYS},
        "rollout": {key: getattr(config.rollout, key) for key in ROLLOUT_KEYS},
        "train_dataset": {key: getattr(config.train_dataset, key) for key in DATASET_KEYS},
    }
    if config.teacher is not None and config.teacher.place == "engine":
        chosen["teacher"] = {key: getattr(config.teacher, key) for key in TEACHER_KEYS}
    text = json.dumps(chosen, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=NUM_DIGITS // 2).hexdigest()
