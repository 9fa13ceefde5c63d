"""What the doctor makes of what Slurm, nodes, networks and versions say: pure functions of facts."""

from __future__ import annotations

from typing import Any

import pytest

from pekoe.launch.doctor import device_check, network_check, node_check, site_check, slurm_check, version_check
from pekoe.launch.doctor.cluster_trial import Outcome
from pekoe.launch.doctor.device_check import RankDevice
from pekoe.launch.doctor.doctor import _is_run, in_slurm
from pekoe.launch.doctor.import_probe import ImportFacts
from pekoe.launch.doctor.network_check import LinkFacts, NetworkFacts
from pekoe.launch.doctor.node_check import NodeFacts
from pekoe.launch.doctor.rank_probe import HostReport, RankReport, Said, TrialReport, heard
from pekoe.launch.doctor.slurm_check import SlurmFacts
from pekoe.launch.doctor.trial_step import trial_config
from pekoe.launch.doctor.version_check import VersionFacts
from pekoe.launch.doctor.world_check import judge as judge_world
from pekoe.launch.environment import read
from pekoe.pipeline.config.load import from_yaml_text
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.devices.memory_holders import ascend_tables
from pekoe.pipeline.runs.finding import Finding


def config(*overrides: str) -> RunConfig:
    return from_yaml_text("", overrides)


def one(findings: list[Finding], text: str) -> Finding:
    matching = [finding for finding in findings if text in finding.text]
    assert len(matching) == 1, findings
    return matching[0]


PARTITIONS = {
    "gpu": {"Default": "YES", "State": "UP", "MaxTime": "1-00:00:00", "TotalNodes": "4", "PreemptMode": "OFF"},
    "spare": {"State": "UP", "MaxTime": "UNLIMITED", "TotalNodes": "4", "PreemptMode": "REQUEUE", "GraceTime": "30"},
    "cheap": {"State": "UP", "MaxTime": "UNLIMITED", "TotalNodes": "4", "PreemptMode": "CANCEL", "GraceTime": "300"},
    "old": {"State": "DRAIN", "MaxTime": "UNLIMITED", "TotalNodes": "0"},
}


def slurm(**configuration: str) -> SlurmFacts:
    known = {
        "ClusterName": "test", "PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE", "KillWait": "30 sec",
        "MaxArraySize": "1001", "AccountingStorageType": "accounting_storage/slurmdbd", "JobRequeue": "1",
    }  # fmt: skip
    commands = list(slurm_check.COMMANDS)
    return SlurmFacts(commands, "24.05.1", 0.1, {**known, **configuration}, PARTITIONS, "")


@pytest.mark.parametrize(
    ("facts", "overrides", "severity", "text"),
    [
        ({}, [], "ok", "partition gpu: jobs are not preempted"),
        ({}, ["cluster.slurm.partition=spare"], "note", "SIGTERM to ranks, the end 30 s later; cluster.grace_seconds"),
        ({}, ["cluster.slurm.partition=spare", "cluster.grace_seconds=20"], "ok", "preempted by REQUEUE"),
        ({"SlurmctldParameters": "preempt_send_user_signal"}, ["cluster.slurm.partition=spare"], "note", "USR2 to the"),
        ({}, ["cluster.slurm.partition=cheap", "cluster.continue_by=requeue"], "problem", "preempted by CANCEL"),
        ({}, ["cluster.slurm.partition=cheap", "cluster.continue_by=chain"], "ok", "preempted by CANCEL"),
        ({"PreemptType": "preempt/none"}, ["cluster.slurm.partition=spare"], "ok", "spare: jobs are not preempted"),
        ({}, ["cluster.grace_seconds=300"], "note", "the job is warned 120 s before its end"),
        ({}, [], "ok", "SIGKILL 30 s later"),
        ({"MaxArraySize": "0"}, [], "note", "no job arrays"),
        ({"AccountingStorageType": "(null)none", "MinJobAge": "300 sec"}, [], "ok", "known for 300 sec only"),
    ],
)
def test_what_a_run_may_expect(facts: dict[str, str], overrides: list[str], severity: str, text: str) -> None:
    found = one(slurm_check.judge(slurm(**facts), config(*overrides), True), text)
    assert found.severity == severity
    assert bool(found.next_step) == (severity != "ok")


