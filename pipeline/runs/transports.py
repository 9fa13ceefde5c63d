"""Which weight transport a rank uses, and the facts that it is built from."""

from __future__ import annotations

from dataclasses import replace

from pekoe.pipeline.runs.context import RunContext
from pekoe.pipeline.weights.transport_setup import TransportSetup

MIB = 1 << 20
LATE_SECONDS = 5.0
"""How long a network filesystem may take to show a complete version."""
KEPT_VERSIONS = 3
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
    """Weights on disk for attached worlds, whatever the transport to the run's own rollout ranks is.

    A version is complete before they hear of it: one that is not there is gone, since newer ones have come.
    """
    setup = transport_setup(context, role)
    seconds = min(setup.bucket_seconds, LATE_SECONDS) if role == "rollout" else setup.bucket_seconds
    return replace(
        setup, folder=context.run.weights / SHARED, reader=reader, bucket_seconds=seconds, keep_versions=KEPT_VERSIONS
    )
