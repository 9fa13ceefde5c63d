"""vLLM's engine core from our settings: its arguments, the size of its KV cache, its end."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator
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
    with keys_named(settings, instance):
        config = EngineArgs(**arguments).create_engine_config()
    if settings.device == "cpu":
        check_head_size(config, settings)
        size_cpu_cache(config, settings)
    elif instance.size == 1:
        config.device_config.device = f"{settings.device}:{settings.device_index}"
    with keys_named(settings, instance):
        if instance.size == 1:
            return InprocClient(config, Executor.get_class(config), log_stats=False)
        name = instance_name(instance)
        try:
            return InprocClient(config, executor_class(name, instance, settings.device_index), log_stats=False)
        finally:
            forget_shared_memory(name)


@contextlib.contextmanager
def keys_named(settings: EngineSettings, instance: Instance) -> Iterator[None]:
    """What vLLM refuses is told with the keys that decide it, and without the rest of its report."""
    try:
        yield
    except ValueError as error:
        found = getattr(error, "errors", None)
        if found is None:
            said = str(error)
        else:
            said = "; ".join(
                f"{'.'.join(map(str, entry['loc']))} {entry['msg'].removeprefix('Value error, ')}".strip()
                for entry in found(include_url=False)
            )
        options = settings.options or VllmConfig()
        raise ValueError(
            f"vllm refuses rollout.path {settings.path} with rollout.dtype {settings.dtype}, gconfig.max_tokens "
            f"{settings.context_limit}, rollout.max_slots {settings.max_slots}, {instance.size} ranks per engine, "
            f"vllm.kv_cache_gib {options.kv_cache_gib}, vllm.max_num_batched_tokens {options.max_num_batched_tokens}, "
            f"vllm.extra {options.extra}: {said}"
        ) from error


def check_head_size(config: Any, settings: EngineSettings) -> None:
    """vLLM's attention on CPUs is compiled for some head sizes; with others it fails at the first token only."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size, allowed = config.model_config.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
    if size not in allowed:
        raise ValueError(
            f"rollout.path: {settings.path} has attention heads of size {size}, which vllm cannot serve on a cpu; "
            f"allowed: {', '.join(map(str, allowed))}, or an hf engine"
        )


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


def size_cpu_cache(config: Any, settings: EngineSettings) -> None:
    """The KV cache as it is asked for, if it holds one sequence of full length; else room for `max_slots` of them,
    within a quarter of the host's memory but for one at least."""
    block = config.cache_config.block_size
    blocks = math.ceil(settings.context_limit / block)
    model, parallel = config.model_config, config.parallel_config
    layers, heads, size = model.get_num_layers(parallel), model.get_num_kv_heads(parallel), model.get_head_size()
    block_bytes = 2 * layers * heads * size * model.dtype.itemsize * block
    least = int((blocks + 1) * block_bytes)
    given = config.cache_config.kv_cache_memory_bytes
    if given is not None:
        if given < least:
            raise ValueError(
                f"vllm.kv_cache_gib: {given / GIB:g} does not hold one sequence of {settings.context_limit} tokens; "
                f"allowed: >= {least / GIB:g}, or null"
            )
        return
    wanted = int((blocks * settings.max_slots + 1) * block_bytes)
    allowed = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * HOST_MEMORY_SHARE)
    config.cache_config.kv_cache_memory_bytes = max(min(wanted, allowed), least)


def model_runner(core: Any) -> Any:
    """The object that holds the model, its sampler and its KV cache in this process."""
    return core.engine_core.model_executor.driver_worker.worker.model_runner