def test_slurm_that_lacks_or_does_not_answer() -> None:
    assert slurm_check.judge(SlurmFacts([]), config(), False)[0].severity == "ok"
    absent = slurm_check.judge(SlurmFacts([]), config(), True)
    assert absent[0].severity == "problem"
    assert "login node" in absent[0].next_step
    silent = SlurmFacts(list(slurm_check.COMMANDS), errors=["scontrol show config: no answer within 10 s"])
    assert "no answer within 10 s" in one(slurm_check.judge(silent, config(), True), "does not answer").text
    assert slurm_check.judge(silent, config(), False)[0].severity == "note"
    partly = SlurmFacts(["sbatch", "scontrol", "squeue"], configuration={"ClusterName": "x"})
    assert one(slurm_check.judge(partly, config(), True), "not on PATH").severity == "problem"


@pytest.mark.parametrize(
    ("overrides", "severity", "text"),
    [
        ([], "ok", "partition gpu: 4 nodes, at most 1-00:00:00 a job"),
        (["cluster.slurm.partition=nosuch"], "problem", "partition 'nosuch' is not there"),
        (["cluster.slurm.partition=old"], "problem", "partition old is DRAIN"),
        (["cluster.time_limit=2-00:00:00"], "problem", "such a job never starts"),
        (["cluster.n_nodes=8"], "problem", "the run needs 8"),
        (["cluster.n_nodes=3", "cluster.spare_nodes=2"], "problem", "the run needs 5"),
    ],
)
def test_partitions(overrides: list[str], severity: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_check, "ask", lambda *_: "4 gpu:h100:8\n")
    found = one(
        site_check.judge(slurm(AccountingStorageType="none"), config("cluster.device=cuda", *overrides), True), text
    )
    assert found.severity == severity
    assert bool(found.next_step) == (severity != "ok")


def test_keys_of_a_site_that_do_not_fit_each_other() -> None:
    assert site_check.keys(config()) == []
    wrong = site_check.keys(config("cluster.slurm.mpi=none", "cluster.slurm.extra=[--mem=1G]"))
    assert [found.severity for found in wrong] == ["problem", "problem"]
    assert "cluster.slurm.mem" in one(wrong, "cluster.slurm.extra").text


def test_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_check, "ask", lambda words, *_: "lab|normal,high\n" if "sacctmgr" in words else "")
    facts = slurm(AccountingStorageEnforce="associations,limits,qos")
    wrong = site_check.judge(facts, config("cluster.slurm.account=other", "cluster.slurm.qos=vip"), False)
    assert one(wrong, "account 'other'").next_step == "cluster.slurm.account: lab"
    assert one(wrong, "quality of service 'vip'").severity == "problem"
    right = site_check.judge(facts, config("cluster.slurm.account=lab", "cluster.slurm.qos=high"), False)
    assert one(right, "account lab, qos high").severity == "ok"
    lenient = site_check.judge(slurm(), config("cluster.slurm.account=other"), False)
    assert one(lenient, "account 'other'").severity == "note"


@pytest.mark.parametrize(
    ("offered", "request_", "given"),
    [
        ("gpu:h100:2,npu:ascend910b:2", "gpu:h100:2", True),
        ("gpu:h100:2,npu:ascend910b:2", "gpu:2", True),
        ("gpu:h100:2(S:0-1)", "gpu:h100:2", True),
        ("gpu:h100:2(S:0-1)", "gpu:4", False),
        ("gpu:a100:1,gpu:h100:1", "gpu:2", True),
        ("gpu:a100:1,gpu:h100:1", "gpu:h100:2", False),
        ("npu:2", "npu:ascend910b:1", False),
        ("(null)", "gpu:1", False),
        ("gpu", "gpu", True),
    ],
)
def test_generic_resources(offered: str, request_: str, given: bool) -> None:
    assert site_check.has_gres(offered, request_) is given


def test_which_sites_start_in_jobs() -> None:
    alone, job = read({}, "here"), read({"SLURM_JOB_ID": "7"}, "here")
    assert not in_slurm(config(), None, alone)
    assert in_slurm(config(), None, job)
    assert not in_slurm(config("cluster.launcher=mpiexec"), "laptop", alone)
    assert in_slurm(config(), "some", alone)
    assert in_slurm(config("cluster.launcher=mpiexec", "cluster.slurm.partition=gpu"), "some", alone)


