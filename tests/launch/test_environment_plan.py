"""The whole plan of a rank from variables that real launchers set.

`recorded_environments.json` holds what processes saw on a cluster of four nodes (Slurm 22.05, MPICH 5, Open MPI 4.1,
submitit 1.5): the record's name says how they were started. Each row below is all that a rank decides from it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pekoe.launch import environment, network, rank_environment
from pekoe.launch.allocation import parse
from pekoe.launch.network import Interface
from pekoe.launch.rank_environment import RankPlan, RankPlanError
from pekoe.pipeline.config.run import RunConfig

RECORDED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "recorded_environments.json").read_text())
NODES = ["n1", "n2", "n3", "n4"]
LO = Interface("lo", "127.0.0.1", "255.0.0.0")


@dataclass(frozen=True)
class Row:
    """What must come out. `world` is the allocation; devices are `name@ordinal`."""

    launcher: str
    rank: tuple[int, int]
    """(rank, size)"""
    local: tuple[int, int]
    """(local rank, local size)"""
    node: int | None
    device: str | None
    job: str | None
    world: str = "vllm:d2+fsdp:d2"
    hosts: bool = True
    """Several."""
    notes: int = 0
    threads: int = 2


ROWS = {
    "srun-pmi2 rank 3": Row("pmi2", (3, 4), (1, 2), 1, "1@1", "1"),
    "srun-pmix rank 2": Row("pmix", (2, 4), (0, 2), 1, "0@0", "1"),
    "srun without PMI": Row("srun", (3, 4), (1, 2), 1, "1@1", "3"),
    "srun-pmi2 in a batch job": Row("pmi2", (1, 4), (1, 2), 0, "1@1", "2"),
    "srun-pmix, 3 tasks of a job for 4": Row("pmix", (2, 3), (0, 1), 1, "0@0", "2", "vllm:d1+fsdp:d2"),
    "hydra in an allocation, rank 0": Row("mpich", (0, 4), (0, 2), None, "0@0", "2", notes=1),
    "hydra in an allocation, rank 3": Row("mpich", (3, 4), (1, 2), None, "1@1", "2", notes=1),
    "Open MPI in an allocation, rank 0": Row("openmpi", (0, 4), (0, 2), None, "0@0", "2", notes=1),
    "Open MPI in an allocation, rank 3": Row("openmpi", (3, 4), (1, 2), None, "1@1", "2", notes=1),
    "hydra alone": Row("mpich", (1, 2), (1, 2), None, None, None, "vllm:d1+fsdp:d1", hosts=False, threads=1),
    "Open MPI alone": Row("openmpi", (1, 2), (1, 2), None, None, None, "vllm:d1+fsdp:d1", hosts=False, threads=1),
    "heterogeneous pmi2, rank 0": Row("pmi2", (0, 4), (0, 2), 0, "0@0", "3", threads=1),
    "heterogeneous pmi2, rank 3": Row("pmi2", (3, 4), (0, 1), 2, None, "3"),
    "heterogeneous pmix, rank 1": Row("pmix", (1, 4), (1, 2), 0, "1@1", "3", threads=1),
    "heterogeneous pmix, rank 2": Row("pmix", (2, 4), (0, 1), 1, None, "3"),
    "submitit, array": Row("pmi2", (3, 4), (1, 2), 1, None, "7_1", threads=1),
    "submitit without srun": Row("none", (0, 1), (0, 1), None, None, "8", "hf:d1|fsdp:d1", hosts=False, notes=1),
    "batch script": Row("none", (0, 1), (0, 1), None, "0@0", "2", "hf:d1|fsdp:d1", hosts=False, notes=1),
    "salloc": Row("none", (0, 1), (0, 1), None, None, "10", "hf:d1|fsdp:d1", hosts=False, notes=1),
    "interactive step": Row("none", (0, 1), (0, 1), None, None, "13", "hf:d1|fsdp:d1", hosts=False, notes=1),
    "srun --pty": Row("none", (0, 1), (0, 1), None, None, "12", "hf:d1|fsdp:d1", hosts=False, notes=1),
    "gpus-per-task": Row("pmi2", (1, 3), (1, 2), 0, "1@0", "4", "vllm:d1+fsdp:d2", threads=1),
    "gpu-bind single": Row("pmi2", (1, 2), (1, 2), 0, "1@0", "6", "vllm:d1+fsdp:d1", hosts=False, threads=1),
    "gpu-bind map": Row("pmi2", (0, 2), (0, 2), 0, "1@0", "6", "vllm:d1+fsdp:d1", hosts=False, threads=1),
    "gpu-bind none": Row("pmi2", (1, 2), (1, 2), 0, None, "6", "vllm:d1+fsdp:d1", hosts=False, threads=1),
    "gpu-bind closest": Row("pmi2", (1, 2), (1, 2), 0, "1@1", "6", "vllm:d1+fsdp:d1", hosts=False, threads=1),
    "npu gres": Row("pmi2", (1, 2), (0, 1), 1, None, "5", "vllm:d1+fsdp:d1"),
}  # fmt: skip


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A node of 2 cores with loopback and eth0."""
    eth = Interface("eth0", "10.77.1.9", "255.255.255.0")
    monkeypatch.setattr(network, "interfaces", lambda: [LO, eth])
    monkeypatch.setattr(network, "source_address", lambda peer: eth.address)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    return tmp_path


