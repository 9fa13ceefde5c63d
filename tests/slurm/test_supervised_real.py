"""A supervised run as a Slurm job over two nodes: trainer ranks alone in its allocation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import TinyJob
from virtual_cluster import Cluster

from pekoe.launch.submit import submit

pytestmark = pytest.mark.slurm

END_SECONDS = 150.0


def test_sft_over_two_nodes(login: Cluster, tiny_job: TinyJob, tmp_path_factory: pytest.TempPathFactory) -> None:
    data: Path = tmp_path_factory.mktemp("demonstrations") / "sums.jsonl"
    rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(5) for b in range(5)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (job,) = submit(
        tiny_job.config(
            "sft", task="sft", allocation="fsdp:d2",
            **{
                "train_dataset.type": "demonstrations", "train_dataset.path": str(data), "train_dataset.batch_size": 5,
                "total_train_steps": 5, "cluster.n_nodes": 2, "cluster.n_gpus_per_node": 1,
                "cluster.slurm.nodelist": "n[1-2]",
            },
        )
    )  # fmt: skip
    result = job.result(timeout=END_SECONDS)
    assert (result.code, result.outcome, result.steps, result.attempt) == (0, "done", 5, 0)
    lines = [json.loads(line) for line in (job.run.metrics / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
