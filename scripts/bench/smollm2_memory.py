"""Memory of a micro-batch of 8,192 tokens of SmolLM2-135M: an update by the fsdp engine, in a process of its own.

    python scripts/bench/smollm2_memory.py [--tokens 8192] [--dtype bfloat16] [--logits]

bfloat16 with float32 master weights, AdamW, gradient checkpointing, sequences of 1,024 tokens, all of which train, with
an entropy bonus. The process is measured before the model is there (after an update of a tiny one, which loads the
libraries), and at its peak in the update; from the difference are taken, by their sizes: weights, optimiser state, and
gradients of all weights. What remains are activations, weights gathered in bfloat16, gradients before they are reduced
to float32, log-probs, and what the allocator wastes. `--logits`: with every logit.

glibc's allocator raises by itself the size from which on memory goes back to the system when it is freed, and then
keeps holes between tensors: `MALLOC_MMAP_THRESHOLD_` keeps it at 1 MiB here (`smollm2_extra_mib_malloc`: without).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from logprob_peak import resident
from smollm2_material import MODEL, find_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LENGTH = 1024
THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def memory_figures(quick: bool) -> dict[str, Any]:
    """Of the kernel's way and, unless quick, of the way by logits; quick takes 1,024 tokens."""
    find_model()
    tokens = 1024 if quick else 8192
    ours = measured(tokens, THRESHOLD)
    figures = {f"smollm2_{name}": value for name, value in ours.items()}
    if not quick:
        whole = measured(tokens, THRESHOLD, "--logits")
        figures |= {f"smollm2_{name}_by_logits": whole[name] for name in ("extra_mib", "seconds")}
        figures["smollm2_extra_mib_malloc"] = measured(tokens, {})["extra_mib"]
    return figures


def measured(tokens: int, environment: Mapping[str, str], *options: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--tokens", str(tokens), *options]
    own = {**os.environ, **environment}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=3600, env=own)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class EntropyBonus:
    """Maximum likelihood with an entropy bonus: every log-prob and entropy has a gradient."""

    needs_entropy_gradient = True

    def __call__(self, logprobs: Any, entropy: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        count = batch["loss_mask"].sum()
        return -(logprobs.sum() + 0.01 * entropy.sum()) / count, {"loss": -logprobs.detach().sum() / count}


def warm_up(build: Callable[[Path], Any], step: Callable[[Any, list[Any]], object]) -> None:
    """An update of a tiny model."""
    from tiny_model import write_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        engine = build(write_tiny_model(Path(folder)))
        step(engine, [[1, 2, 3, 4]])
        engine.close()
    gc.collect()


def update_memory(model: Path, tokens: int, dtype: str, by_logits: bool) -> dict[str, Any]:
    import numpy as np

    from pekoe.pipeline.algorithm.token_logprobs import token_logprobs
    from pekoe.pipeline.config.actor import ActorConfig
    from pekoe.pipeline.config.optimizer import OptimizerConfig
    from pekoe.pipeline.devices.cpu_device import CpuDevice
    from pekoe.pipeline.train.engines.fsdp_engine import FsdpEngine
    from pekoe.pipeline.train.engines.isolation import pack_tokens

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def build(folder: Path) -> Any:
        optimizer = OptimizerConfig(lr=1e-6)
        config = ActorConfig(path=str(folder), dtype=dtype, gradient_checkpointing=True, optimizer=optimizer)
        return FsdpEngine(config, token_logprobs=token_logprobs, device=CpuDevice(), seed=1)

    def step(engine: Any, rows: list[Any]) -> dict[str, float]:
        batch = pack_tokens([np.asarray(row, dtype=np.int32) for row in rows])
        found: dict[str, float] = engine.train_batch([batch], EntropyBonus())
        return found

    warm_up(build, step)
    libraries = resident("VmRSS")
    engine = build(model)
    assert not engine._head.by_logits
    engine._head.by_logits = by_logits
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, 49_152, LENGTH) for _ in range(tokens // LENGTH)]
    step(engine, [rows[0][:16]])
    Path("/proc/self/clear_refs").write_text("5")
    ready = resident("VmRSS")
    started = time.perf_counter()
    stats = step(engine, rows)
    seconds = time.perf_counter() - started
    weights = sum(size_of(p) for p in engine.model.parameters())
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    optimizer = sum(size_of(value) for value in states if torch.is_tensor(value))
    peak = (resident("VmHWM") - libraries) / 1024
    return {
        "extra_mib": round(peak - 2 * weights - optimizer, 1),
        "peak_mib": round(peak, 1),
        "before_mib": round((ready - libraries) / 1024, 1),
        "weights_mib": round(weights, 1),
        "gradients_mib": round(weights, 1),
        "optimizer_mib": round(optimizer, 1),
        "tokens": tokens,
        "loss": round(stats["loss"], 3),
        "seconds": round(seconds, 1),
    }


def size_of(tensor: Any) -> float:
    """MiB of a tensor or of this rank's part."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return float(local.numel() * local.element_size() / (1 << 20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--logits", action="store_true")
    parser.add_argument("--model", type=Path, default=MODEL)
    options = parser.parse_args()
    found = update_memory(find_model(options.model), options.tokens, options.dtype, options.logits)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
