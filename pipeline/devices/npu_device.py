"""Ascend devices by torch_npu, which is imported only when one is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pekoe.pipeline.devices.device import Device, host_identity
from pekoe.pipeline.devices.memory_holders import Holder, ask_vendor

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Backend, Store


def _npu() -> Any:
    """The `torch.npu` module; imports torch_npu unless something has registered the device already."""
    import torch

    if not hasattr(torch, "npu"):
        try:
            importlib.import_module("torch_npu")
        except ImportError as error:
            raise RuntimeError(f"cluster.device: npu needs torch_npu and CANN on this host: {error}") from error
    return getattr(torch, "npu")  # noqa: B009


class NpuDevice(Device):
    """torch.npu and HCCL."""

    kind = "npu"
    process_group_backend = "hccl"
    visible_devices_variable = "ASCEND_RT_VISIBLE_DEVICES"
    gres_name = "npu"
    communication_prefix = "HCCL_"

    def is_available(self) -> bool:
        if "torch.npu" not in sys.modules and importlib.util.find_spec("torch_npu") is None:
            return False
        try:
            return bool(_npu().is_available())
        except RuntimeError:
            return False

    def count(self) -> int:
        return int(_npu().device_count())

    def torch_device(self, index: int) -> torch.device:
        _npu()
        import torch

        return torch.device("npu", index)

    def set_current(self, index: int) -> None:
        _npu().set_device(index)

    def identity(self, index: int) -> str:
        """Host and physical id: the visible list maps the index, as CANN numbers what is left of it from 0."""
        return f"{host_identity()}/{self._physical(index)}"

    def _physical(self, index: int) -> str:
        visible = [entry for entry in os.environ.get(self.visible_devices_variable, "").split(",") if entry]
        return visible[index] if index < len(visible) else str(index)

    def synchronize(self) -> None:
        _npu().synchronize()

    def empty_cache(self) -> None:
        _npu().empty_cache()

    def memory(self) -> dict[str, int]:
        npu = _npu()
        free, total = npu.mem_get_info()
        return {
            "total": int(total),
            "free": int(free),
            "allocated": int(npu.memory_allocated()),
            "peak": int(npu.max_memory_allocated()),
        }

    def room(self, index: int) -> tuple[int, int]:
        free, total = _npu().mem_get_info(index)
        return int(free), int(total)

    def holders(self, index: int) -> list[Holder]:
        number = self._physical(index)
        return [holder for holder in ask_vendor()[1] if holder.device == number]

    def attention_choice(self) -> str:
        return "sdpa"

    def environment_defaults(self, node_local_cache: str) -> dict[str, str]:
        """Ports of HCCL are left to the operating system, so that jobs on one node never clash; long connect limit,
        as ranks reach the first collective minutes apart (our own limits are shorter where it matters)."""
        return super().environment_defaults(node_local_cache) | {
            "ASCEND_CACHE_PATH": os.path.join(node_local_cache, "ascend"),
            "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
            "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
            "HCCL_CONNECT_TIMEOUT": "1800",
            "HCCL_EXEC_TIMEOUT": "1836",
        }

    def rng_state(self) -> torch.Tensor | None:
        state: torch.Tensor = _npu().get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        _npu().set_rng_state(state)

    def process_group(self, store: Store, rank: int, size: int, timeout: timedelta, host: str) -> Backend:
        """By the creator that torch_npu registered with torch under `hccl`."""
        _npu()
        from torch._C._distributed_c10d import _DistributedBackendOptions
        from torch.distributed import Backend as Backends

        plugin = Backends._plugins.get("HCCL")
        if plugin is None:
            raise RuntimeError("process-group backend hccl: torch_npu registered none (is CANN set up on this host?)")
        if not plugin.extended_api:
            group: Backend = plugin.creator_fn(store, rank, size, timeout)
            return group
        options = _DistributedBackendOptions()
        options.store, options.group_rank, options.group_size, options.timeout = store, rank, size, timeout
        options.group_id = "weights"
        options.global_ranks_in_group = list(range(size))
        group = plugin.creator_fn(options, None)
        return group
