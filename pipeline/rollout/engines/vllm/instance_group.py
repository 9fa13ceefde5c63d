"""How vLLM's executor finds its place: from the instance, not from variables of the environment.

vLLM's own way for engines that step in processes started by others (`external_launcher`) reads RANK and LOCAL_RANK,
which could be a trainer's, and calls the shared memory through which ranks of a node add up by the same name in every
engine, so that two that start together on a node take each other's.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from pekoe.pipeline.rollout.engine import Instance

SHARED_MEMORY = Path("/dev/shm")


def executor_class(name: str, instance: Instance, device_index: int) -> type[Any]:
    """vLLM's executor for ranks that each step a part of one engine. `name` is the instance's on this node."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    def distributed_args(_: Any) -> tuple[str, int, int]:
        """What vLLM asks for: where ranks meet (they have; its end names shared memory), rank, device."""
        return f"instance:{name}", instance.rank, device_index

    return type("InstanceExecutor", (ExecutorWithExternalLauncher,), {"_distributed_args": distributed_args})


def instance_name(instance: Instance) -> str:
    """A name that no other engine of the node has; equal on all ranks of the instance. Blocks for the leader's word."""
    own = f"pekoe-engine-{uuid.uuid4().hex}"
    if instance.store is None:
        return own
    if instance.rank == 0:
        instance.store.set("name", own)
    return bytes(instance.store.get("name")).decode()


def forget_shared_memory(name: str) -> None:
    """Takes the names of an engine's shared memory away once all its ranks have it: the memory goes with the last
    process, however that ends."""
    for segment in SHARED_MEMORY.glob(f"{name}*"):
        segment.unlink(missing_ok=True)
    forget_queues()


def forget_queues() -> None:
    """The same for the queue of messages that vLLM's groups share, made by their first ranks (24 MiB). It is there when
    all ranks have it; left to vLLM, it stays behind when a rank is killed together with its children."""
    from vllm.distributed import parallel_state

    for group in [reference() for reference in parallel_state._groups.values()]:
        buffer = getattr(getattr(group, "mq_broadcaster", None), "buffer", None)
        if buffer is not None and buffer.is_creator:
            buffer.shared_memory.unlink()
            buffer.is_creator = False
