"""What the keys of `cluster` ask of each other: each contradiction is one line that names key, value and what is
allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pekoe.launch.allocation import parse
from pekoe.pipeline.config.check import check
from pekoe.pipeline.config.load import from_yaml_text, site_names
from pekoe.pipeline.config.schema import ConfigError

HET = "cluster.rollout_nodes.n_nodes=1"
SLURM = "cluster.slurm"
BOX = f"{SLURM}.container"
APPTAINER = [f"{BOX}.kind=apptainer", f"{BOX}.image=docker://pekoe", f"{SLURM}.mpi=pmi2", "cluster.device=cuda"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a complete model and a data set."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 1024}))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "there").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checked(*overrides: str, allocation: str | None = None) -> list[str]:
    base = ["actor.path=model", "train_dataset.path=train.jsonl", "gconfig.max_tokens=1024"]
    return check(from_yaml_text("", [*base, *overrides]), parse(allocation) if allocation else None)


def problems(*overrides: str, allocation: str | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        checked(*overrides, allocation=allocation)
    return list(caught.value.problems)


@pytest.mark.parametrize("site", site_names())
def test_every_site_is_sound(site: str) -> None:
    assert checked(f"cluster.site={site}", allocation="hf:d2+fsdp:d2") == []


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ([HET, "cluster.launcher=mpiexec"], "cluster.launcher", "allowed with it: auto, srun"),
        (
            [HET, "cluster.spare_nodes=1", "cluster.restart_in_place=1"], "cluster.spare_nodes",
            "is not allowed with cluster.rollout_nodes",
        ),
        (["cluster.launcher=none", "cluster.continue_by=chain"], "cluster.continue_by", "launcher none: none"),
        (["cluster.launcher=none", "cluster.restart_in_place=2"], "cluster.restart_in_place", "launcher none: 0"),
        (["cluster.spare_nodes=2"], "cluster.spare_nodes", "allowed: 0, or cluster.restart_in_place >= 1"),
        (
            ["cluster.continue_by=requeue", f"{SLURM}.signal_seconds=59"], f"{SLURM}.signal_seconds",
            "allowed with cluster.continue_by requeue: >= 60",
        ),
        (
            ["cluster.continue_by=chain", "cluster.time_limit='2:00'"], f"{SLURM}.signal_seconds",
            "allowed: < cluster.time_limit (2:00)",
        ),
        ([f"{SLURM}.gres=gpu:8"], f"{SLURM}.gres", "allowed: NAME or NAME:TYPE"),
        ([f"{SLURM}.gres=gpu:h100:8"], f"{SLURM}.gres", "the count is the ranks on a node"),
        (["cluster.rollout_nodes.gres=gpu:8"], "cluster.rollout_nodes.gres", "allowed: NAME or NAME:TYPE"),
        ([f"{SLURM}.mem=lots"], f"{SLURM}.mem", "allowed: a number and K, M, G or T"),
        ([f"{SLURM}.partition='a b'"], f"{SLURM}.partition", "is not one word"),
        ([f"{SLURM}.account=--uid=0"], f"{SLURM}.account", "is not one word"),
        (["cluster.rollout_nodes.constraint='a b'"], "cluster.rollout_nodes.constraint", "is not one word"),
        ([f"{SLURM}.extra=[--nodes=4]"], f"{SLURM}.extra", "allowed instead: cluster.n_nodes"),
        ([f"{SLURM}.extra=['-p debug']"], f"{SLURM}.extra", "allowed instead: cluster.slurm.partition"),
        ([f"{SLURM}.extra=[--array=0-3]"], f"{SLURM}.extra", "pekoe submit --array"),
        ([f"{SLURM}.extra=[mail]"], f"{SLURM}.extra", "allowed: one flag in each entry"),
        ([f"{SLURM}.srun_extra=[--mpi=pmix]"], f"{SLURM}.srun_extra", "allowed instead: cluster.slurm.mpi"),
        ([f"{SLURM}.srun_extra=[-K]"], f"{SLURM}.srun_extra", "a dead rank ends its world"),
        (["cluster.rollout_nodes.extra=[--gres=x]"], "cluster.rollout_nodes.extra", "cluster.slurm.gres"),
        ([f"{SLURM}.environment={{a-b: c}}"], f"{SLURM}.environment", "is no name of a variable"),
        ([f"{SLURM}.environment={{RANK: 0}}"], f"{SLURM}.environment", "is set for each rank"),
        ([f"{SLURM}.environment={{SLURM_NTASKS: 0}}"], f"{SLURM}.environment", "is set for each rank"),
        ([f"{SLURM}.mpi=none"], f"{SLURM}.mpi", "would make every rank a world of its own"),
        ([f"{SLURM}.mpi_library=/no/libmpi.so"], f"{SLURM}.mpi_library", "does not exist"),
        ([f"{SLURM}.packed_environment=env.tar"], f"{SLURM}.packed_environment", "is a relative path"),
        ([f"{SLURM}.packed_environment=/no/env.tar"], f"{SLURM}.packed_environment", "does not exist"),
        ([f"{BOX}.image=/x.sif"], f"{BOX}.image", "needs cluster.slurm.container.kind"),
        ([*APPTAINER, f"{BOX}.image="], f"{BOX}.image", "allowed with cluster.slurm.container.kind apptainer"),
        ([*APPTAINER, f"{BOX}.image=/no/x.sif"], f"{BOX}.image", "does not exist"),
        ([*APPTAINER, f"{SLURM}.mpi=auto"], f"{SLURM}.mpi", "cannot look into a container"),
        ([*APPTAINER, "cluster.device=auto"], "cluster.device", "allowed with it: cpu, cuda or npu"),
        ([*APPTAINER, f"{BOX}.mounts=[data]"], f"{BOX}.mounts", "allowed: /HOST or /HOST:/INSIDE"),
        (
            [*APPTAINER, f"{BOX}.kind=enroot", "cluster.launcher=mpiexec"], f"{BOX}.kind",
            "allowed with cluster.launcher mpiexec: apptainer or none",
        ),
    ],
)  # fmt: skip
def test_contradictions_are_refused(overrides: list[str], key: str, words: str) -> None:
    (line,) = problems(*overrides)
    assert line.startswith(f"{key}: ")
    assert words in line
    assert "allowed" in line


def test_a_container_and_a_packed_environment_exclude_each_other(folder: Path) -> None:
    (line,) = problems(*APPTAINER, f"{SLURM}.packed_environment={folder / 'there'}")
    assert "is not allowed with cluster.slurm.container.kind apptainer" in line


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{SLURM}.gres="],
        [f"{SLURM}.gres=npu:ascend910b", f"{SLURM}.mem=0", f"{SLURM}.constraint='a100&ib'"],
        [f"{SLURM}.extra=[--mail-type=END, '--comment=two words']", f"{SLURM}.srun_extra=[--cpu-bind=cores]"],
        [f"{SLURM}.environment={{NCCL_SOCKET_IFNAME: ib0}}", f"{SLURM}.mpi_library=libmpi.so.40"],
        [*APPTAINER, f"{BOX}.mounts=[/scratch, '/a:/b']", f"{SLURM}.mpi_library=/inside/libmpi.so"],
        [HET, "cluster.restart_in_place=1", "cluster.continue_by=requeue"],
        ["cluster.spare_nodes=1", "cluster.restart_in_place=1"],
        ["cluster.launcher=mpiexec", f"{SLURM}.mpiexec=[mpirun]"],
    ],
)
def test_what_belongs_together_passes(overrides: list[str]) -> None:
    assert checked(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ([f"{SLURM}.signal_seconds=10"], f"{SLURM}.signal_seconds", "is below cluster.grace_seconds (60)"),
        ([f"{SLURM}.mpiexec=[mpirun]"], f"{SLURM}.mpiexec", "has no effect unless cluster.launcher is mpiexec"),
    ],
)
def test_what_is_rarely_meant_is_warned_about(overrides: list[str], key: str, words: str) -> None:
    (line,) = checked(*overrides)
    assert line.startswith(f"{key}: ")
    assert words in line


@pytest.mark.parametrize(
    ("overrides", "allocation", "key", "words"),
    [
        (["cluster.n_nodes=3"], "hf:d1+fsdp:d1", "cluster.n_nodes", "there are 2 ranks; allowed: <= 2"),
        (
            ["cluster.n_gpus_per_node=2"], "hf:d2+fsdp:d2", "allocation",
            "has 4 ranks; allowed: <= cluster.n_nodes x cluster.n_gpus_per_node (1 x 2)",
        ),
        ([HET], "hf:d2|fsdp:d2", "allocation", "has no rollout ranks apart from its trainer ranks"),
        (
            [HET, "cluster.n_gpus_per_node=2"], "hf:d2+fsdp:d4", "allocation",
            "has 4 trainer ranks; allowed: <= cluster.n_nodes x",
        ),
        (
            [HET, "cluster.rollout_nodes.n_gpus_per_node=2"], "hf:d4+fsdp:d4", "allocation",
            "has 4 rollout ranks; allowed: <= cluster.rollout_nodes.n_nodes x",
        ),
        (
            ["cluster.rollout_nodes.n_nodes=4"], "hf:d2+fsdp:d2", "cluster.rollout_nodes.n_nodes",
            "there are 2 rollout ranks; allowed: <= 2",
        ),
    ],
)  # fmt: skip
def test_a_world_fits_its_nodes(overrides: list[str], allocation: str, key: str, words: str) -> None:
    (line,) = problems(*overrides, allocation=allocation)
    assert line.startswith(f"{key}: ")
    assert words in line
