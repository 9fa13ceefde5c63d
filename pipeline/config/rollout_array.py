"""`rollout_array`: small worlds of rollout ranks that attach to a run through its directory."""

from __future__ import annotations

from dataclasses import dataclass

from pekoe.pipeline.config.fields import setting


@dataclass
class RolloutArrayConfig:
    """Leases by files, weights from disk."""

    enabled: bool = setting(False, "worlds may attach: prompts are offered as leases, weights are written to disk")
    poll_seconds: float = setting(0.5, "how often the head and each attached world look at the files", above=0)
    lease_seconds: float = setting(
        30.0,
        "an attached world whose counter stood still for so long is dead: its prompts are offered again",
        above=0,
    )
    orphan_seconds: float = setting(
        1800.0, "an attached world ends in order when the head has made no progress for so long", above=0
    )
    wait_seconds: float = setting(
        86400.0, "how long a run without rollout ranks of its own waits for a world to attach", above=0
    )
