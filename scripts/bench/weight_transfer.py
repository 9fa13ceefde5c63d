"""Weights from one process to another over loopback: buckets over gloo, against a tensor at a time and a plain copy.

All three move the same model in the same run; the figures are ratios of the best times. A figure counts only when what
arrived equals what was sent. The tensor-at-a-time baseline has no packing, no limits and no checks: over loopback those
must cost at most a fifth; buckets pay where every collective has a price of its own.

    python scripts/bench/weight_transfer.py [--quick] [--receivers N] [--bucket-mib N]
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_result import report

from pekoe.pipeline.devices.device import for_backend
from pekoe.pipeline.messages import PrepareWeights, TensorSpec
from pekoe.pipeline.registry import WEIGHT_TRANSPORTS, resolve
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.weights.transport_setup import TransportSetup

Weights = list[tuple[str, torch.Tensor]]
MIB = 1 << 20


def model_shapes(layers: int, hidden: int, vocabulary: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes like those of a small decoder (SmolLM2-135M: 30 layers, 576 wide)."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocabulary, hidden))]
    for layer in range(layers):
        head = f"model.layers.{layer}"
        shapes += [
            (f"{head}.self_attn.q_proj.weight", (hidden, hidden)),
            (f"{head}.self_attn.k_proj.weight", (hidden // 3, hidden)),
            (f"{head}.self_attn.v_proj.weight", (hidden // 3, hidden)),
            (f"{head}.self_attn.o_proj.weight", (hidden, hidden)),
            (f"{head}.mlp.gate_proj.weight", (hidden * 8 // 3, hidden)),
            (f"{head}.mlp.up_proj.weight", (hidden * 8 // 3, hidden)),
            (f"{head}.mlp.down_proj.weight", (hidden, hidden * 8 // 3)),
            (f"{head}.input_layernorm.weight", (hidden,)),
            (f"{head}.post_attention_layernorm.weight", (hidden,)),
        ]
    return [*shapes, ("model.norm.weight", (hidden,))]


def build(shapes: list[tuple[str, tuple[int, ...]]], seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=generator).to(torch.bfloat16)) for name, shape in shapes]


def fingerprint(weights: Weights) -> float:
    """A sum that depends on every bit pattern and its place."""
    total = 0
    for number, (_, tensor) in enumerate(weights, 1):
        total = (total * 31 + number * int(tensor.view(torch.int16).to(torch.int64).sum())) % (1 << 61)
    return float(total)


def plain_group(store: Any, rank: int, size: int) -> Any:
    return for_backend("gloo").process_group(store, rank, size, timedelta(seconds=120), "127.0.0.1")


def plain_receive_loop(pipe: Connection, rank: int, size: int, port: int, shapes: Any) -> None:
    """The baseline's engine: every tensor arrives by a broadcast of its own, straight into the parameter."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=120), wait_for_workers=False)
    group = plain_group(store, rank, size)
    mine = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes}
    while pipe.recv() is not None:
        for tensor in mine.values():
            group.broadcast([tensor], dist.BroadcastOptions()).wait()
        pipe.send(fingerprint(list(mine.items())))


class PlainWorld:
    """The baseline: gloo, a tensor at a time, no limits and no checks."""

    def __init__(self, receivers: int, shapes: Any) -> None:
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=120), wait_for_workers=False)
        context = mp.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(1, receivers + 1):
            here, there = context.Pipe()
            job = (there, rank, receivers + 1, store.port, shapes)
            self.processes.append(context.Process(target=plain_receive_loop, args=job, daemon=True))
            self.processes[-1].start()
            self.pipes.append(here)
        self.group = plain_group(store, 0, receivers + 1)

    def transfer(self, weights: Weights) -> float:
        """Seconds until the last receiver has the last tensor; the sender's own end, at most a socket's buffer
        ahead."""
        for pipe in self.pipes:
            pipe.send("go")
        began = time.monotonic()
        for _, tensor in weights:
            self.group.broadcast([tensor], dist.BroadcastOptions()).wait()
        seconds = time.monotonic() - began
        check_arrived(self.pipes, weights)
        return seconds

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)


def check_arrived(pipes: list[Connection], weights: Weights) -> None:
    expected = fingerprint(weights)
    for pipe in pipes:
        if (found := pipe.recv()) != expected:
            raise SystemExit(f"what arrived differs from what was sent: {found} != {expected}")


