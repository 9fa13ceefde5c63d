"""Attached worlds in words, from the lease files alone: for `pekoe status`."""

from __future__ import annotations

import time

from pekoe.pipeline.leases import lease_files
from pekoe.pipeline.leases.lease_records import (
    BoardState,
    WorldState,
    is_world_name,
    offered_folder,
    state_file,
    world_file,
)
from pekoe.pipeline.run_directory import RunDirectory


def describe_worlds(run: RunDirectory) -> str:
    """A line for the board and one for each world that has a folder there; empty for a run without attached worlds.

    Ages are by the filesystem's clock and this host's.
    """
    state = lease_files.read_record(state_file(run), BoardState)
    if state is None:
        return ""
    over = f", {state.outcome}" if state.outcome else ""
    offered = len(lease_files.names_in(offered_folder(run)))
    lines = [
        f"attached worlds: attempt {state.attempt}{over}, weights of version {state.version}, {offered} groups offered"
    ]
    for name in sorted(filter(is_world_name, lease_files.names_in(run.leases))):
        world = lease_files.read_record(world_file(run, name), WorldState)
        if world is not None:
            lines.append(f"  {name}: {_describe(run, name, world)}")
    return "\n".join(lines)


def _describe(run: RunDirectory, name: str, world: WorldState) -> str:
    if world.left:
        return "has left"
    try:
        age = f"heard {max(time.time() - world_file(run, name).stat().st_mtime, 0.0):.0f} s ago"
    except OSError:
        age = "just gone"
    job = f", job {world.job_id}" if world.job_id else ""
    return (
        f"{world.num_ranks} rank(s) on {world.host}{job}, version {world.version}, holds {len(world.held)} of "
        f"{world.slots} groups, {age}"
    )
