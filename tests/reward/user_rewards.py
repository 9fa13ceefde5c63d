"""Reward functions as users write them, good and bad; imported by the pool's workers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np


def length(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    return len(completion_ids) + float(data.get("bonus", 0))


async def slow_length(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> int:
    await asyncio.sleep(0.01)
    return len(completions)


def keys(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], table: dict[int, Any], **_: Any
) -> bool:
    return table == {1: ("a", 2)} and isinstance(prompt_ids, list)


def give(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> Any:
    values = {
        "none": None,
        "nan": float("nan"),
        "inf": float("inf"),
        "text": "1.0",
        "complex": 1j,
        "true": True,
        "float32": np.float32(0.25),
        "array": np.array(2.0),
        "vector": np.array([1.0, 2.0]),
    }
    return values[completions]


def misbehave(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    if completions == "spin":
        while True:
            pass
    if completions == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
    if completions == "power":
        return float(10 ** (10**10))
    if completions == "exit":
        os._exit(3)
    if completions == "sys.exit":
        sys.exit(4)
    if completions == "raise":
        raise ConnectionError("no route to the checker")
    if completions == "shell":
        subprocess.run("sleep 300 & sleep 300", shell=True, check=False)
    if completions == "daemon":
        subprocess.Popen("setsid sh -c 'sleep 300 & sleep 300' & exit 0", shell=True).wait()
        time.sleep(3600)
    if completions == "exit with child":
        subprocess.Popen(["sleep", "300"])
        os._exit(0)
    if completions == "print":
        print("a reward that prints")
        os.write(1, b"and writes\n")
    return 1.0


def in_main_thread(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    fired = []
    signal.signal(signal.SIGALRM, lambda *_: fired.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    time.sleep(0.05)
    return float(bool(fired) and threading.current_thread() is threading.main_thread())


def importing(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    return float("mpi4py" in sys.modules or any(name.startswith(("PMI_", "OMPI_")) for name in os.environ))


def process_id(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> int:
    return os.getpid()