def test_the_trial_is_the_same_site_in_small() -> None:
    big = config(
        "cluster.n_nodes=64", "cluster.spare_nodes=2", "cluster.device=npu", "cluster.slurm.account=lab",
        "cluster.slurm.exclusive=true", "cluster.slurm.mem=900G", "cluster.time_limit=1-00",
        "allocation=vllm:d256+fsdp:d256",
    )  # fmt: skip
    small = trial_config(big, 2)
    assert (small.cluster.n_nodes, small.cluster.n_gpus_per_node, small.cluster.spare_nodes) == (2, 2, 0)
    assert small.allocation == "hf:d2+fsdp:d2"
    assert small.cluster.slurm.account == "lab"
    assert small.cluster.time_limit == "3"
    assert not small.cluster.slurm.exclusive
    assert big.cluster.slurm.exclusive
    assert trial_config(big, 1).allocation == "hf:d1+fsdp:d1"


def test_a_run_may_stand_in_place_of_a_site(tmp_path: Any) -> None:
    site, run = tmp_path / "site.yaml", tmp_path / "run.yaml"
    site.write_text("cluster: {n_nodes: 2}\n")
    run.write_text("cluster: {n_nodes: 2}\nactor: {path: x}\n")
    assert [_is_run(str(site)), _is_run(str(run)), _is_run("laptop"), _is_run("gone.yaml")] == [
        False,
        True,
        False,
        False,
    ]


def network(host: str, **values: Any) -> NetworkFacts:
    good = {"names": ["10.0.0.1"], "interface": "eth0", "address": "10.0.0.1", "speeds": {"eth0": 10_000}}
    return NetworkFacts(host, **{**good, "addresses": {"10.0.0.1": "eth0", "127.0.0.1": "lo"}, **values})


@pytest.mark.parametrize(
    ("values", "link", "severity", "text"),
    [
        ({}, {"address": "10.0.0.1"}, "ok", "n2 -> n1: by eth0 (10.0.0.1)"),
        ({"names": ["127.0.1.1"]}, {"address": "10.0.0.1"}, "note", "its own name stands for 127.0.1.1"),
        ({"error": "n2 has no interface but loopback"}, {"error": "ECONNREFUSED"}, "problem", "no interface but"),
        ({}, {"error": "timed out"}, "problem", "n2 -> n1: timed out"),
        ({}, {"address": "127.0.0.1"}, "problem", "loopback between two nodes"),
        ({"speeds": {"eth0": 1000, "ib0": 100_000}}, {"address": "10.0.0.1"}, "note", "ib0 is up, 100 Gbit/s"),
        ({"wish": {"GLOO_SOCKET_IFNAME": "eth0"}}, {"address": "10.0.0.1"}, "ok", "as GLOO_SOCKET_IFNAME=eth0 says"),
        ({"proxies": {"http_proxy": "http://…@p:80"}}, {"address": "10.0.0.1"}, "ok", "ranks extend no_proxy"),
    ],
)
def test_networks(values: dict[str, Any], link: dict[str, Any], severity: str, text: str) -> None:
    found = one(network_check.judge([network("n1"), network("n2", **values)], LinkFacts(**link)), text)
    assert found.severity == severity
    assert bool(found.next_step) == (severity != "ok")


def test_what_a_rank_measures_of_its_network() -> None:
    facts = network_check.measure(
        read({}, "here"), {"HTTP_PROXY": "http://me:secret@proxy:80", "GLOO_SOCKET_IFNAME": "nosuch"}
    )
    assert "nosuch" in facts.error
    assert facts.proxies == {"http_proxy": "http://…@proxy:80"}
    assert "lo" in facts.addresses.values()


def node(**values: Any) -> NodeFacts:
    good: dict[str, Any] = {
        "host": "n1", "cores": 8, "cores_on_node": 64, "open_files": 65536, "locked_memory": -1, "local": "/tmp/p",
        "local_kind": "xfs", "local_free": 1 << 40, "shared_memory_free": 1 << 36, "home_kind": "nfs",
        "home_free": 1 << 40, "offline": "1",
    }  # fmt: skip
    return NodeFacts(**{**good, **values})


