"""What the rest of Pekoe asks of a device vendor, and the choice of one.

`Device` holds everything that differs between vendors. Importing this module imports no torch: the launcher asks for
variable names before any rank exists.
"""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

from pekoe.pipeline.registry import DEVICES, resolve

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Backend, Store

    from pekoe.pipeline.devices.memory_holders import Holder

logger = logging.getLogger(__name__)


class Device:
    """One vendor's devices, as this process sees them; the methods that touch a device use the current one."""

    kind: ClassVar[str]
    """torch's device type: `cpu`, `cuda` or `npu`."""
    process_group_backend: ClassVar[str]
    """`gloo`, `nccl` or `hccl`."""
    visible_devices_variable: ClassVar[str]
    """Environment variable that narrows what a process sees; empty where there is none."""
    gres_name: ClassVar[str]
    """Slurm's generic resource; empty where none is asked for."""
    communication_prefix: ClassVar[str]
    """Environment variables with this prefix must be equal on all members of a group."""
    float32_gap: ClassVar[float] = 0.05
    """As `logprob_gap_limit`, of float32: matrix products may be rounded to TF32 or HF32, as coarse as float16."""

    def is_available(self) -> bool:
        """True when at least one device can be used here."""
        raise NotImplementedError

    def count(self) -> int:
        """Devices that this process sees."""
        raise NotImplementedError

    def torch_device(self, index: int) -> torch.device:
        raise NotImplementedError

    def set_current(self, index: int) -> None:
        """Makes a device this thread's default."""
        raise NotImplementedError

    def identity(self, index: int) -> str:
        """Names the physical device across the cluster; two processes on one device give equal names. Empty if
        shareable."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Returns when everything queued on the device is done."""
        raise NotImplementedError

    def empty_cache(self) -> None:
        """Gives unused memory of torch's allocator back to the device."""
        raise NotImplementedError

    def memory(self) -> dict[str, int]:
        """Bytes: `total`, `free` (on the device), `allocated`, `peak` (by this process)."""
        raise NotImplementedError

    def room(self, index: int) -> tuple[int, int]:
        """(free, total) bytes of a device, for whoever starts on it now."""
        raise NotImplementedError

    def holders(self, index: int) -> list[Holder]:
        """The processes that hold memory of a device, as far as they can be seen; may start the vendor's command.
        OSError or ValueError when that gives nothing."""
        raise NotImplementedError

    def attention_choice(self) -> str:
        """Packed attention that `auto` stands for here: `flash` or `sdpa`."""
        raise NotImplementedError

    def logprob_gap_limit(self, dtype: str) -> float:
        """Mean |difference| of token log-probs at temperature 1, on any tokens, that right implementations do not
        exceed when the coarser one computes in `dtype`. Measured, SmolLM2 on random tokens against float32: bfloat16
        0.065, float16 0.01; float32 in another order 1e-5. Room of 4 for other models, far below a wrong weight."""
        return {"bfloat16": 0.25, "float16": 0.05}.get(dtype, self.float32_gap)

    def environment_defaults(self, node_local_cache: str) -> dict[str, str]:
        """Variables to set where the user has not, before torch is imported; caches go under `node_local_cache`."""
        return {
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(node_local_cache, "inductor"),
            "TRITON_CACHE_DIR": os.path.join(node_local_cache, "triton"),
            "TORCH_EXTENSIONS_DIR": os.path.join(node_local_cache, "extensions"),
        }

    def rng_state(self) -> torch.Tensor | None:
        """State of the current device's generator (uint8, host memory); None where the host's generator is the only
        one."""
        return None

    def set_rng_state(self, state: torch.Tensor) -> None:
        raise ValueError(f"device {self.kind}: has no generator of its own, yet a state was given for one")

    def process_group(self, store: Store, rank: int, size: int, timeout: timedelta, host: str) -> Backend:
        """A group of its own, independent of torch's default group. Blocks until all members are there.

        `host` is the address under which other members reach this one (used by gloo). Raises RuntimeError after
        `timeout`.
        """
        raise NotImplementedError


def choose(kind: str) -> Device:
    """The device of a configured kind; `auto` takes the first of cuda, npu and cpu that is usable here."""
    if kind == "auto":
        device = next(found for found in map(_build, ("cuda", "npu", "cpu")) if found.is_available())
        logger.info("cluster.device: auto chose %s", device.kind)
        return device
    if kind not in DEVICES:
        raise ValueError(f"cluster.device: {kind!r} is not known; allowed: auto, {', '.join(sorted(DEVICES))}")
    return _build(kind)


def for_backend(backend: str) -> Device:
    """The device whose process groups are of this backend (`gloo`, `nccl`, `hccl`)."""
    devices = [_build(kind) for kind in DEVICES]
    for device in devices:
        if device.process_group_backend == backend:
            return device
    allowed = ", ".join(sorted(device.process_group_backend for device in devices))
    raise ValueError(f"process-group backend: {backend!r} is not known; allowed: {allowed}")


def host_identity() -> str:
    """Name of this host, for device identities."""
    return socket.gethostname()


def _build(kind: str) -> Device:
    device = resolve(DEVICES, kind, "cluster.device")()
    assert isinstance(device, Device)
    return device
