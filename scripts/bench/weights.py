"""New weights, from the trainer into a running engine: collective and disk, against a plain copy of the same bytes.

SmolLM2 in the real trainer (FSDP, one rank, float32 masters) and the real engines `hf` and `vllm`, in two processes
with a thread each. An update is what a rollout rank stands still for: the engine stops, tensors are cast and gathered,
travel, are loaded, log-probs of fixed sequences are computed, the engine goes on. A figure counts only when these are
the trainer's. Times are medians of warm updates: `arrival` is what the engine waited for tensors, `gather` what the
trainer took to make them (the two overlap), `load` what the engine took to put them in place.

    python scripts/bench/weights.py [--quick] [--engines vllm,hf] [--dtypes bfloat16,float32] [--bucket-mib N]
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing as mp
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench_result import report
from smollm2_material import MODEL, find_model
from weights_side import Waiting, receive_updates, transport_setup

from pekoe.pipeline.algorithm.token_logprobs import token_logprobs
from pekoe.pipeline.config.actor import ActorConfig
from pekoe.pipeline.devices.device import choose
from pekoe.pipeline.messages import PrepareWeights
from pekoe.pipeline.records import Finish, Trajectory, pack
from pekoe.pipeline.registry import WEIGHT_TRANSPORTS, resolve
from pekoe.pipeline.runs.context import CHECK_LENGTH, NUM_CHECK_SEQUENCES
from pekoe.pipeline.train.engines.fsdp_engine import FsdpEngine

MIB = 1 << 20
TRANSPORTS = ("collective", "disk")


def build_trainer(model: Path, dtype: str) -> FsdpEngine:
    return FsdpEngine(
        ActorConfig(path=str(model), dtype="float32"), token_logprobs=token_logprobs, device=choose("cpu"),
        weight_dtype=dtype, total_steps=1, seed=1,
    )  # fmt: skip


def trainer_logprobs(trainer: FsdpEngine, sequences: list[np.ndarray]) -> list[np.ndarray]:
    rows = []
    for ids in sequences:
        mask = np.ones(len(ids), np.uint8)
        mask[0] = 0
        never, zeros = np.full(len(ids), -1, np.int32), np.zeros(len(ids), np.float32)
        rows.append((0, Trajectory(ids, mask, zeros, never, never, 1, 0.0, Finish.STOP)))
    (found,) = trainer.forward([pack(rows)], 1.0)
    return np.split(found.numpy(), np.cumsum([len(ids) for ids in sequences])[:-1])


def check_sequences(vocabulary: int) -> list[np.ndarray]:
    """As many and as long as those of a run."""
    rng = np.random.Generator(np.random.Philox(1))
    return list(rng.integers(0, vocabulary, (NUM_CHECK_SEQUENCES, CHECK_LENGTH)).astype(np.int32))


def copy_seconds(trainer: FsdpEngine) -> float:
    """The floor: the bytes that are sent, copied once within this process."""
    weights = [tensor.clone() for _, tensor in trainer.weights()]
    targets = [torch.empty_like(tensor).fill_(0) for tensor in weights]
    found = []
    for _ in range(7):
        began = time.perf_counter()
        for target, tensor in zip(targets, weights, strict=True):
            target.copy_(tensor)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


@contextmanager
def engine_process(options: argparse.Namespace, engine: str, dtype: str, folder: str) -> Iterator[Connection]:
    here, there = mp.get_context("spawn").Pipe()
    settings = {"dtype": dtype, "bucket_bytes": options.bucket_mib * MIB}
    job = (there, folder, str(options.model), engine, settings)
    process = mp.get_context("spawn").Process(target=receive_updates, args=job)
    process.start()
    there.close()
    try:
        assert here.recv() == "up"
        yield here
        here.send(None)
        process.join(60)
    finally:
        if process.is_alive():
            process.kill()


class Updates:
    """Brings one engine process version after version by one transport."""

    def __init__(self, name: str, trainer: FsdpEngine, pipe: Connection, folder: str, bucket_bytes: int) -> None:
        self.name, self.trainer, self.pipe = name, trainer, pipe
        self.sender = resolve(WEIGHT_TRANSPORTS, name, "transport").sender(transport_setup(folder, 0, bucket_bytes))
        self.endpoint = self.sender.open_epoch(0, (0, 1))
        self.version = 0

    def update(self, sequences: list[np.ndarray]) -> dict[str, Any]:
        """Seconds of one update in all and of its parts, and the engine's log-probs after it."""
        self.version += 1
        specs = self.trainer.weight_specs()
        began = time.perf_counter()
        self.pipe.send((self.name, PrepareWeights(self.version, 0, (0, 1), self.endpoint, specs), sequences))
        assert self.pipe.recv() == "ready"
        weights = Waiting(self.trainer.weights())
        sent_from = time.perf_counter()
        self.sender.send(self.version, 0, (0, 1), specs, iter(weights))
        sent = time.perf_counter() - sent_from
        found: dict[str, Any] = self.pipe.recv()
        return {"seconds": time.perf_counter() - began, "gather": weights.seconds, "send": sent, **found}


