"""The table of variables: who started this process, which rank it is, which device and how many cores it has."""

from __future__ import annotations

import pytest

from pekoe.launch.environment import Facts, cores_per_rank, pick_device, read, torch_variables
from pekoe.launch.slurm_lists import expand_hosts, expand_task_counts

HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
    "PMI_FD": "9",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "HYDI_CONTROL_FD": "7",
}
PROXY = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "5",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "3",
}  # fmt: skip
STEP = {
    "SLURM_JOB_ID": "77", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "7", "SLURM_PROCID": "6", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NUM_NODES": "4",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "launcher", "rank", "size", "local_rank", "local_size"),
    [
        ({}, "none", 0, 1, 0, 1),
        ({"SLURM_NTASKS": "8"}, "none", 0, 1, 0, 1),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "none", 0, 1, 0, 1),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "srun", 1, 2, 0, None),
        (HYDRA, "mpich", 1, 4, 1, 2),
        ({**PROXY, **HYDRA}, "mpich", 1, 4, 1, 2),
        (OPEN_MPI, "openmpi", 3, 8, 1, 2),
        ({**PROXY, **OPEN_MPI}, "openmpi", 3, 8, 1, 2),
        ({**STEP, "PMIX_RANK": "6"}, "pmix", 6, 7, 0, 1),
        ({**STEP, "PMI_RANK": "6", "PMI_SIZE": "7"}, "pmi2", 6, 7, 0, 1),
        ({**STEP, "PMI_RANK": "6", "PMI_SIZE": "16"}, "pmi2", 6, 7, 0, 1),
        (STEP, "srun", 6, 7, 0, 1),
    ],
)
def test_rank_and_size(
    environ: dict[str, str], launcher: str, rank: int, size: int, local_rank: int, local_size: int | None
) -> None:
    facts = read(environ, "host")
    assert (facts.launcher, facts.rank, facts.size) == (launcher, rank, size)
    assert (facts.local_rank, facts.local_size) == (local_rank, local_size)


def test_step_facts_and_job_ids() -> None:
    facts = read({**STEP, "PMI_RANK": "6"}, "host")
    assert (facts.step_size, facts.node_rank, facts.num_nodes, facts.job_id) == (7, 3, 4, "77")
    assert read({"SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "13"}, "h").job_id == "10_3"
    assert read({**PROXY, **HYDRA}, "h").step_size is None


def test_what_is_not_followed_is_said() -> None:
    assert "SLURM_NTASKS=8" in read({"SLURM_NTASKS": "8"}, "h").notes[0]
    assert "proxy" in read({**PROXY, **HYDRA}, "h").notes[0]
    assert not read(HYDRA, "h").notes


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="PMI_SIZE: 'many'"):
        read({**HYDRA, "PMI_SIZE": "many"}, "h")


CUDA = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("environ", "name", "ordinal"),
    [
        ({CUDA: "3", "SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_STEP_NUM_TASKS": "4"}, "3", 0),
        ({CUDA: "2,3", **HYDRA, "MPI_LOCALRANKID": "0"}, "2", 0),
        ({CUDA: "2,3", **HYDRA}, "3", 1),
        ({CUDA: "GPU-aa,GPU-bb", **HYDRA}, "GPU-bb", 1),
        (
            {CUDA: "0", **STEP, "SLURM_GPUS_PER_TASK": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x4)", "SLURM_LOCALID": "3"},
            "0",
            0,
        ),
        ({**HYDRA}, "1", 1),
    ],
)
def test_device_is_from_the_visible_list(environ: dict[str, str], name: str, ordinal: int) -> None:
    device = pick_device(read(environ, "h"), CUDA, num_devices=None if CUDA in environ else 8)
    assert (device.name, device.ordinal) == (name, ordinal)


@pytest.mark.parametrize("listed", ["", "-1", "NoDevFiles"])
def test_empty_visible_list_is_refused(listed: str) -> None:
    with pytest.raises(ValueError, match="no device is visible"):
        pick_device(read({**HYDRA, CUDA: listed}, "h"), CUDA, 4)


def test_more_ranks_than_devices_is_refused_unless_shared() -> None:
    ranks = [
        read({**HYDRA, "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "8", CUDA: "4,5,6,7"}, "h") for rank in range(8)
    ]
    with pytest.raises(ValueError, match="8 ranks on h but 4 visible devices"):
        pick_device(ranks[0], CUDA)
    assert [pick_device(facts, CUDA, ranks_per_device=2).name for facts in ranks] == list("44556677")
    one = read({**HYDRA, "MPI_LOCALNRANKS": "4", CUDA: "0"}, "h")
    with pytest.raises(ValueError, match="1 visible devices"):
        pick_device(one, CUDA)


def test_ranks_of_a_node_get_distinct_devices() -> None:
    for listed in ("0,1,2,3", "7,5,3,1", "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e"):
        facts = [
            read({**HYDRA, "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "4", CUDA: listed}, "h")
            for rank in range(4)
        ]
        names = [pick_device(one, CUDA).name for one in facts]
        assert len(set(names)) == 4
        assert set(names) <= set(listed.split(","))


def test_cores_are_shared_by_the_ranks_of_a_node() -> None:
    def facts(environ: dict[str, str]) -> Facts:
        return read(environ, "h")

    assert cores_per_rank(facts(HYDRA), set(range(8))) == 4
    assert cores_per_rank(facts(HYDRA), {0}) == 1
    bound = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "4(x4)", "SLURM_CPUS_ON_NODE": "16"}
    assert cores_per_rank(facts(bound), set(range(4))) == 4
    assert cores_per_rank(facts(bound), set(range(16))) == 4


def test_torch_variables_are_those_of_the_role() -> None:
    assert torch_variables(1, 2, 0) == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("linux[1,2]", ["linux1", "linux2"]),
        ("host[001,003-004,006]", ["host001", "host003", "host004", "host006"]),
        (
            "ml-16-node-[001-002,004],ml-17-node-[001-003]",
            [
                "ml-16-node-001",
                "ml-16-node-002",
                "ml-16-node-004",
                "ml-17-node-001",
                "ml-17-node-002",
                "ml-17-node-003",
            ],
        ),
        ("single", ["single"]),
        ("a[1-2]-ib[0-1]", ["a1-ib0", "a1-ib1", "a2-ib0", "a2-ib1"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["a[1-2", "a[x]", "", "a,,b"])
def test_wrong_host_lists_are_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="host list"):
        expand_hosts(text)


def test_task_counts() -> None:
    assert expand_task_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ValueError, match=r"2\(y3\)"):
        expand_task_counts("2(y3)")
