"""The text given to sbatch: whole scripts against golden files, every key, and what a shell does with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pekoe.launch.allocation import parse
from pekoe.launch.batch_script import BatchJob, allocation_problem, batch_script
from pekoe.launch.placement import Part, Placement
from pekoe.pipeline.config.load import from_yaml_text, site_names
from pekoe.pipeline.config.run import RunConfig

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).resolve().parent / "golden"
JOB = BatchJob("grpo-first", ("/opt/pekoe/bin/python", "-m", "driver", "/runs/my run"), "/runs/grpo/%j.log")
SPLIT = "hf:d2+fsdp:d2"
TWO_NODES = ["cluster.device=cuda", "cluster.n_nodes=2", "cluster.n_gpus_per_node=2"]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Golden files name one interpreter, whoever runs the tests."""
    monkeypatch.setattr(sys, "executable", "/opt/pekoe/bin/python")


def config(*overrides: str) -> RunConfig:
    return from_yaml_text("", [*TWO_NODES, *overrides])


def script(*overrides: str, job: BatchJob = JOB, allocation: str = SPLIT) -> str:
    return batch_script(job, config(*overrides), parse(allocation), {"HOME": "/home/me"})


def flags(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.parametrize("site", site_names())
def test_every_site_gives_its_golden_script(site: str) -> None:
    nodes = "cluster.n_nodes=1" if site == "laptop" else "cluster.n_nodes=2"
    own = ["cluster.slurm.gres="] if site == "laptop" else []
    made = batch_script(JOB, from_yaml_text("", [f"cluster.site={site}", nodes, *own]), parse(SPLIT), {})
    assert made == (GOLDEN / f"{site}.sbatch").read_text()


def test_all_keys_at_once_give_the_golden_script() -> None:
    made = script(
        "cluster.slurm.partition=gpu,low", "cluster.slurm.account=me", "cluster.slurm.qos=long",
        "cluster.slurm.constraint='a100&ib'", "cluster.slurm.reservation=maintenance", "cluster.slurm.nodelist=n[1-2]",
        "cluster.slurm.exclude=n7", "cluster.slurm.gres=gpu:a100", "cluster.slurm.exclusive=true",
        "cluster.slurm.mem=200G", "cluster.slurm.cpus_per_task=8", "cluster.slurm.signal_seconds=300",
        "cluster.slurm.extra=['--mail-type=END,FAIL', '--comment=two words']", "cluster.time_limit='1-12:00:00'",
        "cluster.continue_by=requeue", "cluster.restart_in_place=1", "cluster.spare_nodes=1",
        "cluster.slurm.setup=['module purge', 'module load openmpi/4.1']",
        "cluster.slurm.environment={NCCL_SOCKET_IFNAME: ib0, NOTE: \"it's two words\"}",
        job=BatchJob(JOB.name, JOB.command, JOB.output, array="0-15%4", dependency="afterany:7"),
    )  # fmt: skip
    assert made == (GOLDEN / "all_keys.sbatch").read_text()


def test_rollout_nodes_make_a_heterogeneous_job() -> None:
    made = script(
        "cluster.n_nodes=1", "cluster.rollout_nodes.n_nodes=2", "cluster.rollout_nodes.n_gpus_per_node=4",
        "cluster.rollout_nodes.partition=l40", "cluster.rollout_nodes.gres=gpu:l40", "cluster.rollout_nodes.mem=64G",
        "cluster.rollout_nodes.cpus_per_task=4", "cluster.rollout_nodes.constraint=pcie",
        "cluster.rollout_nodes.extra=['--switches=1']", "cluster.slurm.partition=h100",
        "cluster.slurm.cpus_per_task=16",
        "cluster.slurm.nodelist=big1", "cluster.slurm.account=me", allocation="hf:d8+fsdp:d2",
    )  # fmt: skip
    assert made == (GOLDEN / "heterogeneous.sbatch").read_text()


def test_an_array_of_a_heterogeneous_job_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cluster\.rollout_nodes: .*no arrays \(0-3\).*allowed: null"):
        script("cluster.n_nodes=1", "cluster.rollout_nodes.n_nodes=1", job=BatchJob("j", ("x",), "o", array="0-3"))


@pytest.mark.parametrize(
    ("overrides", "present", "absent"),
    [
        ([], ["--gres=gpu:2", "--no-requeue", "--ntasks-per-node=2"], "--time"),
        (["cluster.device=npu"], ["--gres=npu:2"], "gpu"),
        (["cluster.device=cpu"], ["--nodes=2"], "--gres"),
        (["cluster.slurm.gres="], ["--nodes=2"], "--gres"),
        (["cluster.device=auto", "cluster.slurm.gres=npu:910b"], ["--gres=npu:910b:2"], "gpu"),
        (["cluster.continue_by=chain"], ["--no-requeue"], "--requeue "),
        (["cluster.continue_by=requeue"], ["--requeue"], "--no-requeue"),
        (["cluster.time_limit=auto"], ["--open-mode=append"], "--time"),
        (["cluster.time_limit=null"], ["--signal=B:USR2@120"], "--time"),
        (["cluster.time_limit=90"], ["--time=90"], "--exclusive"),
        (["cluster.spare_nodes=2", "cluster.restart_in_place=1"], ["--nodes=4", "--no-kill"], "--mem"),
        (["cluster.restart_in_place=1"], ["--nodes=2"], "--no-kill"),
    ],
)
def test_keys_become_flags(overrides: list[str], present: list[str], absent: str) -> None:
    found = flags(script(*overrides))
    assert set(present) <= set(found)
    assert not [flag for flag in found if f"{flag} ".startswith(absent) or absent in flag.split("=")]


def test_a_device_that_nobody_has_named_is_not_guessed() -> None:
    with pytest.raises(ValueError, match=r"cluster\.device: 'auto'.*allowed: cpu, cuda or npu, or auto with"):
        script("cluster.device=auto")


def test_a_world_of_rollout_ranks_alone_has_a_script_too() -> None:
    part = Part("hf", "rollout", parse("hf:d2+fsdp:d1").parts[1].dimensions, ranks=(0, 1))
    attached = BatchJob("serve", ("/opt/pekoe/bin/pekoe", "attach", "/runs/r"), "/runs/r/%A_%a.log", array="0-15%4")
    made = batch_script(attached, config("cluster.n_nodes=1"), Placement((part,)), {})
    assert {"--array=0-15%4", "--nodes=1", "--ntasks-per-node=2"} <= set(flags(made))
    assert made.endswith("exec /opt/pekoe/bin/pekoe attach /runs/r\n")


# What a shell does with it. sbatch copies the script, sends B:USR2 to the shell's pid, and takes its exit code.

STUB = """
import os, signal, sys, time
def heard(number, frame):
    print("heard", signal.Signals(number).name, flush=True)
    sys.exit(75)
signal.signal(signal.SIGUSR2, heard)
print("pid", os.getpid(), flush=True)
time.sleep(20)
"""


def start(path: Path, log: Path, environ: dict[str, str], *arguments: str) -> subprocess.Popen[bytes]:
    """As slurmd does: standard output goes to the job's log, opened as the script's own line says."""
    mode = "ab" if "--open-mode=append" in flags(path.read_text()) else "wb"
    with log.open(mode) as out:
        return subprocess.Popen(["bash", str(path), *arguments], env=environ, stdout=out, stderr=subprocess.STDOUT)


def end_by_signal(shell: subprocess.Popen[bytes], log: Path, times: int) -> int:
    """USR2 to the shell as soon as the stub runs for the `times`-th time; the exit code."""
    end = time.monotonic() + 10
    try:
        while log.read_text().count("pid ") < times and time.monotonic() < end:
            time.sleep(0.01)
        shell.send_signal(signal.SIGUSR2)
        return shell.wait(60)
    finally:
        shell.kill()


def check_signal_and_logs(path: Path, log: Path, environ: dict[str, str], *arguments: str) -> None:
    for times in (1, 2):
        shell = start(path, log, environ, *arguments)
        assert end_by_signal(shell, log, times) == 75
        assert f"pid {shell.pid}\n" in log.read_text()
    assert log.read_text().count("heard SIGUSR2") == 2


def test_the_signal_to_the_shell_reaches_the_driver_and_logs_of_both_starts_stay(tmp_path: Path) -> None:
    (tmp_path / "stub.py").write_text(STUB)
    job = BatchJob("j", (str(Path(sys.prefix) / "bin" / "python"), str(tmp_path / "stub.py")), str(tmp_path / "log"))
    for number, own in enumerate(([], ["cluster.slurm.setup=['true', 'export SITE=1', 'false']"])):
        path = tmp_path / f"job-{number}.sh"
        path.write_text(script(*own, job=job))
        check_signal_and_logs(path, tmp_path / f"log-{number}", dict(os.environ))


def test_train_sbatch_becomes_pekoe_too(tmp_path: Path) -> None:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "stub.py").write_text(f"import sys\nprint(sys.argv[1:])\n{STUB}")
    python = Path(sys.prefix) / "bin" / "python"
    (tmp_path / "venv" / "bin" / "python").symlink_to(python)
    pekoe = tmp_path / "venv" / "bin" / "pekoe"
    pekoe.write_text(f'#!/bin/bash\nexec {python} {tmp_path}/stub.py "$@"\n')
    pekoe.chmod(0o755)
    environ = {"PATH": "/usr/bin:/bin", "PEKOE_VENV": str(tmp_path / "venv"), "SLURM_SUBMIT_DIR": str(tmp_path)}
    log = tmp_path / "log"
    check_signal_and_logs(ROOT / "scripts" / "train.sbatch", log, environ, "my config.yaml", "seed=3")
    assert "['run', 'my config.yaml', 'seed=3']" in log.read_text()


