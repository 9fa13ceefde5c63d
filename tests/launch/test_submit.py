"""Submission without a cluster: what is checked first, what Slurm is given, what a second call does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pekoe.launch.attempts import RunDirectoryError
from pekoe.launch.claim import Owner
from pekoe.launch.cli import main
from pekoe.launch.heartbeat_files import write_heartbeat
from pekoe.launch.rollout_arrays import array_jobs, submit_rollout_array
from pekoe.launch.run_jobs import RunJob
from pekoe.launch.slurm_commands import SlurmError
from pekoe.launch.submit import resume, submit
from pekoe.launch.sweeps import read_sweep
from pekoe.pipeline import files
from pekoe.pipeline.config.load import load
from pekoe.pipeline.messages import Heartbeat
from pekoe.pipeline.run_directory import RunDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fake_slurm import FakeSlurm

OUTER = {
    "SLURM_JOB_ID": "4", "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "3", "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_PER_TASK": "2", "PMI_RANK": "1",
}  # fmt: skip


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin", monkeypatch)


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path, sums: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"experiment_name: e\ntrial_name: t\nallocation: hf:d1+fsdp:d1\ntotal_train_steps: 2\n"
        f"cluster: {{fileroot: {tmp_path / 'runs'}, device: cpu, n_nodes: 2, n_gpus_per_node: 1}}\n"
        f"train_dataset: {{type: jsonl, path: {sums}, batch_size: 4}}\n"
        f"actor: {{path: {tiny_model}, dtype: float32}}\ngconfig: {{max_new_tokens: 8, n_samples: 4}}\n"
        f"reward: {{name: gsm8k}}\nrollout_array: {{enabled: true}}\n"
    )
    return path


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_job_submitted_from_inside_a_job_is_its_own(
    slurm: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**OUTER, "SLURM_CONF": "/x/slurm.conf", "SLURM_CLUSTERS": "big"}.items():
        monkeypatch.setenv(name, value)
    (job,) = submit(config)
    given = slurm.environment(1)
    assert not set(OUTER) & set(given)
    assert (given["SLURM_CONF"], given["SLURM_CLUSTERS"]) == ("/x/slurm.conf", "big")
    assert job.job_id == "101"
    assert (job.run.slurm / "101_submitted.pkl").is_file()


def test_the_script_needs_nothing_of_the_submitter(
    slurm: FakeSlurm, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's interpreter finds its pickle, and unpickling finds Pekoe in the run's own code, in an environment that
    is empty but for PATH and what Slurm sets."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    (job,) = submit(config)
    script = slurm.script(1)
    assert script == (job.run.slurm / "101_submission.sh").read_text()
    assert f"--output={job.run.slurm}/%j_0_log.out" in script
    probe = (
        "import pickle, pathlib, pekoe.launch.slurm as s, sys\n"
        f"d = pickle.loads(pathlib.Path({str(job.run.slurm / '101_submitted.pkl')!r}).read_bytes())\n"
        "print(s.__file__, d.function.__qualname__, d.args, sys.path)\n"
    )
    (tmp_path / "probe.py").write_text(probe)
    changed = script.replace("-m submitit.core._submit", str(tmp_path / "probe.py"))
    (tmp_path / "job.sh").write_text(changed)
    done = subprocess.run(
        ["bash", str(tmp_path / "job.sh")], env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "101"}, cwd="/",
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{job.run.code}/pekoe/launch/slurm.py run_submitted ('{job.run.path}',")
    assert str(tmp_path / "mine") in done.stdout


@pytest.mark.parametrize("arguments", [[], ["--sweep", "actor.optimizer.lr=1e-6,3e-6"], ["--seeds", "1,2"]])
def test_a_dry_run_prints_the_script_and_touches_nothing(
    slurm: FakeSlurm, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    before = everything(tmp_path)
    assert main(["submit", str(config), "--dry-run", *arguments]) == 0
    shown = capsys.readouterr().out
    assert everything(tmp_path) == before
    assert slurm.num_calls == 0
    assert main(["submit", str(config), *arguments]) == 0
    assert slurm.script(1) == shown
    assert ("--array=0-1\n" in shown) is bool(arguments)


def test_help_and_dry_run_import_nothing_heavy(config: Path) -> None:
    program = (
        "import sys, pekoe.launch.cli as cli\n"
        f"code = cli.main(['submit', {str(config)!r}, '--dry-run', '--sweep', 'seed=1,2'])\n"
        "heavy = {'torch', 'vllm', 'mpi4py', 'transformers', 'numpy', 'h5py', 'submitit'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "ours = sum(name.startswith('pekoe.') for name in sys.modules)\n"
        "assert ours < 110, ours\n"
        "assert len(sys.modules) < 900, len(sys.modules)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["actor.path=/nowhere"], "/nowhere"),
        (["--sweep", "actor.optimizer.lr=1e-6,fast"], "fast"),
        (["--sweep", "actor.optimizer.lr"], "allowed: key=value1,value2"),
        (["--sweep", "cluster.slurm.mem=1G,2G"], "needs another job"),
        (["--sweep", "trial_name=a,b"], "trial_name cannot be swept"),
        (["--seeds", "1,x"], "whole numbers"),
        (["--seeds", "1,2", "--limit", "0"], "allowed: >= 1"),
        (["--array", "0-3"], "belongs to --rollout-array"),
        (["--cluster", "nowhere"], "nowhere"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    slurm: FakeSlurm, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["submit", str(config), *arguments]) == 78
    assert words in capsys.readouterr().err
    assert slurm.num_calls == 0
    assert not (tmp_path / "runs").exists()


def test_settings_may_stand_behind_flags(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", str(config), "--dry-run", "trial_name=other", "--limit", "2", "seed=3"]) == 0
    assert "/e/other/slurm" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["submit", str(config), "--dry-run", "other"])
    with pytest.raises(SystemExit):
        main(["report", str(config), "seed=3"])


def test_a_refused_job_leaves_a_run_that_can_be_submitted_again(slurm: FakeSlurm, config: Path) -> None:
    slurm.refuse_call(1)
    with pytest.raises(SlurmError, match="QOSMaxSubmitJobPerUserLimit"):
        submit(config)
    (job,) = submit(config)
    assert job.job_id == "102"
    assert len(list(job.run.slurm.glob("*.pkl"))) == 1


def test_a_run_that_waits_is_not_submitted_twice(slurm: FakeSlurm, config: Path) -> None:
    (job,) = submit(config)
    slurm.command("squeue", "echo '101|PENDING||Priority'")
    for again in (lambda: submit(config), lambda: resume(job.run)):
        with pytest.raises(RunDirectoryError, match=r"submitted already, as job 101.*pekoe cancel"):
            again()
    assert slurm.num_calls == 1
    next_job = resume(job.run, after="101")
    assert (next_job.job_id, next_job.entry.job_id) == ("102", "101"), "the first that has not ended counts"
    assert RunJob.of(job.run).job_id == "101"
    assert "--dependency=afterany:101" in slurm.script(2)


def test_a_run_whose_job_has_just_died_is_resumed_at_once(slurm: FakeSlurm, config: Path) -> None:
    """Heartbeats of its ranks are young still; it is Slurm that says whether the job lives."""
    (job,) = submit(config)
    files.make_folder(job.run.heartbeats)
    write_heartbeat(job.run, 0, Heartbeat(0, "trainer", "n1", 4711, 1, "training", 0.0, 3))
    files.make_folder(job.run.path / "claims")
    owner = Owner("n1", 4710, 0.0, 0.0, "77", 0)
    files.write_json(job.run.path / "claims" / "0.json", asdict(owner))
    slurm.command("squeue", "echo '101|FAILED||'; echo '77|RUNNING||'")
    with pytest.raises(RunDirectoryError, match=r"being run by job 77.*pekoe cancel"):
        resume(job.run)
    slurm.command("squeue", "echo '101|FAILED||'; echo '77|FAILED||'")
    assert resume(job.run).run == job.run
    assert slurm.num_calls == 2


def test_a_sweep_goes_on_where_slurm_refused(slurm: FakeSlurm, config: Path, tmp_path: Path) -> None:
    slurm.refuse_call(1)
    sweep: dict[str, list[Any]] = {"actor.optimizer.lr": [1e-6, 3e-6]}
    with pytest.raises(SlurmError, match="0 of 4 elements"):
        submit(config, sweep=sweep, seeds=[1, 2])
    jobs = submit(config, sweep=sweep, seeds=[1, 2])
    assert [job.job_id for job in jobs] == ["102_0", "102_1", "102_2", "102_3"]
    assert [job.job_id for job in submit(config, sweep=sweep, seeds=[1, 2])] == [job.job_id for job in jobs]
    assert slurm.num_calls == 2
    more = submit(config, sweep={"actor.optimizer.lr": [1e-6, 3e-6]}, seeds=[1, 2, 3])
    assert [job.job_id for job in more] == ["102_0", "102_1", "103_0", "102_2", "102_3", "103_1"]
    assert "--array=0-1\n" in slurm.script(3)
    for job, lr, seed in zip(jobs, (1e-6, 1e-6, 3e-6, 3e-6), (1, 2, 1, 2), strict=True):
        own = load(job.run.config)
        assert (own.actor.optimizer.lr, own.seed, own.trial_name) == (lr, seed, job.run.path.name)
        assert RunJob.of(job.run.path).job_id == job.job_id
    assert json.loads(jobs[0].run.run_json.read_text())["attempts"] == []
    stored = read_sweep(tmp_path / "runs" / "e" / "sweeps" / "t")
    assert stored is not None
    assert len(stored.elements) == 6
    with pytest.raises(RunDirectoryError, match=r"another configuration \(total_train_steps differ\)"):
        submit(config, ["total_train_steps=3"], sweep=sweep)


def test_an_array_of_worlds_that_attach(slurm: FakeSlurm, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = submit(config)
    run = job.run
    command = ["submit", "--rollout-array", str(run.path), "--array", "0-15%4", "allocation=hf:d1", "cluster.n_nodes=1"]
    assert main([*command, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "#SBATCH --array=0-15%4\n" in shown
    assert "#SBATCH --nodes=1\n" in shown
    assert f"attach {run.path} allocation=hf:d1 cluster.n_nodes=1\n" in shown
    assert f"--output={run.slurm}/attach-%A_%a.log" in shown
    assert main(command) == 0
    assert slurm.script(2) == shown == (run.slurm / "102_attach.sh").read_text()
    assert main(["submit", "--rollout-array", str(run.path)]) == 78
    assert main([*command[:4], "4-", "allocation=hf:d1"]) == 78
    assert main([*command, "seed=2"]) == 78
    assert "seed: an attached world samples as its run does" in capsys.readouterr().err
    with pytest.raises(ValueError, match="position"):
        submit_rollout_array(run, "0-1", ["allocation=hf:x1"])
    assert slurm.num_calls == 2


def test_arrays_that_are_submitted_at_once_are_all_known(slurm: FakeSlurm, config: Path) -> None:
    (job,) = submit(config)
    slurm.command("sbatch", "sleep 0.$((RANDOM % 3)); echo Submitted batch job $$")
    gate, given = threading.Barrier(6), []

    def work() -> None:
        gate.wait(60)
        given.append(submit_rollout_array(job.run, "0-1", ["allocation=hf:d1", "cluster.n_nodes=1"]))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    lines = "; ".join(f"echo '{one}_[0-1]|PENDING||'" for one in given)
    slurm.command("squeue", lines)
    assert sorted(array_jobs(job.run)) == sorted(given)
    assert len(set(given)) == 6


def test_without_slurm_there_is_nothing_to_say_of_a_run_that_was_not_submitted(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.config.write_text("{}\n")
    with pytest.raises(RunDirectoryError, match="has had no job"):
        RunJob.of(run)
    assert main(["cancel", str(tmp_path)]) == 78
    assert main(["logs", str(tmp_path)]) == 0
    assert main(["logs", str(tmp_path), "--attempt", "2"]) == 78
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_defaults_of_a_profile_hold_where_the_script_is_silent() -> None:
    from pekoe.launch.sbatch import submission_environment

    environ = {"SBATCH_ACCOUNT": "mine", "SBATCH_PARTITION": "other", "SLURM_JOB_ID": "7", "SBATCH_EXPORT": "NONE"}
    script = "#!/bin/bash\n#SBATCH --partition=low\n#SBATCH --nodes=1\n"
    assert submission_environment({**environ, "HOME": "/home/me"}, script) == {
        "HOME": "/home/me", "SBATCH_ACCOUNT": "mine",
    }  # fmt: skip