def measure(options: argparse.Namespace, trainer: FsdpEngine, engine: str, dtype: str) -> dict[str, Any]:
    """{transport: {seconds, over_memcpy, parts}}."""
    floor = copy_seconds(trainer)
    sequences = check_sequences(trainer.model.config.vocab_size)
    expected = trainer_logprobs(trainer, sequences)
    figures: dict[str, Any] = {"memcpy_seconds": round(floor, 4)}
    with tempfile.TemporaryDirectory() as folder, engine_process(options, engine, dtype, folder) as pipe:
        for name in TRANSPORTS:
            updates = Updates(name, trainer, pipe, folder, options.bucket_mib * MIB)
            found = [updates.update(sequences) for _ in range(1 + options.repeats)]
            gap = np.concatenate([abs(a - b)[1:] for a, b in zip(expected, found[-1].pop("logprobs"), strict=True)])
            if not gap.mean() <= choose("cpu").logprob_gap_limit(dtype):
                sys.exit(f"{engine} {dtype} {name}: log-probs differ by {gap.mean():g} on average after the update")
            parts = {key: statistics.median(one[key] for one in found[1:]) for key in found[-1]}
            figures[name] = {key: round(value, 4) for key, value in parts.items()}
            figures[name]["over_memcpy"] = round(parts["seconds"] / floor, 2)
            print(f"{engine} {dtype} {name}: {figures[name]}", flush=True)
            updates.sender.close()
    return figures


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="bfloat16 alone and few updates, under a minute")
    parser.add_argument("--engines", default="", help="default: vllm,hf, and hf alone where vLLM is not installed")
    parser.add_argument("--dtypes", default="", help="default: bfloat16,float32")
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--model", type=Path, default=MODEL)
    options = parser.parse_args()
    has_vllm = importlib.util.find_spec("vllm") is not None
    options.engines = (options.engines or ("vllm,hf" if has_vllm else "hf")).split(",")
    options.dtypes = (options.dtypes or ("bfloat16" if options.quick else "bfloat16,float32")).split(",")
    options.repeats = 3 if options.quick else 9
    return options


def main() -> int:
    torch.set_num_threads(1)
    options = arguments()
    options.model = find_model(options.model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    figures: dict[str, Any] = {"bucket_mib": options.bucket_mib}
    for dtype in options.dtypes:
        trainer = build_trainer(options.model, dtype)
        sent = sum(tensor.nbytes for _, tensor in trainer.weights())
        figures[dtype] = {"mib": round(sent / MIB, 1)}
        for engine in options.engines:
            figures[dtype][engine] = measure(options, trainer, engine, dtype)
        trainer.close()
    first = figures[options.dtypes[0]][options.engines[0]]
    for name in TRANSPORTS:
        figures[f"{name}_over_memcpy"] = first[name]["over_memcpy"]
    report("weights", figures, {})
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
