"""A shard of one short group, to be written on one node and verified on another."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from pekoe.pipeline.records import Finish, Group, Trajectory
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.shard import Shard, write_shard

TOKENS, PROMPT = 400, 100


def write_trial_shard(path: Path) -> str:
    """Publishes it; the hash of its tokens."""
    mask = np.zeros(TOKENS, np.uint8)
    mask[PROMPT:] = 1
    made = Trajectory(
        tokens=np.arange(TOKENS, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=np.where(mask, 0, -1).astype(np.int32),
        prompt_length=PROMPT,
        reward=1.0,
        finish=Finish.STOP,
        seed=1,
        sample=0,
        info={},
    )
    group = Group(0, 0, "doctor/0", [made])
    write_shard(path, [group], ShardAttributes(run="doctor", attempt=0, writer="rank-0", temperature=1.0))
    return _hash(made)


def read_trial_shard(path: Path) -> str:
    """Verifies every byte; the hash of its tokens. BadShard, OSError."""
    with Shard(path) as shard:
        return _hash(shard.read([0])[0][1])


def _hash(trajectory: Trajectory) -> str:
    columns = (trajectory.tokens, trajectory.logprobs, trajectory.versions)
    return hashlib.blake2b(b"".join(column.tobytes() for column in columns), digest_size=16).hexdigest()