def make_plan(environ: dict[str, str], host: str, world: str, device: str = "cuda", **settings: Any) -> RankPlan:
    config = RunConfig()
    config.cluster.device = device
    for name, value in settings.items():
        setattr(config.cluster, name, value)
    return rank_environment.plan(environ, parse(world), config, environment.read(environ, host))


@pytest.mark.parametrize("name", ROWS)
def test_the_whole_plan(name: str, node: Path) -> None:
    row, recorded = ROWS[name], RECORDED[name]
    environ = {"HOME": "/home/user", "USER": "user", "PATH": "/bin", "TMPDIR": str(node), **recorded["environ"]}
    plan = make_plan(environ, recorded["host"], row.world)
    facts, placement = plan.facts, parse(row.world)
    assert (facts.launcher, (facts.rank, facts.size)) == (row.launcher, row.rank)
    assert ((facts.local_rank, facts.local_size), facts.node_rank) == (row.local, row.node)
    assert (facts.host, facts.job_id) == (recorded["host"], row.job)
    assert plan.roles == placement.roles_of(facts.rank)
    assert (f"{plan.device.name}@{plan.device.ordinal}" if plan.device else None) == row.device
    assert plan.cache == node / f"pekoe-{os.getuid()}-{row.job or 'cache'}"
    assert len(plan.notes) == row.notes
    assert (plan.interface.name if plan.interface else None) == ("eth0" if row.hosts else None)
    wants_ports = "vllm" in row.world and facts.rank in placement.rollout_ranks
    assert (plan.ports is not None) == wants_ports
    assert changed(environ, plan) == expected_changes(plan, row)
    if plan.ports:
        plan.ports.release()


def changed(environ: dict[str, str], plan: RankPlan) -> dict[str, str]:
    assert set(environ) - set(plan.variables) == set()
    return {name: value for name, value in plan.variables.items() if environ.get(name) != value}