def test_train_sbatch_without_a_virtual_environment_says_what_to_set(tmp_path: Path) -> None:
    environ = {"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "train.sbatch"), "c.yaml"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 78
    assert "set PEKOE_VENV" in done.stderr


def test_train_sbatch_finds_the_environment_of_the_checkout_it_is_submitted_from(tmp_path: Path) -> None:
    for folder in ("scripts", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "scripts" / "train.sbatch").write_text("")
    for name in ("python", "pekoe"):
        program = tmp_path / ".venv" / "bin" / name
        program.write_text(f'#!/bin/bash\necho {name} "$@"\n')
        program.chmod(0o755)
    environ = {"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "train.sbatch"), "--resume", "RUN"], env=environ, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "pekoe run --resume RUN\n"


@pytest.mark.parametrize("code", [0, 1, 75, 78])
def test_the_exit_code_of_the_driver_is_that_of_the_job(tmp_path: Path, code: int) -> None:
    (tmp_path / "job.sh").write_text(script(job=BatchJob("j", ("bash", "-c", f"exit {code}"), "o")))
    assert subprocess.run(["bash", str(tmp_path / "job.sh")], timeout=60, check=False).returncode == code


def test_a_driver_that_cannot_start_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(script(job=BatchJob("j", ("/no/such/python",), "o")))
    done = subprocess.run(["bash", str(tmp_path / "job.sh")], timeout=60, capture_output=True, check=False)
    assert done.returncode == 127


FAKE_SRUN = """#!/bin/bash
# Applies the site's rule of export, unless the command line says otherwise; starts the program once.
rule=${SLURM_EXPORT_ENV:-ALL}
while [[ $1 == --* ]]; do [[ $1 == --export=* ]] && rule=${1#--export=}; shift; done
[ "$rule" = ALL ] && exec "$@"
exec env -i PATH="$PATH" "$@"
"""
DRIVER = """
import os, subprocess, sys
from pekoe.launch.allocation import parse
from pekoe.launch.step_command import Step, step_command
from pekoe.pipeline.config.load import from_yaml_text
config = from_yaml_text("", ["cluster.device=cpu", "cluster.slurm.environment={NCCL_DEBUG: two words}"])
rank = "import os, my_rewards, pekoe.launch.environment as e; print(*(os.environ.get(n) for n in sys.argv[1:]))"
step = Step(("-c", "import sys; " + rank, "NCCL_DEBUG", "HOME", "SLURM_EXPORT_ENV"), 2)
sys.exit(subprocess.run(step_command(step, config, parse("hf:d1+fsdp:d1"), "pmi2")).returncode)
"""


def test_nothing_is_inherited_and_nothing_is_missing(tmp_path: Path) -> None:
    """A site, or a job around this one, exports PATH alone: interpreter, packages and variables are in the script."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(FAKE_SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "my_rewards.py").write_text("")
    (tmp_path / "driver.py").write_text(DRIVER)
    job = BatchJob("j", (str(Path(sys.prefix) / "bin" / "python"), str(tmp_path / "driver.py")), "o")
    environ = {"HOME": "/home/me", "PYTHONPATH": f"{tmp_path}/modules"}
    settings = config("cluster.slurm.environment={NCCL_DEBUG: two words}")
    (tmp_path / "job.sh").write_text(batch_script(job, settings, parse(SPLIT), environ))
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    for inherited in ({"PATH": path, "SLURM_EXPORT_ENV": "PATH"}, {"PATH": path, "SLURM_EXPORT_ENV": "NONE"}):
        done = subprocess.run(
            ["bash", str(tmp_path / "job.sh")], env=inherited, cwd="/", capture_output=True, text=True, timeout=90
        )
        assert (done.returncode, done.stdout) == (0, "two words /home/me None\n"), done.stderr


def test_what_the_set_up_of_the_site_puts_on_a_path_stays(tmp_path: Path) -> None:
    """CANN's set_env.sh needs its own folders on PYTHONPATH; modules need theirs on PATH."""
    job = BatchJob("j", ("bash", "-c", "echo $PYTHONPATH; echo $PATH"), "o")
    lines = "cluster.slurm.setup=['export PYTHONPATH=/cann', 'export PATH=/mpi/bin:$PATH']"
    environ = {"PYTHONPATH": "/runs/r/code:/my modules"}
    (tmp_path / "job.sh").write_text(batch_script(job, config(lines), parse(SPLIT), environ))
    found = subprocess.run(
        ["bash", str(tmp_path / "job.sh")], env={"PATH": "/bin"}, capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.splitlines() == ["/runs/r/code:/my modules:/cann", "/opt/pekoe/bin:/mpi/bin:/bin"]


# The allocation that a driver finds itself in.


@pytest.mark.parametrize(
    ("nodes", "cores", "components", "words"),
    [
        (2, None, 1, []),
        (2, 16, 1, []),
        (3, 64, 1, []),
        (1, 16, 1, ["1 node(s), 2 are needed"]),
        (2, 15, 1, ["15 core(s) on a node, 2 rank(s) of 8 cores (cluster.slurm.cpus_per_task) need 16"]),
        (1, 1, 1, ["1 node(s)", "1 core(s)"]),
        (2, 16, 2, ["2 component(s), an ordinary job is needed"]),
    ],
)
def test_an_allocation_that_does_not_fit_names_the_flags(
    nodes: int, cores: int | None, components: int, words: list[str]
) -> None:
    text = allocation_problem(config("cluster.slurm.cpus_per_task=8"), parse(SPLIT), nodes, cores, components)
    assert bool(text) == bool(words)
    for word in words:
        assert word in text
    if words:
        assert "sbatch --nodes=2 --ntasks-per-node=2 --cpus-per-task=8 --gres=gpu:2 …" in text


def test_a_heterogeneous_world_asks_for_both_kinds_of_nodes() -> None:
    both = config("cluster.n_nodes=1", "cluster.rollout_nodes.n_nodes=2", "cluster.rollout_nodes.partition=small")
    text = allocation_problem(both, parse(SPLIT), 1, None, 1)
    assert "2 components" in text
    assert "sbatch --nodes=1 --ntasks-per-node=2 --gres=gpu:2 : --nodes=2 --ntasks-per-node=1 --gres=gpu:1" in text
    assert "--partition=small" in text
    assert allocation_problem(both, parse(SPLIT), 1, None, 2) == ""
