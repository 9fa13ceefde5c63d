"""Trains and saves checkpoints beside it for ever, until it is killed; prints what it loaded, then each committed step.

usage: checkpoint_process.py RUN ATTEMPT
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from pekoe.pipeline.messages import Inbox, Message, Saved
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.train.checkpoint import ENGINE, Checkpoints
from pekoe.pipeline.train.engines.host_copy import HostCopy
from pekoe.pipeline.train.engines.sharded_files import read_sharded
from pekoe.pipeline.train.engines.staged_shards import StagedShards, save_group
from pekoe.pipeline.train.saver import Saver, StagedSave


class LocalPost:
    """One rank's post: what it sends is what it gets."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.box: Inbox = queue.SimpleQueue()

    def send(self, to: int, message: Message) -> None:
        self.box.put((0, message))

    def inbox(self, *kinds: type[Message]) -> Inbox:
        return self.box


def start_thread(name: str, target: object) -> None:
    threading.Thread(target=target, name=name, daemon=True).start()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    weights = {"w": distribute_tensor(torch.zeros(64, 2000), mesh, [Shard(0)])}
    group, copy, post = save_group(mesh), HostCopy(), LocalPost()
    saver = Saver(post, 0, start_thread, asynchronous=True)
    checkpoints = Checkpoints(RunDirectory(Path(sys.argv[1])), keep=2, attempt=int(sys.argv[2]))
    found = checkpoints.latest(deep=True)
    step = 0
    if found is not None:
        step, path = found
        read_sharded({"model": weights}, path / ENGINE, group)
        assert (weights["w"].to_local() == step).all(), "the state of the step, and of no other"
        assert (path / "state").read_text() == str(step)
    print("loaded", step, flush=True)
    while True:
        step += 1
        weights["w"].add_(1)
        if not saver.is_busy:
            part, began = checkpoints.begin(step), time.monotonic()
            staged, others = StagedShards(copy.take({"model": weights}), group), {"state": str(step).encode()}
            saver.begin(StagedSave(step, part, {ENGINE: staged}, others, began, 0.0))
        try:
            saved = post.box.get(timeout=0.001)[1]
        except queue.Empty:
            continue
        assert isinstance(saved, Saved)
        assert not saved.error
        checkpoints.commit(saved.version, {"world_size": 1}, saved.files)
        print(saved.version, flush=True)
        checkpoints.prune()


if __name__ == "__main__":
    main()
