"""One rank of a vLLM engine, without MPI: the leader does what it reads, the others follow.

python tensor_parallel_rank.py RANK SIZE MODEL ADDRESS

The leader prints the address of the store that it serves (ADDRESS is empty for it), then `there`, then an answer to
each line of JSON. A rank that hears of a failure prints it and ends with 3. SIGUSR1 makes a rank take other seeds.
The weights of version N are in MODEL/vN.pt. The environment says that a trainer is here, which nobody is to believe.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ |= {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "5", "MASTER_ADDR": "203.0.113.1", "MASTER_PORT": "1"}
os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import numpy as np
import torch
from torch._C._distributed_c10d import TCPStore

from pekoe.pipeline.config.vllm_section import VllmConfig
from pekoe.pipeline.rollout.engine import EngineSettings, GenerationRequest, Instance, SamplingParameters
from pekoe.pipeline.rollout.engines.vllm.commands import Add
from pekoe.pipeline.rollout.engines.vllm.vllm_core import VllmCore
from pekoe.pipeline.rollout.engines.vllm.vllm_engine import VllmEngine

LIMIT = timedelta(seconds=120)


def say(answer: Any) -> None:
    os.write(1, f"@{json.dumps(answer)}\n".encode())


def fail(error: BaseException) -> None:
    say(f"{type(error).__name__}: {error}")
    os._exit(3)


def sample_otherwise(number: int, frame: object) -> None:
    add = VllmCore.add

    def other(core: VllmCore, command: Add) -> None:
        request = dataclasses.replace(command.request, seed=command.request.seed + 1)
        add(core, dataclasses.replace(command, request=request))

    VllmCore.add = other  # type: ignore[method-assign]
    say("otherwise")


def join(rank: int, size: int, address: str) -> Instance:
    if size == 1:
        return Instance()
    if rank == 0:
        owner = socket.create_server(("127.0.0.1", 0))
        port = owner.getsockname()[1]
        store = TCPStore(
            "127.0.0.1", port, size, is_master=True, timeout=LIMIT, wait_for_workers=False,
            master_listen_fd=owner.detach(),
        )  # fmt: skip
        say(f"127.0.0.1:{port}")
    else:
        host, _, port_text = address.rpartition(":")
        store = TCPStore(host, int(port_text), size, is_master=False, timeout=LIMIT)
    return Instance(size, rank, store)


def weights(model: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(torch.load(Path(model) / f"v{version}.pt").items())


async def generate(engine: VllmEngine, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async def one(tokens: list[int], seed: int, max_new_tokens: int) -> dict[str, Any]:
        sampling = SamplingParameters(max_new_tokens=max_new_tokens, ignore_eos=True)
        response = await engine.generate(GenerationRequest(tuple(tokens), sampling, seed=seed))
        return {
            "tokens": response.tokens.tolist(),
            "logprobs": response.logprobs.tolist(),
            "versions": response.versions.tolist(),
        }

    return list(await asyncio.gather(*(one(**request) for request in requests)))


def lead(engine: VllmEngine, model: str) -> None:
    for line in sys.stdin:
        order = json.loads(line)
        match order.pop("do"):
            case "generate":
                say(asyncio.run(generate(engine, order["requests"])))
            case "begin":
                threading.Thread(target=lambda o=order: say(asyncio.run(generate(engine, o["requests"])))).start()
            case "gauges":
                say(engine.gauges())
            case "load":
                engine.pause()
                engine.load_weights(weights(model, order["version"]), order["version"])
                if "sequences" in order:
                    rows = [np.asarray(row, np.int32) for row in order["sequences"]]
                    say([row.tolist() for row in engine.logprobs(rows)])
                else:
                    say("loaded")
                engine.resume()
            case other:
                raise ValueError(other)
    engine.close()
    say("closed")


def main() -> None:
    rank, size, model, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    signal.signal(signal.SIGUSR1, sample_otherwise)
    instance = join(rank, size, address)
    settings = EngineSettings(model, model, "float32", "cpu", 0, 8, 256, options=VllmConfig(kv_cache_gib=0.1))
    if rank == 0:
        engine = VllmEngine.build(settings, instance, fail)
        say("there")
        lead(engine, model)
        return
    follower = VllmEngine.follow(settings, instance, lambda version: weights(model, version), fail)
    say("there")
    while not follower.wait(0.2):
        pass
    say("closed")


if __name__ == "__main__":
    main()
