"""Variables of a rank: defaults, caches on a local disk, torch's variables only where a rank trains."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pekoe.launch import rank_environment
from pekoe.launch.environment import read

FACTS = read({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, "h")


def test_defaults_do_not_touch_what_the_user_set(tmp_path: Path) -> None:
    user = {"TRITON_CACHE_DIR": "/mine", "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "7"}
    variables = rank_environment.rank_variables(user, FACTS, None, tmp_path)
    assert {name: variables[name] for name in user} == user
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert variables["VLLM_CACHE_ROOT"] == str(tmp_path / "vllm")
    assert variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    assert rank_environment.rank_variables({}, FACTS, None, tmp_path)["HF_HUB_OFFLINE"] == "1"


def test_configured_threads_win(tmp_path: Path) -> None:
    variables = rank_environment.rank_variables({"OMP_NUM_THREADS": "7"}, FACTS, 3, tmp_path)
    assert variables["OMP_NUM_THREADS"] == "3"
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert rank_environment.rank_variables({}, FACTS, None, tmp_path)["OMP_NUM_THREADS"] == str(share)


def test_only_ranks_that_train_alone_see_torch_variables(tmp_path: Path) -> None:
    inherited = {"RANK": "9", "WORLD_SIZE": "99", "MASTER_ADDR": "x", "MASTER_PORT": "1", "HOME": "/h"}
    stripped = rank_environment.rank_variables(inherited, FACTS, None, tmp_path)
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"} & set(stripped)
    assert stripped["HOME"] == "/h"
    trainers, rollouts = (0, 1), (2, 3)
    exported = [rank_environment.trainer_variables(rank, trainers, rollouts, rank) for rank in range(4)]
    assert exported[1] == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert exported[2] == exported[3] == {}
    assert rank_environment.trainer_variables(0, (0, 1), (0, 1), 0) == {}


def test_apply_makes_the_environment_equal() -> None:
    environ = {"a": "1", "gone": "2"}
    rank_environment.apply(environ, {"a": "3", "new": "4"})
    assert environ == {"a": "3", "new": "4"}


def test_cache_is_of_the_job_and_falls_back(tmp_path: Path) -> None:
    in_array = read({"SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3"}, "h")
    (tmp_path / "ok").mkdir()
    (tmp_path / "file").write_text("not a folder")
    environ = {"SLURM_TMPDIR": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "ok")}
    cache = rank_environment.node_local_cache(environ, in_array)
    assert cache.parent == tmp_path / "ok"
    assert cache.name.endswith("10_3")
    assert rank_environment.node_local_cache(environ, in_array) == cache


def test_no_place_for_caches_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OSError, match="set TMPDIR"):
        rank_environment.node_local_cache({"TMPDIR": str(tmp_path)}, FACTS)


def test_open_files_are_raised() -> None:
    hard = rank_environment.raise_open_files()
    import resource

    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
