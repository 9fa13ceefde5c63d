"""What vLLM needs of the process before it is imported and built: environment, torch's default group, threads."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import random
import warnings
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from pekoe.pipeline.config.engine_checks import GET_VLLM
from pekoe.pipeline.devices.device import choose
from pekoe.pipeline.rollout.engine import Instance

GROUP_TIMEOUT = timedelta(minutes=30)

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Set where the user has not. Everything runs in this process, whose threads stay where the launcher put them."""


def check_installed() -> None:
    """ValueError that says how to get vLLM, where it is not there."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(f"rollout.backend: needs vLLM, which is not installed here: {GET_VLLM}")


def set_environment() -> None:
    """Before the first import of vllm."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _be_quiet(os.environ["VLLM_LOGGING_LEVEL"])
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise ValueError(
            "VLLM_ENABLE_V1_MULTIPROCESSING: is set to 1; allowed: 0, the engine runs in its rank's process"
        )


def _be_quiet(level: str) -> None:
    """What vLLM and torch say while vLLM is imported, before it has read the level, is nothing that a user can change;
    a log may be the terminal."""
    for name in ("vllm", "torch._library.triton"):
        logging.getLogger(name).setLevel(level)
    if not logging.getLogger("vllm").isEnabledFor(logging.WARNING):
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"vllm\.")


def make_default_group(instance: Instance, device: str) -> None:
    """torch's default group, which vLLM takes as its world, of the ranks of the instance alone: whatever RANK and
    WORLD_SIZE say. RuntimeError where this process already has one."""
    if dist.is_initialized():
        raise RuntimeError(
            "rollout.engine_process: torch's default process group of this process is taken (by a trainer, or by an "
            "engine that was not closed); allowed here: child"
        )
    store = instance.store
    if store is None:
        if instance.size > 1:
            raise ValueError(f"an instance of {instance.size} ranks needs a store where they meet")
        store = HashStore()
    backend = choose(device).process_group_backend
    dist.init_process_group(backend, store=store, rank=instance.rank, world_size=instance.size, timeout=GROUP_TIMEOUT)


def forget_groups() -> None:
    """Ends torch's default group and those that vLLM has made of it: the next engine would take them for its own."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


@contextlib.contextmanager
def process_kept() -> Iterator[None]:
    """While vLLM is built: it makes `torch.set_num_threads` do nothing, and seeds everybody's random numbers. This
    thread gets the process's number of threads first."""
    set_num_threads = torch.set_num_threads
    set_num_threads(torch.get_num_threads())
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