def receive_loop(pipe: Connection, run: str, rank: int, bucket_bytes: int, shapes: Any) -> None:
    """An engine: copies what arrives into its own parameters, and answers with a fingerprint of them."""
    torch.set_num_threads(1)
    setup = transport_setup(run, rank, bucket_bytes)
    receiver = resolve(WEIGHT_TRANSPORTS, "collective", "transport").receiver(setup)
    mine = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes}
    pipe.send("up")
    while (message := pipe.recv()) is not None:
        receiver.prepare(message)
        for name, tensor in receiver.receive(message.version):
            mine[name].copy_(tensor)
        pipe.send(fingerprint(list(mine.items())))


def transport_setup(run: str, rank: int, bucket_bytes: int) -> TransportSetup:
    role = "rollout" if rank else "trainer"
    return TransportSetup(
        rank, role, RunDirectory(Path(run)), torch.device("cpu"), "gloo", "127.0.0.1", bucket_bytes, 120.0
    )  # fmt: skip


class World:
    """A sender here, receivers in processes of their own."""

    def __init__(self, run: str, receivers: int, bucket_bytes: int, shapes: Any) -> None:
        self.members = tuple(range(receivers + 1))
        self.sender = resolve(WEIGHT_TRANSPORTS, "collective", "transport").sender(
            transport_setup(run, 0, bucket_bytes)
        )
        context = mp.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in self.members[1:]:
            here, there = context.Pipe()
            process = context.Process(target=receive_loop, args=(there, run, rank, bucket_bytes, shapes), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        assert all(pipe.recv() == "up" for pipe in self.pipes)
        self.endpoint = self.sender.open_epoch(0, self.members)
        self.version = 0

    def transfer(self, weights: Weights) -> float:
        """Seconds of one version, from the first tensor to the last confirmation; checks what arrived."""
        specs = tuple(TensorSpec(name, tuple(tensor.shape), "bfloat16") for name, tensor in weights)
        for pipe in self.pipes:
            pipe.send(PrepareWeights(self.version, 0, self.members, self.endpoint, specs))
        began = time.monotonic()
        self.sender.send(self.version, 0, self.members, specs, iter(weights))
        seconds = time.monotonic() - began
        check_arrived(self.pipes, weights)
        self.version += 1
        return seconds

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        self.sender.close()
        for process in self.processes:
            process.join(10)


def best(measure: Callable[[], float], repeats: int) -> float:
    """The best of warm runs: the first is not counted."""
    measure()
    return min(measure() for _ in range(repeats))


def copy_seconds(weights: Weights) -> float:
    """The floor: the same bytes copied once within this process."""
    targets = [torch.empty_like(tensor) for _, tensor in weights]

    def measure() -> float:
        began = time.monotonic()
        for target, (_, tensor) in zip(targets, weights, strict=True):
            target.copy_(tensor)
        return time.monotonic() - began

    return best(measure, 5)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, under a minute")
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--bucket-mib", type=int, default=64)
    return parser.parse_args()


def measured(options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    layers, hidden, vocabulary, repeats = (12, 576, 8192, 12) if options.quick else (30, 576, 49152, 12)
    shapes = model_shapes(layers, hidden, vocabulary)
    weights = build(shapes, 1)
    yield "mib", sum(tensor.nbytes for _, tensor in weights) / MIB
    yield "copy_seconds", copy_seconds(weights)
    plain = PlainWorld(options.receivers, shapes)
    with tempfile.TemporaryDirectory() as run:
        world = World(run, options.receivers, options.bucket_mib * MIB, shapes)
        times: dict[str, list[float]] = {"bucketed": [], "per_tensor": []}
        for _ in range(repeats + 1):
            times["bucketed"].append(world.transfer(weights))
            times["per_tensor"].append(plain.transfer(weights))
        world.close()
    plain.close()
    for name, found in times.items():
        yield f"{name}_seconds", min(found[1:])


def main() -> int:
    torch.set_num_threads(1)
    options = arguments()
    figures: dict[str, float] = {"receivers": options.receivers, "bucket_mib": options.bucket_mib}
    for name, value in measured(options):
        figures[name] = round(value, 4)
        print(f"{name:20} {value:10.4f}", flush=True)
    figures["speedup_over_per_tensor"] = round(figures["per_tensor_seconds"] / figures["bucketed_seconds"], 3)
    figures["times_a_copy"] = round(figures["bucketed_seconds"] / figures["copy_seconds"], 3)
    targets = {"speedup_over_per_tensor": (">= 0.8", lambda speedup: speedup >= 0.8)}
    return 0 if report("weight_transfer", figures, targets) else 1


if __name__ == "__main__":
    sys.exit(main())
