"""Before an engine is built: is there room for it, and who has taken it if not?"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pekoe.pipeline.devices.device import choose
from pekoe.pipeline.devices.memory_holders import gib
from pekoe.pipeline.rollout.engine import EngineSettings

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
MOST_OF_THE_HOST = 4
"""Without a size given, a vllm engine on a cpu takes at most this part of the host's memory for its cache."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes that one rank of an engine takes as it starts."""

    weights: int
    cache: int
    """Of the keys and values; of an engine whose cache grows with its sequences, one sequence of full length."""

    @property
    def total(self) -> int:
        return self.weights + self.cache


def memory_needs(engine: str, settings: EngineSettings, device_bytes: int, num_ranks: int = 1) -> MemoryNeeds:
    """By the headers of the model's files and its `config.json`; `device_bytes` is all that the device has. Each of
    `num_ranks` that make the engine together holds its part."""
    item = ITEM_BYTES.get(settings.dtype, 4)
    folder = Path(settings.path)
    weights = num_parameters(folder) * item // num_ranks
    token = cache_bytes_per_token(json.loads((folder / "config.json").read_text()), item) // num_ranks
    options = settings.options
    if engine != "vllm" or options is None:
        return MemoryNeeds(weights, settings.context_limit * token)
    if options.kv_cache_gib is not None:
        return MemoryNeeds(weights, int(options.kv_cache_gib * (1 << 30)))
    if settings.device != "cpu":
        return MemoryNeeds(weights, max(0, int(options.gpu_memory_utilization * device_bytes) - weights))
    wanted = settings.max_slots * settings.context_limit * token
    return MemoryNeeds(weights, min(wanted, device_bytes // MOST_OF_THE_HOST))


def num_parameters(folder: Path) -> int:
    """By the headers of the safetensors files; nothing is loaded. A folder with other files gives 0: not known."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total


def cache_bytes_per_token(config: dict[str, Any], item_bytes: int) -> int:
    """Keys and values of all layers; 0 where the configuration does not say."""
    config = config.get("text_config", config)
    heads = config.get("num_attention_heads", 0)
    size = config.get("head_dim") or (config.get("hidden_size", 0) // heads if heads else 0)
    return int(2 * config.get("num_hidden_layers", 0) * config.get("num_key_value_heads", heads) * size * item_bytes)


def check_engine_memory(
    engine: str, settings: EngineSettings, num_ranks: int = 1, key: str = "rollout.backend"
) -> None:
    """ValueError, with the processes that hold the memory, when the engine does not fit into what is free; `key` asks
    for it."""
    if not (Path(settings.path) / "config.json").is_file():
        return
    device = choose(settings.device)
    free, total = device.room(settings.device_index)
    needs = memory_needs(engine, settings, total, num_ranks)
    if needs.total <= free:
        return
    place = "the host" if settings.device == "cpu" else f"{settings.device} device {settings.device_index}"
    try:
        held = "; ".join(holder.sentence() for holder in device.holders(settings.device_index))
    except (OSError, ValueError) as error:
        held = f"the holders are not known: {error}"
    raise ValueError(
        f"{key}: the {engine} engine needs {needs.total} bytes of {place} (weights {gib(needs.weights)}, KV "
        f"cache {gib(needs.cache)}), and {free} of {total} bytes are free: {held or 'no holder is seen from here'}; "
        "allowed: what fits (rollout.max_slots, gconfig.max_tokens, vllm.kv_cache_gib or vllm.gpu_memory_utilization "
        "make the cache smaller)"
    )
