"""Which weight transport a rank uses, and the facts that it is built from."""

from __future__ import annotations

from dataclasses import replace

from pekoe.pipeline.runs.context import RunContext
from pekoe.pipeline.weights.transport_setup import TransportSetup

MIB = 1 << 20
SHARED = "shared"
"""Folder in the run's `weights/` from which attached worlds load."""


def transport_setup(context: RunContext, role: str) -> TransportSetup:
    """Equal on all members of the transfer but for rank, role, device and host."""
    weights = context.config.weights
    return TransportSetup(
        rank=context.world.rank,
        role=role,
        run=context.run,
        device=context.torch_device,
        backend=context.device.process_group_backend,
        host=context.world.address,
        bucket_bytes=weights.bucket_mib * MIB,
        bucket_seconds=weights.bucket_seconds,
    )


def shared_setup(context: RunContext, role: str, reader: str = "") -> TransportSetup:
    """Weights on disk for attached worlds, whatever the transport to the run's own rollout ranks is."""
    return replace(transport_setup(context, role), folder=context.run.weights / SHARED, reader=reader)