@pytest.mark.parametrize(
    ("values", "cpus", "severity", "text"),
    [
        ({}, 8, "ok", "8 of 64 cores a rank"),
        ({"cores": 1}, None, "note", "a rank may use 1 of 64 cores"),
        ({"cores": 1}, 8, "problem", "cluster.slurm.cpus_per_task is 8"),
        ({"local_error": "EROFS: Read-only file system"}, None, "problem", "n1: EROFS"),
        ({"local_kind": "nfs4"}, None, "problem", "not on a local disk"),
        ({"local_kind": "tmpfs", "local_free": 1 << 28}, None, "note", "and it is memory"),
        ({"open_files": 1024}, None, "note", "at most 1024 open files"),
        ({"locked_memory": 65536}, None, "note", "64 KiB of page-locked memory"),
        ({"shared_memory_free": 1 << 20}, None, "note", "free in /dev/shm"),
        ({"left_over": [50, 1 << 30]}, None, "note", "50 files of dead worlds hold 1 GiB of memory"),
        ({"home_free": 1 << 20}, None, "note", "free in the home folder"),
        ({"caches": {"TRITON_CACHE_DIR": "nfs"}}, None, "note", "TRITON_CACHE_DIR (nfs)"),
        ({"offline": "0"}, None, "note", "HF_HUB_OFFLINE is off on n1"),
    ],
)
def test_nodes(values: dict[str, Any], cpus: int | None, severity: str, text: str) -> None:
    found = one(node_check.judge([node(**values)], cpus, {"cuda"}), text)
    assert found.severity == severity
    assert bool(found.next_step) == (severity != "ok")


def versions(host: str, **values: Any) -> VersionFacts:
    packages = {"torch": "2.9.0", "transformers": "5.0.0", "h5py": "3.11.0", "mpi4py": "4.1.0"}
    good: dict[str, Any] = {
        "python": "3.11.7", "executable": "/v/python", "platform": "6.1 x86_64", "pekoe": "0.1 in /p",
        "packages": packages, "torch_build": "cuda 12.8", "hdf5": "1.14.6",
    }  # fmt: skip
    return VersionFacts(host, **{**good, **values})


def test_versions() -> None:
    assert all(found.severity == "ok" for found in version_check.judge_one(versions("n1"), "cuda"))
    old = version_check.judge_one(versions("n1", hdf5="1.10.4", python="3.10.2", packages={"torch": "2.9.0"}), "npu")
    for text in ("HDF5 1.10.4 under h5py", "python 3.10.2 is too old", "transformers, h5py, mpi4py: not installed",
                 "torch is a build for cuda 12.8, but cluster.device is npu"):  # fmt: skip
        assert one(old, text).severity == "problem"
        assert one(old, text).next_step
    assert version_check.judge_same([versions("n1"), versions("n2")])[0].text == "the same on n1, n2"
    differs = version_check.judge_same([versions("n1"), versions("n2", python="3.12.1")])
    assert differs[0].severity == "problem"
    assert differs[0].text == "python differs: 3.11.7 on n1; 3.12.1 on n2"
    assert (
        version_check.measure("here").torch_build in ("cpu", "cpu + npu")
        or "cuda" in version_check.measure("here").torch_build
    )


NPU_SMI = """
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc2                 Version: 24.1.rc2                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B2               | OK            | 97.5        45                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          60000/ 65536         |
+===========================+===============+====================================================+
| 1     910B2               | OK            | 93.1        44                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3000 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 4194000       | python3                  | 56000                   |
+===========================+===============+====================================================+
| No running processes found in NPU 1                                                            |
+===========================+===============+====================================================+
"""


def test_tables_of_npu_smi() -> None:
    devices, holders = ascend_tables(NPU_SMI)
    assert [(one.index, one.name, one.total >> 20, one.free >> 20) for one in devices] == [
        ("0", "910B2", 65536, 5536), ("1", "910B2", 65536, 62536),
    ]  # fmt: skip
    assert [(one.device, one.pid, one.name, one.bytes >> 20) for one in holders] == [("0", 4194000, "python3", 56000)]
    facts = device_check.DeviceFacts("n1", devices, holders)
    found = device_check.judge(
        [facts], [("n1", RankDevice("ASCEND_RT_VISIBLE_DEVICES", ["0"], "0"))], [("n1", "npu", 2)], "npu", 2
    )
    assert "kill 4194000" in one(found, "pid 4194000 (python3) holds 54.7 GiB").next_step


