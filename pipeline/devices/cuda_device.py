"""NVIDIA devices (and AMD's, which torch names `cuda` too)."""

from __future__ import annotations

import importlib.util
import os
from datetime import timedelta
from typing import TYPE_CHECKING

from pekoe.pipeline.devices.device import Device, host_identity
from pekoe.pipeline.devices.memory_holders import Holder, ask_vendor

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Backend, Store


class CudaDevice(Device):
    """torch.cuda and NCCL."""

    kind = "cuda"
    process_group_backend = "nccl"
    visible_devices_variable = "CUDA_VISIBLE_DEVICES"
    gres_name = "gpu"
    communication_prefix = "NCCL_"

    def is_available(self) -> bool:
        import torch

        return torch.cuda.is_available()

    def count(self) -> int:
        import torch

        return torch.cuda.device_count()

    def torch_device(self, index: int) -> torch.device:
        import torch

        return torch.device("cuda", index)

    def set_current(self, index: int) -> None:
        import torch

        torch.cuda.set_device(index)

    def identity(self, index: int) -> str:
        import torch

        return f"{host_identity()}/{torch.cuda.get_device_properties(index).uuid}"

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        import torch

        torch.cuda.empty_cache()

    def memory(self) -> dict[str, int]:
        import torch

        free, total = torch.cuda.mem_get_info()
        return {
            "total": total,
            "free": free,
            "allocated": torch.cuda.memory_allocated(),
            "peak": torch.cuda.max_memory_allocated(),
        }

    def room(self, index: int) -> tuple[int, int]:
        import torch

        free, total = torch.cuda.mem_get_info(index)
        return int(free), int(total)

    def holders(self, index: int) -> list[Holder]:
        import torch

        uuid = str(torch.cuda.get_device_properties(index).uuid)
        return [holder for holder in ask_vendor()[1] if holder.device.removeprefix("GPU-") == uuid]

    def attention_choice(self) -> str:
        return "flash" if importlib.util.find_spec("flash_attn") else "sdpa"

    def environment_defaults(self, node_local_cache: str) -> dict[str, str]:
        return super().environment_defaults(node_local_cache) | {
            "CUDA_CACHE_PATH": os.path.join(node_local_cache, "cuda"),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "NCCL_CUMEM_ENABLE": "0",
        }

    def rng_state(self) -> torch.Tensor | None:
        import torch

        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        import torch

        torch.cuda.set_rng_state(state)

    def process_group(self, store: Store, rank: int, size: int, timeout: timedelta, host: str) -> Backend:
        import torch.distributed as dist

        if not dist.is_nccl_available():
            raise RuntimeError("process-group backend nccl: this torch was built without NCCL")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
