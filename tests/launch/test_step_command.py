"""Argument lists of srun and mpiexec, whole; which launcher, which MPI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pekoe.launch import environment
from pekoe.launch.allocation import parse
from pekoe.launch.step_command import (
    Step,
    check_mpi,
    choose_launcher,
    choose_mpi,
    detect_mpi,
    mpiexec_flavour,
    offered_mpi,
    step_command,
)
from pekoe.pipeline.config.load import from_yaml_text
from pekoe.pipeline.config.run import RunConfig

SPLIT = "hf:d2+fsdp:d2"
PROGRAM = ("-m", "pekoe.launch.rank", "/runs/r", "3")
RANK = ["/env/bin/python", "-u", *PROGRAM]
SRUN = [
    "--mpi=pmi2", "--kill-on-bad-exit=1", "--no-kill=off", "--wait=0", "--overlap", "--export=ALL", "--unbuffered",
    "--job-name=ranks",
]  # fmt: skip
OPENMPI = "/usr/lib/x86_64-linux-gnu/libmpi.so.40"
WHEEL = str(Path(sys.prefix) / "bin" / "python")


def config(*overrides: str) -> RunConfig:
    basic = ["cluster.device=cuda", "cluster.n_nodes=2", "cluster.n_gpus_per_node=2", "cluster.slurm.cpus_per_task=4"]
    return from_yaml_text("", [*basic, *overrides])


def command(
    *overrides: str, allocation: str = SPLIT, mpi: str = "pmi2", nodes: tuple[str, ...] = (), output: Path | None = None
) -> list[str]:
    placement = parse(allocation)
    step = Step(PROGRAM, placement.world_size, nodes, output, "/env/bin/python")
    return step_command(step, config(*overrides), placement, mpi)


def test_srun_gets_nodes_tasks_cores_and_devices_again() -> None:
    own = ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--distribution=block:block", "--cpus-per-task=4"]
    assert command() == ["srun", *own, "--gres=gpu:2", *SRUN, *RANK]


def test_srun_uses_the_nodes_it_is_told_and_its_own_output() -> None:
    made = command("cluster.spare_nodes=1", nodes=("n1", "n4"), output=Path("/runs/r/step.log"))
    assert "--nodes=2" in made
    assert "--nodelist=n1,n4" in made
    assert made[-len(RANK) - 2 : -len(RANK)] == ["--output=/runs/r/step.log", "--open-mode=append"]


def test_a_world_that_does_not_fill_its_nodes_names_the_node_of_each_rank() -> None:
    made = command(allocation="hf:d1+fsdp:d2", nodes=("n2", "n3"))
    assert made[1:5] == ["--nodes=2", "--ntasks=3", "--distribution=arbitrary", "--nodelist=n2,n2,n3"]
    with pytest.raises(ValueError, match=r"3 ranks on 2 nodes are not equally many on each \(2, 1\)"):
        command(allocation="hf:d1+fsdp:d2")


def test_without_a_number_of_cores_ranks_share_those_of_the_job() -> None:
    made = command("cluster.slurm.cpus_per_task=null")
    assert "--cpu-bind=none" in made
    assert not [word for word in made if word.startswith("--cpus-per-task")]


def test_a_heterogeneous_job_is_one_step_of_two_components() -> None:
    own = ["cluster.n_nodes=1", "cluster.rollout_nodes.n_nodes=2", "cluster.rollout_nodes.n_gpus_per_node=1"]
    own += ["cluster.rollout_nodes.cpus_per_task=8", "cluster.rollout_nodes.gres=gpu:l40"]
    made = command(*own, mpi="pmix")
    middle = made.index(":")
    first = ["--het-group=0", "--nodes=1", "--ntasks=2", "--ntasks-per-node=2", "--distribution=block:block"]
    second = ["--het-group=1", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--distribution=block:block"]
    flags = ["--mpi=pmix", *SRUN[1:]]
    assert made[:middle] == ["srun", *first, "--cpus-per-task=4", "--gres=gpu:2", *flags, *RANK]
    assert made[middle + 1 :] == [*second, "--cpus-per-task=8", "--gres=gpu:l40:1", *flags, *RANK]


def test_each_component_takes_its_own_nodes() -> None:
    own = ["cluster.n_nodes=1", "cluster.rollout_nodes.n_nodes=2", "cluster.rollout_nodes.n_gpus_per_node=2"]
    made = command(*own, allocation="hf:d3+fsdp:d2", nodes=("a1", "b1", "b2"))
    assert [word for word in made if word.startswith("--nodelist")] == ["--nodelist=a1", "--nodelist=b1,b1,b2"]


def test_a_dead_rank_ends_every_component_of_the_step() -> None:
    own = ["cluster.n_nodes=1", "cluster.rollout_nodes.n_nodes=1", "cluster.rollout_nodes.n_gpus_per_node=2"]
    assert command().count("--kill-on-bad-exit=1") == 1
    assert command(*own).count("--kill-on-bad-exit=1") == 2


@pytest.mark.parametrize(
    ("flavour", "nodes", "allocation", "expected"),
    [
        ("hydra", (), SPLIT, ["-n", "4", "-ppn", "2"]),
        ("hydra", ("n1", "n3"), SPLIT, ["-n", "4", "-ppn", "2", "-hosts", "n1,n3"]),
        ("hydra", ("n1", "n3"), "hf:d1+fsdp:d2", ["-n", "3", "-hosts", "n1:2,n3:1"]),
        ("openmpi", (), SPLIT, ["-n", "4", "--map-by", "ppr:2:node", "--bind-to", "none"]),
        ("openmpi", ("n1", "n3"), SPLIT,
         ["-n", "4", "--host", "n1:2,n3:2", "--map-by", "ppr:2:node", "--bind-to", "none"]),
        ("openmpi", ("n1", "n3"), "hf:d1+fsdp:d2",
         ["-n", "3", "--host", "n1:2,n3:1", "--map-by", "slot", "--bind-to", "none"]),
    ],
)  # fmt: skip
def test_mpiexec_in_its_own_words(flavour: str, nodes: tuple[str, ...], allocation: str, expected: list[str]) -> None:
    wheel = ["/env/bin/mpiexec", "-bootstrap", "slurm"]
    site = ["mpirun", "--allow-run-as-root"]
    own = "cluster.slurm.mpiexec=[mpirun,--allow-run-as-root]"
    assert command(mpi=flavour, nodes=nodes, allocation=allocation) == [*wheel, *expected, *RANK]
    assert command(own, mpi=flavour, nodes=nodes, allocation=allocation) == [*site, *expected, *RANK]


def test_what_cannot_be_started_says_why() -> None:
    with pytest.raises(ValueError, match="is not a world of 3 ranks"):
        step_command(Step(PROGRAM, 3), config(), parse(SPLIT), "pmi2")
    with pytest.raises(ValueError, match=r"3 nodes \(a,b,c\) for a world on 2 nodes"):
        command(nodes=("a", "b", "c"))
    with pytest.raises(ValueError, match="names of the nodes are needed"):
        command("cluster.spare_nodes=1", mpi="hydra")
    with pytest.raises(ValueError, match=r"cluster\.launcher: 'mpiexec' sees the first component"):
        command("cluster.n_nodes=1", "cluster.rollout_nodes.n_nodes=1", mpi="hydra")


def test_variables_of_the_site_and_its_mpi_stand_before_the_rank() -> None:
    made = command("cluster.slurm.environment={A: b c}", f"cluster.slurm.mpi_library={OPENMPI}", mpi="pmix")
    assert made[-len(RANK) - 3 :] == ["env", "A=b c", f"MPI4PY_LIBMPI={OPENMPI}", *RANK]


def test_a_packed_environment_is_unpacked_by_the_node() -> None:
    made = command("cluster.slurm.packed_environment=/s/env.tar", "cluster.setup_seconds=300")
    start = made.index("/env/bin/python")
    assert made[start : start + 3] == ["/env/bin/python", "-I", "-S"]
    assert made[start + 3].endswith("/launch/packed_environment.py")
    assert Path(made[start + 3]).is_file()
    assert made[start + 4 :] == ["/s/env.tar", "--seconds", "300", "--", "python", "-u", *PROGRAM]


CONTAINER = [
    "cluster.slurm.container.image=/s/pekoe.sif", "cluster.slurm.container.mounts=[/scratch, '/a:/b']",
    "cluster.slurm.container.python=/opt/python", "cluster.fileroot=/runs", "actor.path=/models/m",
    "train_dataset.path=/data/d.jsonl",
]  # fmt: skip


def inside(kind: str, mpi: str, *overrides: str) -> list[str]:
    return command(f"cluster.slurm.container.kind={kind}", *CONTAINER, *overrides, mpi=mpi)


def test_apptainer_wraps_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/home/me/job")
    folders = ["/a:/b", "/data/d.jsonl", "/home/me/job", "/models/m", "/runs", "/scratch"]
    binds = [word for folder in folders for word in ("--bind", folder)]
    end = [*binds, "--pwd", "/home/me/job", "/s/pekoe.sif", "/opt/python", "-u", *PROGRAM]
    cuda = inside("apptainer", "pmi2")
    assert cuda[cuda.index("apptainer") :] == ["apptainer", "exec", "--nv", *end]
    npu = inside("apptainer", "pmi2", "cluster.device=npu")
    driver = ["--bind", "/usr/local/Ascend/driver", "--bind", "/etc/ascend_install.info"]
    assert npu[npu.index("apptainer") :] == ["apptainer", "exec", *driver, *end]
    cpu = inside("apptainer", "pmi2", "cluster.device=cpu")
    assert cpu[cpu.index("apptainer") :] == ["apptainer", "exec", *end]


@pytest.mark.parametrize(("server", "bound"), [("/var/spool/pmix.1", ["--bind", "/var/spool/pmix.1"]), (None, [])])
def test_the_folder_of_the_pmix_server_is_seen_inside(tmp_path: Path, server: str | None, bound: list[str]) -> None:
    """Only a rank knows it: a shell of its own adds the bind."""
    apptainer = tmp_path / "apptainer"
    apptainer.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    apptainer.chmod(0o755)
    made = inside("apptainer", "pmix", "cluster.slurm.container.mounts=['/a b']")
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", **({"PMIX_SERVER_TMPDIR": server} if server else {})}
    wrapped = made[made.index("bash") :]
    done = subprocess.run(wrapped, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["exec", *bound, *wrapped[wrapped.index("exec") + 1 :]]
    assert "/a b" in done.stdout


def test_enroot_is_asked_of_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/home/me/job")
    made = inside("enroot", "pmix")
    same = [f"{folder}:{folder}" for folder in ("/data/d.jsonl", "/home/me/job", "/models/m", "/runs", "/scratch")]
    assert made[-3 - len(PROGRAM) - 2 :] == [
        "--container-image=/s/pekoe.sif", f"--container-mounts=/a:/b,{','.join(same)}",
        "--container-workdir=/home/me/job", "/opt/python", "-u", *PROGRAM,
    ]  # fmt: skip


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "4"}
STEP = {**JOB, "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "PMI_RANK": "0"}
RANK_OF_4 = {**STEP, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "PMI_SIZE": "4"}
ALONE = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "PMI_SIZE": "1"}
HYDRA_OF_4 = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize(
    ("launcher", "environ", "expected"),
    [
        ("auto", {}, "local"),
        ("auto", JOB, "srun"),
        ("auto", RANK_OF_4, "join"),
        ("auto", HYDRA_OF_4, "join"),
        ("auto", ALONE, "srun"),
        ("srun", JOB, "srun"),
        ("srun", RANK_OF_4, "join"),
        ("mpiexec", {}, "local"),
        ("mpiexec", JOB, "mpiexec"),
        ("mpiexec", HYDRA_OF_4, "join"),
        ("none", {}, "join"),
        ("none", JOB, "join"),
    ],
)
def test_the_launcher_follows_from_where_we_are(launcher: str, environ: dict[str, str], expected: str) -> None:
    chosen = config(f"cluster.launcher={launcher}", f"allocation={SPLIT}")
    facts = environment.read(environ, host="n1")
    assert choose_launcher(chosen, facts) == expected
    assert choose_launcher(chosen, facts, 4) == expected


def test_alone_in_a_step_and_alone_the_world_is_a_rank_already() -> None:
    assert choose_launcher(config("allocation=hf:d1|fsdp:d1"), environment.read(ALONE, host="n1")) == "join"
    assert choose_launcher(config(), environment.read(ALONE, host="n1"), 1) == "join"


def test_outside_a_job_srun_and_rollout_nodes_are_refused() -> None:
    nowhere = environment.read({}, host="n1")
    with pytest.raises(
        ValueError, match=r"cluster\.launcher: 'srun', but .* no Slurm job; allowed here: auto, mpiexec"
    ):
        choose_launcher(config("cluster.launcher=srun"), nowhere)
    with pytest.raises(ValueError, match=r"cluster\.rollout_nodes: given, but .* no Slurm job; allowed here: null"):
        choose_launcher(config("cluster.rollout_nodes.n_nodes=1"), nowhere)


# What is asked of the machine.


def test_the_mpi_of_the_wheel_talks_pmi2() -> None:
    assert detect_mpi(WHEEL, None) == "pmi2"


@pytest.mark.skipif(not Path(OPENMPI).exists(), reason=f"no Open MPI on this machine ({OPENMPI})")
def test_an_open_mpi_in_its_place_talks_pmix() -> None:
    assert detect_mpi(WHEEL, OPENMPI) == "pmix"


def test_an_mpi_that_does_not_load_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"MPI of .* \(cluster\.slurm\.mpi_library: '/no/libmpi\.so'\) is not known"):
        detect_mpi(WHEEL, "/no/libmpi.so")
    with pytest.raises(ValueError, match=r"cluster\.slurm\.mpi: 'auto', but asking /no/python for its MPI failed"):
        detect_mpi("/no/python", None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions available: pmix_v4,pmix_v5\n",
         ["pmix", "none", "pmi2", "pmix_v4", "pmix_v5"]),
        ("srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: openmpi\n", ["none", "pmi2", "openmpi"]),
        ("srun: error: something else is wrong\n", []),
        ("", []),
    ],
)  # fmt: skip
def test_what_srun_offers_is_read_in_all_its_forms(text: str, expected: list[str]) -> None:
    assert offered_mpi(text) == expected


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/bash\ncat <<'END'\n{text}\nEND\n")
    path.chmod(0o755)
    return str(path)


def test_an_mpi_that_srun_does_not_offer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "srun", "MPI plugin types are...\n\tnone\n\tpmi2")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    check_mpi("pmi2")
    assert choose_mpi(config("cluster.slurm.mpi=pmi2"), "srun") == "pmi2"
    with pytest.raises(ValueError, match=r"cluster\.slurm\.mpi: 'pmix' is not offered .*; allowed: none, pmi2, or"):
        choose_mpi(config("cluster.slurm.mpi=pmix"), "srun")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=r"cluster\.launcher: srun cannot be used here"):
        check_mpi("pmi2")


def test_whose_mpiexec_it_is(tmp_path: Path) -> None:
    assert choose_mpi(config(), "mpiexec", WHEEL) == "hydra"
    assert mpiexec_flavour([program(tmp_path / "a", "mpirun (Open MPI) 4.1.4")]) == "openmpi"
    assert mpiexec_flavour([program(tmp_path / "b", "Intel(R) MPI Library for Linux* OS, Version 2021.9")]) == "hydra"
    with pytest.raises(ValueError, match=r"is no mpiexec that is known here \(aprun 1\); allowed: that of MPICH"):
        mpiexec_flavour([program(tmp_path / "c", "aprun 1")])
    with pytest.raises(ValueError, match=r"cluster\.slurm\.mpiexec: /no/mpiexec --version failed"):
        mpiexec_flavour(["/no/mpiexec"])
