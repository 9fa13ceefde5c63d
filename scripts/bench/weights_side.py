"""The receiving end of `weights.py`, in a process of its own: an engine that gets its versions as on a rollout rank."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from smollm2_material import context_limit

from pekoe.pipeline.config.vllm_section import VllmConfig
from pekoe.pipeline.registry import INFERENCE_ENGINES, WEIGHT_TRANSPORTS, resolve
from pekoe.pipeline.rollout.engine import EngineSettings, Instance
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.weights.transport_setup import TransportSetup


class Waiting:
    """Passes tensors on and counts the seconds that it took to get them."""

    def __init__(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.weights, self.seconds = weights, 0.0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        began = time.perf_counter()
        try:
            return next(self.weights)
        finally:
            self.seconds += time.perf_counter() - began


def transport_setup(folder: str, rank: int, bucket_bytes: int) -> TransportSetup:
    return TransportSetup(
        rank=rank, role="rollout" if rank else "trainer", run=RunDirectory(Path(folder)), device=torch.device("cpu"),
        backend="gloo", host="127.0.0.1", bucket_bytes=bucket_bytes, bucket_seconds=120.0,
    )  # fmt: skip


def receive_updates(pipe: Connection, folder: str, model: str, engine_name: str, settings: dict[str, Any]) -> None:
    """Answers (transport's name, message, sequences) with the seconds of each part and the log-probs, until None."""
    torch.set_num_threads(1)
    engine = resolve(INFERENCE_ENGINES, engine_name, "engine").build(
        EngineSettings(
            path=model, tokenizer_path=model, dtype=settings["dtype"], device="cpu", device_index=0, max_slots=16,
            context_limit=context_limit(model), options=VllmConfig(),
        ),
        Instance(),
        lambda error: os._exit(1),
    )  # fmt: skip
    receivers = {
        name: resolve(WEIGHT_TRANSPORTS, name, "transport").receiver(
            transport_setup(folder, 1, settings["bucket_bytes"])
        )
        for name in ("collective", "disk")
    }
    pipe.send("up")
    while (order := pipe.recv()) is not None:
        name, message, sequences = order
        began = time.perf_counter()
        engine.pause()
        receivers[name].prepare(message)
        paused = time.perf_counter()
        pipe.send("ready")
        waiting = Waiting(receivers[name].receive(message.version))
        engine.load_weights(waiting, message.version)
        loaded = time.perf_counter()
        found = engine.logprobs(sequences)
        checked = time.perf_counter()
        engine.resume()
        pipe.send(
            {
                "pause": paused - began, "arrival": waiting.seconds, "load": loaded - paused - waiting.seconds,
                "check": checked - loaded, "resume": time.perf_counter() - checked, "logprobs": found,
            }
        )  # fmt: skip
    for receiver in receivers.values():
        receiver.close()
    engine.close()