def expected_changes(plan: RankPlan, row: Row) -> dict[str, str]:
    cache, own = plan.cache, plan.cache / f"own-{row.local[0]}"
    shared = {
        "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm",
        "FLASHINFER_WORKSPACE_BASE": "flashinfer", "CUDA_CACHE_PATH": "cuda", "NUMBA_CACHE_DIR": "numba",
        "ASCEND_CACHE_PATH": "ascend", "ASCEND_PROCESS_LOG_PATH": "ascend-log",
    }  # fmt: skip
    mine = {"TORCH_EXTENSIONS_DIR": "extensions", "ASCEND_WORK_PATH": "ascend-work", "MPLCONFIGDIR": "matplotlib"}
    expected = {
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(row.threads), "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NCCL_CUMEM_ENABLE": "0",
        **{name: str(cache / part) for name, part in shared.items()},
        **{name: str(own / part) for name, part in mine.items()},
    }  # fmt: skip
    if row.hosts:
        expected |= {
            "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0",
            "HCCL_SOCKET_IFNAME": "=eth0", "VLLM_HOST_IP": "10.77.1.9",
        }  # fmt: skip
    placement = parse(row.world)
    if row.rank[0] in placement.trainer_ranks and not placement.colocated:
        local = plan.device.ordinal if plan.device else row.local[0]
        size = len(placement.trainer_ranks)
        expected |= {"RANK": str(row.rank[0]), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local)}
        assert (plan.role_rank, plan.role_size) == (row.rank[0], size)
    else:
        assert (plan.role_rank, plan.role_size) == (None, None)
    if plan.ports:
        expected["VLLM_PORT"] = str(plan.ports.first)
    return expected


def test_every_recorded_environment_has_a_row() -> None:
    assert set(RECORDED) == set(ROWS) | {"heterogeneous batch script"}


def test_who_may_start_a_step() -> None:
    allocations = {
        name for name, one in RECORDED.items() if environment.read(one["environ"], one["host"]).in_allocation
    }
    assert allocations == {
        "batch script", "heterogeneous batch script", "submitit without srun", "salloc", "interactive step",
        "srun --pty",
    }  # fmt: skip


def test_nodes_of_the_allocation_and_of_the_step() -> None:
    def nodes(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        facts = environment.read(RECORDED[name]["environ"], "h")
        return facts.job_nodes, facts.step_nodes

    three = ("n1", "n2", "n3")
    assert nodes("heterogeneous batch script") == (three, ())
    assert nodes("heterogeneous pmix, rank 2") == (three, three)
    assert nodes("srun-pmi2 in a batch job") == (("n1", "n2"), ("n1", "n2"))
    assert nodes("interactive step") == (("n1", "n2"), ())
    assert environment.read(RECORDED["heterogeneous batch script"]["environ"], "h").het_groups == (three[:1], three[1:])


def test_job_facts() -> None:
    facts = environment.read({**RECORDED["submitit, array"]["environ"], "SLURM_RESTART_COUNT": "2"}, "h")
    assert (facts.array_task, facts.restart_count, facts.cluster) == (1, 2, "pekoe1")
    assert environment.read(RECORDED["batch script"]["environ"], "h").cpus_per_task == 2


def test_a_step_that_is_started_from_inside_another_finds_the_job_alone() -> None:
    for name in ("interactive step", "srun --pty", "batch script", "hydra in an allocation, rank 0"):
        environ = environment.for_step(RECORDED[name]["environ"])
        facts = environment.read(environ, "h")
        assert facts.in_allocation
        assert facts.job_nodes == environment.read(RECORDED[name]["environ"], "h").job_nodes
        assert not [one for one in environ if one.startswith(("SLURM_STEP", "SLURM_PTY", "PMI", "SLURM_CPU_BIND"))]
        assert environ["SLURM_CONF"] == "/etc/slurm/slurm.conf"


def test_a_step_of_one_task_under_a_terminal_that_has_a_launcher_is_no_shell() -> None:
    two = {**RECORDED["srun --pty"]["environ"], "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    assert environment.read(two, "h").launcher == "srun"


NPU_STEP = {**RECORDED["npu gres"]["environ"], "SLURM_STEP_TASKS_PER_NODE": "1,2", "SLURM_LOCALID": "1"}
RT = "ASCEND_RT_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("variables", "device", "exported"),
    [
        ({RT: "4,5,6,7"}, "5@1", None),
        ({"SLURM_JOB_NPUS": "4,5"}, "5@1", "4,5"),
        ({"SLURM_STEP_NPUS": "6,7", "SLURM_JOB_NPUS": "4,5,6,7"}, "7@1", "6,7"),
        ({RT: "2,3", "SLURM_JOB_NPUS": "4,5"}, "3@1", None),
        ({"ASCEND_VISIBLE_DEVICES": "4-7"}, "5@1", None),
        ({}, None, None),
    ],
)
def test_devices_of_ascend(variables: dict[str, str], device: str | None, exported: str | None, node: Path) -> None:
    plan = make_plan({"TMPDIR": str(node), **NPU_STEP, **variables}, "n4", "hf:d1+fsdp:d1", "npu")
    assert (f"{plan.device.name}@{plan.device.ordinal}" if plan.device else None) == device
    assert plan.variables.get(RT) == (exported or variables.get(RT))
    assert plan.variables["HCCL_HOST_SOCKET_PORT_RANGE"] == "auto"


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({RT: "1,0"}, "not in ascending order, which CANN asks for; write 0,1"),
        ({RT: "0,0"}, "names a device twice"),
        ({RT: ""}, "no device is visible on n4"),
        ({RT: "3"}, "2 ranks on n4 but 1 visible devices"),
    ],
)
def test_lists_that_cannot_work_are_refused(variables: dict[str, str], text: str, node: Path) -> None:
    with pytest.raises(RankPlanError, match=text) as refused:
        make_plan({"TMPDIR": str(node), **NPU_STEP, **variables}, "n4", "hf:d1+fsdp:d1", "npu")
    assert refused.value.exit_code == 78


