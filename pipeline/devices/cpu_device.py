"""The host's processor as a device: gloo, plain memory, per-sequence SDPA."""

from __future__ import annotations

import os
import resource
from datetime import timedelta
from typing import TYPE_CHECKING

from pekoe.pipeline.devices.device import Device
from pekoe.pipeline.devices.memory_holders import Holder, host_holders, host_memory

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Backend, Store

MMAP_BYTES = 1 << 20
"""Memory of this size and more goes back to the system when it is freed. glibc raises the limit by itself up to 32 MiB
and then keeps holes between tensors: at 8,192 tokens SmolLM2's update peaked 1.7 GiB above what it keeps, not 0.4."""


class CpuDevice(Device):
    """Always there; every rank may share it."""

    kind = "cpu"
    process_group_backend = "gloo"
    visible_devices_variable = ""
    gres_name = ""
    communication_prefix = "GLOO_"
    float32_gap = 1e-3

    def is_available(self) -> bool:
        return True

    def count(self) -> int:
        return 1

    def torch_device(self, index: int) -> torch.device:
        import torch

        return torch.device("cpu")

    def set_current(self, index: int) -> None:
        """Nothing to choose: there is one."""

    def identity(self, index: int) -> str:
        return ""

    def synchronize(self) -> None:
        """Nothing is ever queued."""

    def empty_cache(self) -> None:
        """Freed host memory goes back by itself."""

    def memory(self) -> dict[str, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        with open("/proc/self/statm", encoding="ascii") as statm:
            resident = int(statm.read().split()[1]) * page
        return {
            "total": os.sysconf("SC_PHYS_PAGES") * page,
            "free": os.sysconf("SC_AVPHYS_PAGES") * page,
            "allocated": resident,
            "peak": max(resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        }

    def room(self, index: int) -> tuple[int, int]:
        return host_memory()

    def holders(self, index: int) -> list[Holder]:
        return host_holders()

    def attention_choice(self) -> str:
        return "sdpa"

    def environment_defaults(self, node_local_cache: str) -> dict[str, str]:
        return super().environment_defaults(node_local_cache) | {
            "OMP_WAIT_POLICY": "PASSIVE",
            "MALLOC_MMAP_THRESHOLD_": str(MMAP_BYTES),
        }

    def process_group(self, store: Store, rank: int, size: int, timeout: timedelta, host: str) -> Backend:
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        create = ProcessGroupGloo.create_device
        options._devices = [create(interface=name) for name in names] or [create(hostname=host)]
        return ProcessGroupGloo(store, rank, size, options)
