"""Variables of a rank: defaults, what the user and the configuration say, torch's only where a rank trains."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pekoe.launch import environment, network, rank_environment
from pekoe.launch.allocation import parse
from pekoe.launch.network import Interface
from pekoe.launch.rank_environment import RankPlan, RankPlanError
from pekoe.pipeline.config.run import RunConfig


def hydra(rank: int, size: int = 4, local: int | None = None, local_size: int | None = None) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank), "PMI_SIZE": str(size), "MPI_LOCALRANKID": str(rank if local is None else local),
        "MPI_LOCALNRANKS": str(local_size or size),
    }  # fmt: skip


def make_plan(
    tmp_path: Path, variables: dict[str, str], world: str = "hf:d2+fsdp:d2", configured: dict[str, str] | None = None,
    **cluster: Any,
) -> RankPlan:  # fmt: skip
    config = RunConfig()
    config.cluster.device = "cpu"
    config.cluster.slurm.environment = configured or {}
    for name, value in cluster.items():
        setattr(config.cluster, name, value)
    environ = {"TMPDIR": str(tmp_path), **variables}
    return rank_environment.plan(environ, parse(world), config, environment.read(environ, "h"))


def test_defaults_do_not_touch_what_the_user_set(tmp_path: Path) -> None:
    user = {"TRITON_CACHE_DIR": "/mine", "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "7", "VLLM_CACHE_ROOT": "/home/me/v"}
    variables = make_plan(tmp_path, {**hydra(0), **user}).variables
    assert {name: variables[name] for name in user} == user
    assert variables["HF_DATASETS_OFFLINE"] == variables["TRANSFORMERS_OFFLINE"] == "1"
    assert make_plan(tmp_path, hydra(0)).variables["HF_HUB_OFFLINE"] == "1"


def test_the_configuration_wins_over_what_is_inherited(tmp_path: Path) -> None:
    configured = {"NCCL_DEBUG": "INFO", "HF_HUB_OFFLINE": "0", "TRITON_CACHE_DIR": "/fast/triton"}
    plan = make_plan(tmp_path, {**hydra(0), "NCCL_DEBUG": "WARN"}, configured=configured)
    assert {name: plan.variables[name] for name in configured} == configured


def test_configured_threads_win(tmp_path: Path) -> None:
    user = {**hydra(0, 2, local_size=2), "OMP_NUM_THREADS": "7"}
    assert make_plan(tmp_path, user, "hf:d1+fsdp:d1", threads_per_rank=3).variables["OMP_NUM_THREADS"] == "3"
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert make_plan(tmp_path, hydra(0, 2), "hf:d1+fsdp:d1").variables["OMP_NUM_THREADS"] == str(share)


TORCHRUN = {
    "RANK": "9", "WORLD_SIZE": "99", "LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "x", "MASTER_PORT": "1",
    "GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip


def test_only_ranks_that_train_alone_see_torch_variables(tmp_path: Path) -> None:
    exported = []
    for rank in range(4):
        variables = make_plan(tmp_path, {**hydra(rank), **TORCHRUN}).variables
        exported.append({name: variables[name] for name in TORCHRUN if name in variables})
    assert exported[0] == {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert exported[1] == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert exported[2] == exported[3] == {}
    colocated = make_plan(tmp_path, {**hydra(0, 2), **TORCHRUN}, "hf:d2|fsdp:d2")
    assert not set(TORCHRUN) & set(colocated.variables)
    assert colocated.role_rank is None


def test_ranks_of_a_tensor_parallel_engine_see_none_of_torchs_variables(tmp_path: Path) -> None:
    plans = [make_plan(tmp_path, {**hydra(rank, 6), **TORCHRUN}, "vllm:d2t2+fsdp:d2") for rank in range(6)]
    for plan in plans[2:]:
        assert not set(TORCHRUN) & set(plan.variables)
        assert plan.role_rank is None
    ports = [plan.variables["VLLM_PORT"] for plan in plans[2:]]
    assert len(set(ports)) == 4
    assert "VLLM_PORT" not in plans[0].variables
    for plan in plans[2:]:
        assert plan.ports is not None
        plan.ports.release()


def test_local_rank_is_the_place_in_the_visible_list(tmp_path: Path) -> None:
    """A library that takes LOCAL_RANK for a device's number gets one that exists."""
    narrowed = {
        "SLURM_PROCID": "1", "PMI_RANK": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_NUM_NODES": "1", "CUDA_VISIBLE_DEVICES": "1",
        "SLURMD_TRES_BIND": "gpu:per_task:1",
    }  # fmt: skip
    assert make_plan(tmp_path, narrowed, device="cuda").variables["LOCAL_RANK"] == "0"


def test_engines_of_a_node_get_ports_of_their_own(tmp_path: Path) -> None:
    plans = [make_plan(tmp_path, {**hydra(rank), "VLLM_PORT": "21000"}, "vllm:d3+fsdp:d1") for rank in range(4)]
    ports = [int(plan.variables["VLLM_PORT"]) for plan in plans[1:]]
    assert plans[0].ports is None
    assert plans[0].variables["VLLM_PORT"] == "21000"
    assert len(set(ports)) == 3
    assert min(ports) > 21000
    assert all(plan.ports and plan.ports.first == port for plan, port in zip(plans[1:], ports, strict=True))
    with pytest.raises(RankPlanError, match="VLLM_PORT: 'auto'"):
        make_plan(tmp_path, {**hydra(1), "VLLM_PORT": "auto"}, "vllm:d3+fsdp:d1")
    for plan in plans[1:]:
        assert plan.ports is not None
        plan.ports.release()


