"""An engine that does not fit is refused before it is built, and the holders of the memory are named."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent))

from child_worlds import settings

from pekoe.pipeline.config.vllm_section import VllmConfig
from pekoe.pipeline.devices.cpu_device import CpuDevice
from pekoe.pipeline.devices.memory_holders import host_holders
from pekoe.pipeline.rollout.child.child_engine import ChildEngine
from pekoe.pipeline.rollout.child.nursery import EngineNursery
from pekoe.pipeline.rollout.engine_memory import check_engine_memory, memory_needs

GIBI = 1 << 30
TOKEN = 2 * 2 * 2 * 16
"""Elements of keys and values of one token: two layers, two heads of 16."""


def test_needs_follow_the_files_and_the_settings(tiny_model: Path) -> None:
    weights = sum(tensor.numel() for tensor in load_file(tiny_model / "model.safetensors").values())
    base = settings(str(tiny_model), context_limit=100, max_slots=8, options=VllmConfig())
    hf = memory_needs("hf", base, 10 * GIBI)
    assert (hf.weights, hf.cache) == (4 * weights, 4 * 100 * TOKEN)
    assert memory_needs("hf", replace(base, dtype="bfloat16"), 10 * GIBI).total == hf.total // 2
    assert memory_needs("vllm", base, 10 * GIBI).cache == 8 * 4 * 100 * TOKEN
    assert memory_needs("vllm", base, 4 * 1024).cache == 1024
    assert memory_needs("vllm", replace(base, device="cuda"), 10 * GIBI).total == 9 * GIBI
    sized = replace(base, device="cuda", options=VllmConfig(kv_cache_gib=1.5))
    assert memory_needs("vllm", sized, 10 * GIBI).cache == 1.5 * GIBI


def test_each_rank_of_an_engine_holds_its_part(tiny_model: Path) -> None:
    """A model that is larger than a device is what several ranks are for."""
    base = settings(str(tiny_model), context_limit=100, max_slots=8, options=VllmConfig())
    alone, half = (memory_needs("vllm", base, 10 * GIBI, num_ranks) for num_ranks in (1, 2))
    assert (half.weights, half.cache) == (alone.weights // 2, alone.cache // 2)
    device = replace(base, device="cuda")
    assert memory_needs("vllm", device, alone.weights).total > 0.9 * alone.weights
    assert memory_needs("vllm", device, alone.weights, 2).total <= 0.9 * alone.weights


def test_one_that_fits_is_let_through(tiny_model: Path) -> None:
    check_engine_memory("hf", settings(str(tiny_model)))
    check_engine_memory("hf", settings("no-such-folder"))


def test_the_holder_is_named(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "room", lambda self, index: (1000, 8 * GIBI))
    monkeypatch.setattr(CpuDevice, "holders", lambda self, index: [h for h in host_holders(99) if h.pid == os.getpid()])
    with pytest.raises(ValueError, match=r"the hf engine needs \d+ bytes of the host .*, and 1000 of") as error:
        check_engine_memory("hf", settings(str(tiny_model)))
    assert f"pid {os.getpid()} (" in str(error.value)
    assert "holds 0." in str(error.value)
    assert "rollout.max_slots" in str(error.value)


def test_a_child_refuses_with_the_same_words(tiny_model: Path) -> None:
    """Asked for more than any machine has: the real figures, through the real process."""
    wants: dict[str, Any] = {"options": VllmConfig(kv_cache_gib=1e6)}
    with EngineNursery() as nursery, pytest.raises(ValueError, match=r"KV cache 1000000\.0 GiB.*pid \d+ \(.*holds"):
        ChildEngine(nursery, "vllm", settings(str(tiny_model), **wants))
