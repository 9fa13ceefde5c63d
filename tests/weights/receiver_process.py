"""One engine's rank in a test: takes a JSON job a line on stdin, answers with a JSON line each. A job with `options`
is a new receiver in place of the one before."""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec
import torch

from pekoe.pipeline.messages import PrepareWeights
from pekoe.pipeline.registry import WEIGHT_TRANSPORTS, resolve
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.weights.transport_setup import TransportSetup


def crc(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def load(receiver: Any, job: dict[str, Any]) -> dict[str, Any]:
    receiver.prepare(msgspec.convert(job["prepare"], PrepareWeights))
    if job.get("action") == "decline":
        receiver.abandon("the engine has failed")
        return {"error": "declined"}
    found: list[tuple[str, list[int], str, int]] = []
    began = time.monotonic()
    try:
        for number, (name, tensor) in enumerate(receiver.receive(job["prepare"]["version"])):
            if number == job.get("at"):
                if job["action"] == "kill":
                    os.kill(os.getpid(), 9)
                if job["action"] == "sleep":
                    time.sleep(job["seconds"])
                if job["action"] == "raise":
                    raise ValueError(f"engine cannot load {name}")
            found.append((name, list(tensor.shape), str(tensor.dtype), crc(tensor)))
    except Exception as error:
        if job.get("action") == "raise":
            receiver.abandon(str(error))
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began, "got": len(found)}
    return {"tensors": found, "seconds": time.monotonic() - began}


def receiver_of(options: dict[str, Any]) -> Any:
    setup = TransportSetup(
        rank=options["rank"], role="rollout", run=RunDirectory(Path(options["run"])), device=torch.device("cpu"),
        backend="gloo", host="127.0.0.1", bucket_bytes=options["bucket_bytes"],
        bucket_seconds=options["bucket_seconds"], verify=options["verify"],
    )  # fmt: skip
    return resolve(WEIGHT_TRANSPORTS, options["transport"], "transport").receiver(setup)


def main() -> None:
    torch.set_num_threads(1)
    receiver = None
    for line in sys.stdin:
        job = json.loads(line)
        if "options" not in job:
            print(json.dumps(load(receiver, job)), flush=True)
            continue
        if receiver is not None:
            receiver.close()
        receiver = receiver_of(job["options"])
        print(json.dumps({"up": job["options"]["rank"]}), flush=True)
    if receiver is not None:
        receiver.close()


if __name__ == "__main__":
    main()
