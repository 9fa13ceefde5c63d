"""vLLM's engine core from our settings: its arguments, the size of its KV cache, its end."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

from pekoe.pipeline.config.vllm_section import VllmConfig
from pekoe.pipeline.rollout.engine import EngineSettings, Instance
from pekoe.pipeline.rollout.engines.vllm.adapters import room_for
from pekoe.pipeline.rollout.engines.vllm.instance_group import executor_class, forget_shared_memory, instance_name

CPU_BLOCK_TOKENS = 32
"""Prompts share whole blocks only; vLLM's own choice on a CPU is 128."""
HOST_MEMORY_SHARE = 0.25
GIB = 1 << 30


def build_core(settings: EngineSettings, instance: Instance) -> Any:
    """vLLM's in-process client of an engine core: `add_request`, `get_output`, `abort_requests`, …"""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.executor import Executor

    arguments = engine_arguments(settings, instance)
    unknown = arguments.keys() - {field.name for field in dataclasses.fields(EngineArgs)}
    if unknown:
        raise ValueError(f"vllm.extra: {sorted(unknown)}; allowed: the engine arguments of the vLLM that is installed")
    config = EngineArgs(**arguments).create_engine_config()
    if settings.device == "cpu":
        if config.cache_config.kv_cache_memory_bytes is None:
            config.cache_config.kv_cache_memory_bytes = cpu_cache_bytes(config, settings)
    elif instance.size == 1:
        config.device_config.device = f"{settings.device}:{settings.device_index}"
    if instance.size == 1:
        return InprocClient(config, Executor.get_class(config), log_stats=False)
    name = instance_name(instance)
    try:
        return InprocClient(config, executor_class(name, instance, settings.device_index), log_stats=False)
    finally:
        forget_shared_memory(name)


def check_platform(device: str) -> None:
    """ValueError where the installed vLLM is for another kind of device."""
    from vllm.platforms import current_platform

    built = current_platform.device_type
    if built != device:
        raise ValueError(f"cluster.device: {device}, but the vLLM installed here is built for {built or 'no device'}")


def engine_arguments(settings: EngineSettings, instance: Instance) -> dict[str, Any]:
    """What is passed to vLLM's `EngineArgs`; `vllm.extra` comes last."""
    if settings.dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"rollout.dtype: {settings.dtype!r} with vllm; allowed: float32, bfloat16, float16")
    if settings.max_slots < 1:
        raise ValueError(f"rollout.max_slots: {settings.max_slots}; allowed: 1 or more")
    options = settings.options or VllmConfig()
    arguments: dict[str, Any] = {
        "model": settings.path,
        "tokenizer": settings.tokenizer_path,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": settings.dtype,
        "seed": 0,
        "max_model_len": settings.context_limit,
        "max_num_seqs": settings.max_slots,
        "tensor_parallel_size": instance.size,
        "distributed_executor_backend": "uni" if instance.size == 1 else "external_launcher",
        "async_scheduling": False,
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
        "enforce_eager": options.enforce_eager or settings.device == "cpu",
        "enable_prefix_caching": options.enable_prefix_caching and not settings.deterministic,
        "enable_sleep_mode": settings.sleeps and settings.device != "cpu",
        "gpu_memory_utilization": options.gpu_memory_utilization,
    }
    if options.kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(options.kv_cache_gib * GIB)
    if options.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = options.max_num_batched_tokens
    if options.max_loras:
        rank = room_for(options.max_lora_rank)
        arguments |= {"enable_lora": True, "max_loras": options.max_loras, "max_lora_rank": rank}
    if settings.device == "cpu":
        arguments["block_size"] = CPU_BLOCK_TOKENS
    return arguments | options.extra


def cpu_cache_bytes(config: Any, settings: EngineSettings) -> int:
    """Bytes for `max_slots` sequences of full length, within a quarter of the host's memory but for one at least."""
    block = config.cache_config.block_size
    blocks = math.ceil(settings.context_limit / block)
    model, parallel = config.model_config, config.parallel_config
    layers, heads, size = model.get_num_layers(parallel), model.get_num_kv_heads(parallel), model.get_head_size()
    block_bytes = 2 * layers * heads * size * model.dtype.itemsize * block
    wanted = (blocks * settings.max_slots + 1) * block_bytes
    allowed = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * HOST_MEMORY_SHARE)
    return int(max(min(wanted, allowed), (blocks + 1) * block_bytes))


def model_runner(core: Any) -> Any:
    """The object that holds the model, its sampler and its KV cache in this process."""
    return core.engine_core.model_executor.driver_worker.worker.model_runner
