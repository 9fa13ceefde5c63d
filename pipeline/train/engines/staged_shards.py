"""A staged save of the fsdp engine, and the process group over which saves are planned beside training."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pekoe.pipeline.messages import WrittenFile
from pekoe.pipeline.train.engines.sharded_files import write_sharded

SAVE_TIMEOUT = timedelta(days=1)
"""A rank's disk may be slow for as long as it likes: who waits for a save has its own limit, and a dead rank ends the
world."""


class StagedShards:
    """This rank's copied shards; implements `StagedState`."""

    def __init__(self, state: dict[str, Any], group: dist.ProcessGroup) -> None:
        self._state: dict[str, Any] | None = state
        self._group = group

    @property
    def is_over(self) -> bool:
        """Written, or given up: the copy's memory may be used again."""
        return self._state is None

    def write(self, folder: Path) -> tuple[WrittenFile, ...]:
        """See `StagedState`."""
        if self._state is None:
            raise AssertionError(f"{folder}: a staged state is written once")
        try:
            return write_sharded(self._state, folder, self._group)
        finally:
            self.discard()

    def discard(self) -> None:
        """See `StagedState`."""
        self._state = None


def save_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Collective over the mesh, in the same order on all ranks: a group of host-memory collectives that no other thread
    uses."""
    ranks = dist.get_process_group_ranks(mesh.get_group())
    group: dist.ProcessGroup = dist.new_group(
        ranks,
        timeout=SAVE_TIMEOUT,
        backend="gloo",
        use_local_synchronization=len(ranks) < dist.get_world_size(),
        group_desc="saves",
    )
    return group
