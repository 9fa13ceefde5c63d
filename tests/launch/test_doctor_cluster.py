"""`pekoe doctor CLUSTER` with real worlds on this machine: all well, and with a filesystem or launcher that is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from doctor_report import Examined

PROGRAM = """
import sys
from pekoe.launch.doctor.doctor import diagnose_cluster
text, code = diagnose_cluster(sys.argv[1] or None, config=sys.argv[2] or None, as_json=True)
heavy = {'torch', 'mpi4py', 'transformers'} & set(sys.modules)
assert not heavy, heavy
print(text)
sys.exit(code)
"""


def examine(fileroot: Path, config: str = "", site: str = "", **variables: str) -> Examined:
    """In a folder of its own; PATH hides a Slurm that may be on this machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PMI", "OMPI"))}
    environ = {**kept, "PATH": str(Path(sys.executable).parent), **variables}
    site = site or str(write_site(fileroot.parent / "site.yaml", fileroot=str(fileroot)))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, site, config], env=environ, capture_output=True, text=True, timeout=90,
        cwd=fileroot.parent,
    )  # fmt: skip
    return Examined(done.stdout or done.stderr, done.returncode)


def write_site(path: Path, **cluster: Any) -> Path:
    lines = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in cluster.items())
    path.write_text(f"cluster:\n  launcher: mpiexec\n  device: cpu\n  n_gpus_per_node: 2\n{lines}")
    return path


def test_all_is_well_here_and_nothing_stays(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    found = examine(root)
    assert found.problems == []
    assert found.code == 0
    assert "one world after" in found.find("world", "2 ranks on 1 node by mpiexec")["text"]
    found.find("mpi", "mpi4py loads MPICH")
    found.find("versions", "torch is built for cpu")
    found.find("shared filesystem", "rename is atomic")
    found.find("shared filesystem", "have exactly one winner")
    found.find("shared filesystem", "a shard (HDF5, locking off)")
    found.find("network", "by lo (127.0.0.1)")
    assert list(root.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "site.yaml"]


NO_LOCKS = """
#include <errno.h>
#include <fcntl.h>
int flock(int descriptor, int operation) { (void)descriptor; (void)operation; errno = ENOLCK; return -1; }
"""


def test_locks_that_are_refused_are_no_problem(tmp_path: Path) -> None:
    source, library, root = (tmp_path / name for name in ("flock.c", "flock.so", "runs"))
    root.mkdir()
    source.write_text(NO_LOCKS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    found = examine(root, LD_PRELOAD=str(library))
    assert found.code == 0
    locks = found.find("shared filesystem", "locks between ranks: flock ENOLCK")
    assert locks["severity"] == "note"
    assert "fcntl excludes" in locks["text"]
    found.find("shared filesystem", "a shard (HDF5, locking off) written by one rank is verified by the other")


def test_ranks_that_find_no_world_say_so(tmp_path: Path) -> None:
    """As under `srun --mpi=none`: the process manager counts two, MPI counts one."""
    from pekoe.launch.doctor.rank_probe import heard

    spec = json.dumps({"num_ranks": 2, "fileroot": str(tmp_path), "folder": ".t", "device": "cpu"})
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PMI", "OMPI"))}
    step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        [sys.executable, "-m", "pekoe.launch.doctor.rank_probe", spec], env={**kept, **step}, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    said = [one for line in done.stdout.splitlines() if (one := heard(line))]
    assert done.returncode == 0, done.stderr
    assert len(said) == 1
    assert "MPI found a world of 1 ranks but srun started 2" in said[0].alone


RUN = """
experiment_name: doctor
trial_name: one
allocation: hf:d1+fsdp:d1
total_train_steps: 2
cluster: {{device: cpu, launcher: mpiexec, fileroot: {root}}}
actor: {{path: {model}, dtype: float32}}
gconfig: {{n_samples: 2, max_new_tokens: 4}}
train_dataset: {{type: jsonl, path: {data}, batch_size: 2}}
reward: {{name: gsm8k}}
"""


def test_models_and_data_of_a_run(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    from pekoe.launch.doctor import model_check
    from pekoe.pipeline.config.load import load

    whole = tmp_path / "whole.yaml"
    whole.write_text(RUN.format(root=tmp_path, model=tiny_model, data=sums))
    texts = [(one.severity, one.text) for one in model_check.judge(load(whole))]
    assert ("ok", f"model {tiny_model}: every file is there") in texts
    assert any(text.startswith("disk: ") for _, text in texts)
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_model.iterdir():
        (model / path.name).symlink_to(path)
    (model / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model-1.safetensors").symlink_to(tmp_path / "gone")
    broken = tmp_path / "broken.yaml"
    broken.write_text(RUN.format(root=tmp_path, model=model, data=tmp_path / "nothing.jsonl"))
    found = model_check.judge(load(broken))
    problems = [one for one in found if one.severity == "problem"]
    assert len(problems) == 2
    assert "model-1.safetensors (a symbolic link to nothing) and 1 more of its 2 shards" in problems[0].text
    assert "nothing is downloaded" in problems[0].next_step
    assert "train_dataset.path" in problems[1].text


def script(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\n{textwrap.dedent(body)}")
    path.chmod(0o755)
    return path


def test_no_scontrol_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pekoe.launch.doctor import slurm_check
    from pekoe.pipeline.config.load import from_yaml_text

    tools = tmp_path / "tools"
    script(tools, "srun", 'echo "slurm 24.05.1"')
    for name in ("sbatch", "squeue", "scancel"):
        script(tools, name, "exit 0")
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin-without-slurm:/bin-without-slurm")
    (tools / "bash").symlink_to("/bin/bash")
    found = slurm_check.judge(slurm_check.measure(), from_yaml_text("", ["cluster.continue_by=requeue"]), True)
    assert [one.severity for one in found] == ["note"]
    assert "Slurm 24.05.1; scontrol is not here" in found[0].text
    assert "chain does not" in found[0].next_step


def test_who_holds_a_device_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pekoe.launch.doctor import device_check

    holder = subprocess.Popen(["sleep", "60"])
    try:
        tools = tmp_path / "tools"
        script(
            tools, "nvidia-smi",
            f"""
            case $1 in
              --query-gpu=*) echo '0, GPU-aa, NVIDIA H100 80GB HBM3, 81559, 20000'
                             echo '1, GPU-bb, NVIDIA H100 80GB HBM3, 81559, 81000' ;;
              *) echo 'GPU-aa, {holder.pid}, /usr/bin/python, 61000' ;;
            esac
            """,
        )  # fmt: skip
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        facts = device_check.measure("n1")
    finally:
        holder.kill()
        holder.wait()
    assert facts.error == ""
    visible = device_check.RankDevice("CUDA_VISIBLE_DEVICES", ["0", "1"], "0")
    found = device_check.judge([facts], [("n1", visible)], [("n1", "cuda", 2)], "cuda", 2)
    held = [one for one in found if "pid" in one.text]
    assert len(held) == 1
    assert "device 0 (NVIDIA H100 80GB HBM3): 19.5 GiB of 79.6 GiB free" in held[0].text
    assert f"pid {holder.pid} (/usr/bin/python, " in held[0].text
    assert f"kill {holder.pid}" in held[0].next_step
    assert any(one.severity == "ok" and "device 1" in one.text for one in found)