def test_devices_of_ranks() -> None:
    step = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "3", "SLURM_NODEID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}  # fmt: skip
    crowded = device_check.device_of(read(step, "n1"), "cuda")
    assert "8 ranks on n1 but 4 visible devices" in crowded.error
    found = device_check.judge([], [("n1", crowded)], [("n1", "cuda", 0)], "cuda", 8)
    assert one(found, "rank 0: CUDA_VISIBLE_DEVICES").severity == "problem"
    assert one(found, "torch sees no cuda device").severity == "problem"
    fine = device_check.device_of(read({**step, "SLURM_STEP_TASKS_PER_NODE": "4"}, "n1"), "auto")
    assert (fine.variable, fine.name) == ("CUDA_VISIBLE_DEVICES", "3")
    assert device_check.judge([], [], [("n1", "cpu", 1)], "cpu", 2)[0].text == "n1: cpu"


def outcome(**values: Any) -> Outcome:
    return Outcome(**{"how": "a job of its own", "num_nodes": 2, "num_ranks": 4, "salloc": "--nodes=2", **values})


def report(*places: tuple[str, int], seconds: float = 2.0) -> TrialReport:
    device = RankDevice()
    hosts = {
        host: HostReport(
            host, versions(host), node(), network(host), device_check.DeviceFacts(host), ImportFacts(seconds)
        )
        for host, _ in places
    }
    first = {host: next(rank for rank, (name, _) in enumerate(places) if name == host) for host in hosts}
    ranks = [
        RankReport(rank, host, "pmi2", local, 2, device, hosts[host] if first[host] == rank else None)
        for rank, (host, local) in enumerate(places)
    ]
    return TrialReport(ranks, 1.0, 0.001)


GOOD = (("n1", 0), ("n1", 1), ("n2", 0), ("n2", 1))


@pytest.mark.parametrize(
    ("values", "severity", "text", "step"),
    [
        ({"waited": True}, "note", "the queue is full", "salloc --nodes=2, then in it: pekoe doctor site"),
        ({"refused": "no pmix"}, "problem", "no world can be started: no pmix", "pmi2 for MPICH"),
        ({"alone": ["rank 1 …", "rank 0 …"]}, "problem", "2 ranks found no world, e.g. rank 0 …", "pmi2 for MPICH"),
        (
            {"timed_out": True, "phase": "the world has met"},
            "problem",
            "the last that was heard: the world has met",
            "MPI",
        ),
        ({"code": 1, "words": ["salloc: invalid partition"]}, "problem", "Slurm gave no job", "--nodes=2"),
        (
            {"code": 1, "phase": "x", "words": ["Fatal error in PMPI_Init_thread"]},
            "problem",
            "before a report",
            "pmix for",
        ),
        ({"report": report(*GOOD)}, "ok", "one world after 1.0 s, all ranks hear all in 1.0 ms", ""),
        ({"report": report(*GOOD)}, "ok", "rank 0: n1/0, rank 1: n1/1, rank 2: n2/0, rank 3: n2/1", ""),
        ({"report": report(("n1", 0), ("n2", 0), ("n1", 1), ("n2", 1))}, "problem", "node by node", "--distribution"),
        ({"report": report(("n1", 0), ("n1", 0), ("n2", 0), ("n2", 0))}, "problem", "do not count from 0", "MPI"),
        ({"report": report(*GOOD, seconds=99.0)}, "note", "n1: importing torch took 99 s", "packed_environment"),
    ],
)
def test_worlds(values: dict[str, Any], severity: str, text: str, step: str) -> None:
    found = one(judge_world(outcome(**values), "site"), text)
    assert found.severity == severity
    assert step in found.next_step


def test_lines_of_ranks_are_told_from_others() -> None:
    import msgspec

    said = Said(phase="the world has met")
    assert heard(f"pekoe-doctor {msgspec.json.encode(said).decode()}\n") == said
    assert heard("[1] pekoe-doctor {broken") is None
    assert heard("srun: job 12 queued") is None
