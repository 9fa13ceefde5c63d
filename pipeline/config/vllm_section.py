"""`vllm`: what only the vLLM engine knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pekoe.pipeline.config.fields import setting


@dataclass
class VllmConfig:
    """Memory and compilation of a vLLM engine; AReaL's names."""

    gpu_memory_utilization: float = setting(
        0.9, "share of the device's memory for weights and KV cache, where kv_cache_gib is null", above=0, maximum=1
    )
    kv_cache_gib: float | None = setting(
        None,
        "memory of the KV cache per rank; null = what gpu_memory_utilization leaves (on cpu: what max_slots sequences "
        "of full length need, at most a quarter of the host's memory)",
        above=0,
    )
    enforce_eager: bool = setting(False, "no CUDA graphs and no compilation (always so on cpu)")
    enable_prefix_caching: bool = setting(True, "samples of one prompt share its prefill")
    max_num_batched_tokens: int | None = setting(
        None, "tokens of one pass, which a pause may have to wait for; null = vLLM's choice", minimum=1
    )
    max_loras: int = setting(0, "LoRA adapters that can be loaded at once; 0 = none", minimum=0)
    max_lora_rank: int = setting(64, "largest rank of a LoRA adapter", minimum=1)
    extra: dict[str, Any] = setting(dict, "further engine arguments of vLLM, as they are")
