"""Engines for tests of child processes: deterministic ones that misbehave on demand; who is alive."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pekoe.pipeline.process_tree import process_table
from pekoe.pipeline.records import Finish
from pekoe.pipeline.rollout.engine import (
    EngineClosedError,
    EngineSettings,
    GenerationRequest,
    Instance,
    Response,
)  # fmt: skip

HERE = str(Path(__file__).resolve().parent)


def settings(path: str = "", **changes: Any) -> EngineSettings:
    return EngineSettings(
        **{
            "path": path, "tokenizer_path": path, "dtype": "float32", "device": "cpu", "device_index": 0,
            "max_slots": 4, "context_limit": 64, **changes,
        }
    )  # fmt: skip


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def alive(*pids: int) -> set[int]:
    """Those that run; an ended one that nobody has waited for does not."""
    table = process_table()
    return {pid for pid in pids if pid in table and table[pid].state not in "ZX"}


def engine_processes(rank: int | None = None) -> set[int]:
    """All processes that a nursery has started, or those of one rank, with what these have started."""
    marker = f"PEKOE_ENGINE_CHILD={rank}.".encode() if rank is not None else b"PEKOE_ENGINE_CHILD="
    found = set()
    for pid in process_table():
        with contextlib.suppress(OSError):
            if any(entry.startswith(marker) for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                found.add(pid)
    return found


class EchoEngine:
    """Answers with the prompt, after `seed` milliseconds; obeys words that are put into the settings' `path`.

    Every call is noted and can be read by `load_adapter("read", FOLDER, 0)`, which writes the notes into a file.
    """

    def __init__(self, config: EngineSettings, on_failure: Callable[[BaseException], None] | None) -> None:
        self.words = config.path.split(",")
        self.on_failure = on_failure
        self.notes: list[str] = []
        self.version = 0
        self.tokens = 0
        self.running = 0
        self.cancelled = 0
        self.is_closed = False
        self.weights: dict[str, torch.Tensor] = {}
        self.grandchild = subprocess.Popen(["sleep", "600"]) if "grandchild" in self.words else None
        self.detached = (
            subprocess.Popen(["sleep", "600"], start_new_session=True) if "grandchild" in self.words else None
        )

    @classmethod
    def build(
        cls, config: EngineSettings, instance: Instance, on_failure: Callable[[BaseException], None] | None = None
    ) -> EchoEngine:
        words = config.path.split(",")
        if "refuse" in words:
            raise ValueError("rollout.path: refuse; allowed: anything else")
        if "die" in words:
            os._exit(3)
        if "slow" in words:
            time.sleep(600)
        return cls(config, on_failure)

    async def generate(self, request: GenerationRequest) -> Response:
        if self.is_closed:
            raise EngineClosedError("echo engine: it is closed")
        if request.group == -2:
            raise ValueError(f"request.group: {request.group}; allowed: -1 or more")
        if request.group == -3:
            raise KeyError("strange")
        if request.group == -4 and self.on_failure is not None:
            self.on_failure(OSError("the device is gone"))
        if request.group == -5:
            os._exit(7)
        self.running += 1
        try:
            await asyncio.sleep(request.seed / 1000)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        self.tokens += len(request.tokens)
        ids = np.asarray(request.tokens, np.int32)
        return Response(ids, ids.astype(np.float32) / 7, np.full(len(ids), self.version, np.int32), Finish.STOP)

    def pause(self, *, drain: bool = False) -> None:
        self.notes.append(f"pause {drain}")
        if "deaf" in self.words:
            time.sleep(600)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.notes.append(f"load {version}")
        self.weights = {}
        for name, tensor in weights:
            if name == "wrong":
                raise ValueError("weights: 'wrong' is not in the model")
            if name == "deadly":
                os._exit(9)
            if name == "stuck":
                time.sleep(600)
            self.weights[name] = tensor.clone()
            self.notes.append(f"{name} {str(tensor.dtype)[6:]} {tuple(tensor.shape)} {float(tensor.double().sum()):g}")
        self.version = version

    def resume(self) -> None:
        self.notes.append("resume")

    def sleep(self) -> None:
        self.notes.append("sleep")

    def wake(self) -> None:
        self.notes.append("wake")

    def logprobs(self, sequences: list[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        return [np.asarray(s, np.float32) / temperature for s in sequences]

    def load_adapter(self, name: str, folder: Path, version: int) -> None:
        names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "PMI_RANK", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
        variables = [f"{key}={os.environ[key]}" for key in names if key in os.environ]
        started = [str(p.pid) for p in (self.grandchild, self.detached) if p is not None]
        threads = [str(threading.active_count()), str("vllm" in sys.modules)]
        text = "\n".join([" ".join(variables), " ".join(started), " ".join(threads), *self.notes])
        Path(folder, name).write_text(text)

    def gauges(self) -> dict[str, float]:
        return {
            "running": float(self.running or "busy" in self.words), "waiting": 0.0, "tokens": float(self.tokens),
            "version": float(self.version), "cancelled": float(self.cancelled), "serving": 1.0,
        }  # fmt: skip

    def close(self) -> None:
        self.is_closed = True