def test_a_task_that_a_site_starts_with_an_empty_environment_works(tmp_path: Path) -> None:
    """`SLURM_EXPORT_ENV=PATH` and the like: nothing is inherited, and ranks still find a home, caches, their models."""
    code = (
        "import os, sys\n"
        "from pekoe.launch import environment, rank_environment\n"
        "from pekoe.launch.allocation import parse\n"
        "from pekoe.pipeline.config.run import RunConfig\n"
        "plan = rank_environment.plan(os.environ, parse('hf:d1+fsdp:d1'), RunConfig())\n"
        "rank_environment.enter(plan)\n"
        "import getpass, pathlib\n"
        "print(pathlib.Path.home().is_dir(), getpass.getuser() != '')\n"
        "print(os.environ['TRITON_CACHE_DIR'], 'torch' in sys.modules)"
    )
    environ = {**hydra(1, 2), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["True", "True", str(tmp_path / f"pekoe-{os.getuid()}-cache" / "triton"), "False"]


def test_several_hosts_without_a_way_between_them_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: [Interface("lo", "127.0.0.1", "255.0.0.0")])
    two_nodes = hydra(0, 4, local=0, local_size=2)
    with pytest.raises(RankPlanError, match="no interface but loopback"):
        make_plan(tmp_path, two_nodes)
    with pytest.raises(RankPlanError, match=r"lo .127\.0\.0\.1. is a loopback interface but the world spans several"):
        make_plan(tmp_path, {**two_nodes, "GLOO_SOCKET_IFNAME": "lo"})
    assert "GLOO_SOCKET_IFNAME" not in make_plan(tmp_path, hydra(0)).variables


def test_what_the_user_wrote_for_nccl_holds_for_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        Interface(name, f"10.0.{index}.1", "255.255.255.0") for index, name in enumerate(("docker0", "eth0", "ib0"))
    ]
    monkeypatch.setattr(network, "interfaces", lambda: [Interface("lo", "127.0.0.1", "255.0.0.0"), *found])
    monkeypatch.setattr(network, "source_address", lambda peer: "10.0.0.1")
    user = {**hydra(0, 4, local=0, local_size=2), "NCCL_SOCKET_IFNAME": "^lo,docker"}
    variables = make_plan(tmp_path, user).variables
    assert variables["GLOO_SOCKET_IFNAME"] == variables["TP_SOCKET_IFNAME"] == "eth0"
    assert variables["NCCL_SOCKET_IFNAME"] == "^lo,docker"


PROXY = {"https_proxy": "http://proxy:3128"}


def test_internal_traffic_goes_past_the_users_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"n1": "10.77.1.1", "n2": "10.77.1.2"}
    monkeypatch.setattr(network, "interfaces", lambda: [Interface("eth0", "10.77.1.2", "255.255.255.0")])
    monkeypatch.setattr(socket, "gethostbyname", addresses.__getitem__)
    job = {**hydra(2, 4, local=0, local_size=2), "SLURM_JOB_NODELIST": "n[1-2]", **PROXY, "no_proxy": "intranet,n1"}
    variables = make_plan(tmp_path, job).variables
    assert variables["https_proxy"] == PROXY["https_proxy"]
    expected = {
        "intranet", "n1", "n2", "h", "localhost", "127.0.0.1", "::1", "10.77.1.1", "10.77.1.2", "10.77.1.0/24",
    }  # fmt: skip
    assert variables["no_proxy"] == variables["NO_PROXY"]
    assert set(variables["no_proxy"].split(",")) == expected
    monkeypatch.setattr(os, "environ", dict(variables))
    from urllib.request import proxy_bypass_environment

    assert proxy_bypass_environment("n2:8000")
    assert proxy_bypass_environment("10.77.1.1:8000")
    assert not proxy_bypass_environment("example.org")


def test_without_a_proxy_nothing_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise AssertionError(name)

    monkeypatch.setattr(socket, "gethostbyname", fail)
    assert "no_proxy" not in make_plan(tmp_path, {**hydra(0), "SLURM_JOB_NODELIST": "n[1-2]"}).variables


def test_a_name_service_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading
    import time

    from pekoe.launch import proxies

    over = threading.Event()
    monkeypatch.setattr(proxies, "LOOKUP_SECONDS", 0.1)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: str(over.wait(90)))
    began = time.monotonic()
    assert proxies.addresses_of(["n1", "n2"], 0.1) == []
    assert time.monotonic() - began < 5
    over.set()


def test_apply_makes_the_environment_equal() -> None:
    environ = {"a": "1", "gone": "2"}
    rank_environment.apply(environ, {"a": "3", "new": "4"})
    assert environ == {"a": "3", "new": "4"}


def test_open_files_are_raised() -> None:
    hard = rank_environment.raise_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
