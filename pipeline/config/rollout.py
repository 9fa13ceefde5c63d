"""`rollout`, `workflow` and `reward`: how episodes are run and judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pekoe.pipeline.config.fields import setting


@dataclass
class RolloutConfig:
    """Admission, concurrency and failure policy of rollout, and its engine."""

    backend: str = setting("", "rollout part of the allocation, e.g. hf:d2; composes `allocation` when that is absent")
    path: str | None = setting(None, "model served at start; null = actor.path")
    dtype: str = setting("float32", "dtype of the engine's weights", choices=("float32", "bfloat16", "float16"))
    max_concurrent_rollouts: int | None = setting(
        None, "most prompt groups running at once over all ranks; null = (eta+1) x batch", minimum=1
    )
    max_head_offpolicyness: int | None = setting(
        0, "eta: most training steps between sampling and use; 0 = synchronous, null = unbounded", minimum=0
    )
    deterministic: bool = setting(False, "decode every group as its own fixed-shape batch (bit-equal runs; slower)")
    stale_policy: str = setting("wait", "what to do with a group about to become too old", choices=("wait", "drop"))
    stale_wait_seconds: float = setting(600.0, "how long `wait` waits before the group is dropped", above=0)
    max_reissues: int = setting(3, "deliberate re-issues of a prompt before it is skipped", minimum=0)
    engine_process: str = setting(
        "auto",
        "where the engine runs: own = in the rank's process, child = in a child that dies with it, auto = child for a "
        "vllm engine on the trainer's ranks, else own",
        choices=("auto", "own", "child"),
    )
    max_engine_restarts: int = setting(
        3, "how often a rank builds a failed engine anew before the attempt ends", minimum=0
    )
    dynamic_sampling: bool = setting(
        False, "drop groups whose rewards are all equal: nothing is learned from them (DAPO)"
    )
    max_resampled_groups: int | None = setting(
        None,
        "groups that dynamic sampling drops and replaces per step at most, then they are kept; null = 8 x batch",
        minimum=0,
    )
    dynamic_batch_size: bool = setting(
        False, "groups that dynamic sampling drops are not replaced: the step trains on the rest of its batch"
    )
    max_slots: int = setting(64, "sequences that one engine decodes together", minimum=1)
    episode_seconds: float = setting(600.0, "time limit of an episode", above=0)
    episode_retries: int = setting(1, "how often an episode that raised is tried again", minimum=0)
    max_consecutive_failures: int = setting(16, "failed groups in a row that stop the run", minimum=1)
    shard_max_groups: int = setting(256, "groups in a shard before it is published", minimum=1)
    shard_max_seconds: float = setting(30.0, "age at which an open shard is published unasked", above=0)
    keep_trajectories: str = setting(
        "none",
        "consumed shards after the checkpoint that covers them: none = deleted, archive = put together in few large "
        "files, shards = kept as they are",
        choices=("none", "archive", "shards"),
    )
    logprob_gap_limit: float | None = setting(
        None,
        "mean |log-prob(engine) - log-prob(trainer)| on equal weights above which the run stops at the start or after "
        "an update; null = by device and dtype",
        above=0,
    )
    stop_at_gap: bool = setting(
        False, "the run stops, too, when the gap on the tokens of a step is alarming (else it only says so)"
    )


@dataclass
class WorkflowConfig:
    """Which workflow runs an episode."""

    name: str = setting("rlvr", "a registered workflow or module:Class")
    args: dict[str, Any] = setting(dict, "keyword arguments of the workflow")


@dataclass
class RewardConfig:
    """Which function judges a completion, and in what pool."""

    name: str = setting("math", "a registered reward or module:function")
    args: dict[str, Any] = setting(dict, "keyword arguments added to each call")
    processes: int = setting(1, "child processes per rollout rank", minimum=1)
    timeout_seconds: float = setting(10.0, "hard limit of one call; then the child is killed", above=0)
    error_value: float | None = setting(0.0, "reward of a call that failed or timed out; null = the episode fails")
    max_error_share: float = setting(
        0.5, "share of failed calls (of the last 200) that stops the run", above=0, maximum=1
    )