def test_two_ranks_on_one_physical_device_are_found() -> None:
    environment.check_distinct(["n1/GPU-a", "n1/GPU-b", "n2/GPU-a", "", ""])
    with pytest.raises(ValueError, match="device n1/GPU-a: ranks 0 and 2 both hold it"):
        environment.check_distinct(["n1/GPU-a", "n1/GPU-b", "n1/GPU-a"])


MIG = "MIG-4c1c1f1e-9d2e-5e4b-a3c6-0a1b2c3d4e5f"


@pytest.mark.parametrize("kind", ["cuda", "auto"])
@pytest.mark.parametrize(
    ("listed", "device"), [("GPU-8f6d,GPU-1234", "GPU-1234@1"), (f"{MIG},{MIG[:-1]}a", f"{MIG[:-1]}a@1")]
)
def test_devices_by_uuid(listed: str, device: str, kind: str, node: Path) -> None:
    environ = {"TMPDIR": str(node), **RECORDED["srun-pmi2 rank 3"]["environ"], "CUDA_VISIBLE_DEVICES": listed}
    plan = make_plan(environ, "n2", "hf:d2+fsdp:d2", kind)
    assert plan.device is not None
    assert f"{plan.device.name}@{plan.device.ordinal}" == device


def test_auto_leaves_a_list_that_does_not_fit_to_the_library(node: Path) -> None:
    environ = {"TMPDIR": str(node), **RECORDED["srun-pmi2 rank 3"]["environ"], "CUDA_VISIBLE_DEVICES": "0"}
    assert make_plan(environ, "n2", "hf:d2+fsdp:d2", "auto").device is None
    with pytest.raises(RankPlanError, match="2 ranks on n2 but 1 visible devices"):
        make_plan(environ, "n2", "hf:d2+fsdp:d2", "cuda")


def test_fewer_cores_than_asked_for_are_said(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    environ = {"TMPDIR": str(node), **RECORDED["srun-pmi2 rank 3"]["environ"], "SLURM_CPUS_PER_TASK": "8"}
    plan = make_plan(environ, "n2", "hf:d2+fsdp:d2")
    assert any("1 of the 8 cores" in note for note in plan.notes)
    assert plan.variables["OMP_NUM_THREADS"] == "1"
