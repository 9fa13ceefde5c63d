"""`pekoe export`: a checkpoint becomes a Hugging Face folder, in one process, whatever the ranks that wrote it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from pekoe.pipeline.algorithm.token_logprobs import token_logprobs
from pekoe.pipeline.algorithm.token_values import token_values
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.devices.device import choose
from pekoe.pipeline.registry import TRAIN_ENGINES, resolve
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.train.checkpoint import ENGINE
from pekoe.pipeline.train.checkpoint_reader import pinned_checkpoint
from pekoe.pipeline.train.engine import TrainEngine


def export(run: RunDirectory, config: RunConfig, engine_name: str, out: Path, step: int | None = None) -> Path:
    """Writes the newest (or the named) complete checkpoint of a run to `out`. ValueError when there is none such.

    The run may be going on: the checkpoint is pinned while it is read.
    """
    if out.exists():
        raise ValueError(f"{out}: exists already; allowed: a name that is free")
    with pinned_checkpoint(run, step) as (_, folder):
        _export(config, engine_name, folder, out)
    return out


def _export(config: RunConfig, engine_name: str, folder: Path, out: Path) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    device = choose(config.cluster.device)
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=60))
    dist.init_process_group(device.process_group_backend, store=store, rank=0, world_size=1)
    engine: TrainEngine = resolve(TRAIN_ENGINES, engine_name, "allocation")(
        config.actor,
        head="value" if config.task == "rw" else "lm",
        token_logprobs=token_logprobs,
        token_values=token_values,
        device=device,
        weight_dtype=config.rollout.dtype,
        total_steps=1,
        seed=config.seed,
    )
    engine.load(folder / ENGINE)
    engine.export_hf(out)
    engine.close()
    dist.destroy_process_group()
