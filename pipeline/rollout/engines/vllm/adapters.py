"""LoRA adapters of a vLLM engine: folders in PEFT's format, by name and version."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pekoe.pipeline.config.vllm_section import VllmConfig

CONFIG_NAME = "adapter_config.json"
WEIGHT_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Room for ranks that vLLM can be built with."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One that samples now."""

    number: int
    """vLLM's id of the name."""
    folder: Path
    """Read again after a load of the model's own weights."""
    version: int


def room_for(max_lora_rank: int) -> int:
    """The smallest of vLLM's ranks that holds it."""
    for rank in RANKS:
        if rank >= max_lora_rank:
            return rank
    raise ValueError(f"vllm.max_lora_rank: {max_lora_rank}; allowed: 1 to {RANKS[-1]}")


def check_adapter(name: str, folder: Path, known: list[str], options: VllmConfig) -> None:
    """ValueError for an adapter that this engine cannot take, found from its files alone."""
    if options.max_loras == 0:
        raise ValueError(f"adapter {name!r}: this engine was built without adapters; set vllm.max_loras")
    if not name:
        raise ValueError("adapter '': a name is needed; the empty one is the model itself")
    if name not in known and len(known) >= options.max_loras:
        raise ValueError(
            f"adapter {name!r}: {', '.join(known)} are loaded; allowed: vllm.max_loras ({options.max_loras}) at once"
        )
    try:
        config = json.loads((folder / CONFIG_NAME).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"adapter {name!r}: {folder / CONFIG_NAME} cannot be read: {error}") from error
    if config.get("peft_type") != "LORA":
        raise ValueError(f"adapter {name!r}: peft_type {config.get('peft_type')!r} in {folder}; allowed: LORA")
    rank = max([config.get("r", 0), *(config.get("rank_pattern") or {}).values()])
    if not 1 <= rank <= options.max_lora_rank:
        raise ValueError(f"adapter {name!r}: rank {rank}; allowed: 1 to vllm.max_lora_rank ({options.max_lora_rank})")
    if not any((folder / weights).is_file() for weights in WEIGHT_NAMES):
        raise ValueError(f"adapter {name!r}: no weights in {folder}; allowed: {' or '.join(WEIGHT_NAMES)}")


class AdapterShelf:
    """The adapters of one rank's vLLM. Used by the engine's thread; the caller drops the keys and values of an adapter
    that is replaced."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._adapters: dict[str, Adapter] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._adapters)

    def version(self, name: str) -> int:
        return self._adapters[name].version

    def load(self, name: str, folder: Path, version: int) -> None:
        """Loads it, or replaces the one of that name. After an exception (ValueError for modules that the model cannot
        adapt) it is as before."""
        known = self._adapters.get(name)
        adapter = Adapter(len(self._adapters) + 1 if known is None else known.number, folder, version)
        self._client.add_lora(self._request(name, adapter, load_inplace=True))
        self._adapters[name] = adapter

    def reload(self) -> None:
        """Loads all again: vLLM drops them with the model's old weights."""
        for name, adapter in self._adapters.items():
            self._client.add_lora(self._request(name, adapter, load_inplace=True))

    def request(self, name: str) -> Any:
        """What a request that is sampled by the adapter carries; None for the model itself."""
        return self._request(name, self._adapters[name]) if name else None

    def close(self) -> None:
        """Lets go of vLLM; names and versions can still be read."""
        self._client = None

    def _request(self, name: str, adapter: Adapter, load_inplace: bool = False) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, adapter.number, str(adapter.folder), load_inplace=load_inplace)
