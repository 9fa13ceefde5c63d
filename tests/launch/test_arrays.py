"""Sweeps: their elements and names; arrays larger than a cluster takes; a submission that goes on where it stopped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission

from pekoe.launch import submitted_jobs
from pekoe.launch.arrays import submit_rest
from pekoe.launch.attempts import RunDirectoryError
from pekoe.launch.cli import main
from pekoe.launch.slurm_commands import SlurmError
from pekoe.launch.sweeps import (
    Element,
    array_text,
    check_array_text,
    open_sweep,
    parse_sweep,
    plan_elements,
    read_sweep,
)
from pekoe.pipeline import files
from pekoe.pipeline.run_directory import RunDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fake_slurm import FakeSlurm


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin", monkeypatch)


def elements(folder: Path, count: int) -> list[Element]:
    return [Element(f"e{number}", (f"seed={number}",), str(folder / f"e{number}")) for number in range(count)]


def test_4200_elements_are_five_arrays_and_a_refused_one_is_all_that_is_submitted_again(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    slurm.refuse_call(3)
    sweep = open_sweep(tmp_path / "sweep", {"seed": 1}, elements(tmp_path, 4200))
    sizes: list[int | None] = []

    def script(num_elements: int | None) -> str:
        sizes.append(num_elements)
        return f"#!/bin/sh\n#SBATCH --array={array_text(num_elements or 1, None)}\n"

    with pytest.raises(SlurmError, match=r"2002 of 4200 elements .*QOSMaxSubmitJobPerUserLimit.* the other 2198"):
        submit_rest(sweep, script)
    stopped = read_sweep(tmp_path / "sweep")
    assert stopped is not None
    assert len(stopped.rest) == 2198
    assert slurm.num_calls == 3

    slurm.refuse_call(0)
    again = open_sweep(tmp_path / "sweep", {"seed": 1}, elements(tmp_path, 4200))
    done = submit_rest(again, script)
    assert slurm.num_calls == 6
    assert sizes == [1001, 1001, 1001, 1001, 1001, 196]
    assert "--array=0-1000" in slurm.script(1)
    assert "--array=0-195" in slurm.script(6)
    jobs = [one.job_id for one in done.elements]
    assert len(set(jobs)) == 4200
    assert (jobs[0], jobs[1001], jobs[2002], jobs[4199]) == ("101_0", "102_0", "104_0", "106_195")
    assert read_sweep(tmp_path / "sweep") == done
    assert submit_rest(done, script) == done
    assert slurm.num_calls == 6
    for index in (0, 1001, 2001, 2002, 4199):
        pickle = tmp_path / "sweep" / "slurm" / f"{jobs[index]}_submitted.pkl"
        assert DelayedSubmission.load(pickle).args == (done.elements[index].run,)
    assert len(list((tmp_path / "sweep" / "slurm").glob("*.pkl"))) == 4200, "the refused ones are gone"


def test_a_limit_holds_over_several_arrays(slurm: FakeSlurm, tmp_path: Path) -> None:
    sweep = open_sweep(tmp_path / "sweep", {}, elements(tmp_path, 5))
    submit_rest(sweep, lambda count: f"{count}", limit=1, most=2)
    assert [slurm.arguments(call).split()[:-1] for call in (1, 2, 3)] == [
        [], ["--dependency=afterany:101"], ["--dependency=afterany:102"],
    ]  # fmt: skip


def test_an_element_knows_its_job_by_its_run_directory(slurm: FakeSlurm, tmp_path: Path) -> None:
    sweep = open_sweep(tmp_path / "sweep", {}, elements(tmp_path, 3))
    run = RunDirectory(tmp_path / "e2")
    files.make_folder(run.path)
    files.write_json(run.run_json, {"attempts": [], "sweep": str(sweep.path)})
    assert submitted_jobs.jobs_of(run) == []
    submit_rest(sweep, lambda count: f"{count}")
    entry = submitted_jobs.newest_job(run)
    assert entry is not None
    assert (entry.job_id, entry.kind, entry.folder) == ("101_2", "slurm", str(sweep.path / "slurm"))
    submitted_jobs.note_job(run, submitted_jobs.JobEntry("105", "slurm", str(run.slurm), "resume"))
    assert [one.job_id for one in submitted_jobs.jobs_of(run)] == ["101_2", "105"]


@pytest.mark.parametrize("command", ["doctor", "logs", "cancel", "resume"])
def test_a_command_for_one_run_names_those_of_a_sweep(
    slurm: FakeSlurm, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = submit_rest(open_sweep(tmp_path / "sweep", {}, elements(tmp_path, 2)), str)
    slurm.command("squeue", "echo '101_0|RUNNING|n1|None'; echo '101_1|PENDING||Priority'")
    assert main([command, str(sweep.path)]) == 78
    said = capsys.readouterr().err
    assert f"{sweep.path} is a sweep; `pekoe {command}` takes one of its runs" in said
    assert f"`pekoe {command} {tmp_path}/e0`" in said
    assert f"101_1  PENDING         seed=1  {tmp_path}/e1" in said


def test_a_sweep_grows_but_keeps_its_configuration(slurm: FakeSlurm, tmp_path: Path) -> None:
    sweep = submit_rest(open_sweep(tmp_path / "sweep", {"seed": 1, "x": 2}, elements(tmp_path, 2)), str)
    grown = open_sweep(tmp_path / "sweep", {"seed": 1, "x": 2}, elements(tmp_path, 3))
    assert grown.elements[:2] == sweep.elements
    assert [one.trial_name for one in grown.rest] == ["e2"]
    with pytest.raises(RunDirectoryError, match=r"another configuration \(x differ\)"):
        open_sweep(tmp_path / "sweep", {"seed": 1, "x": 3}, elements(tmp_path, 2))


def test_names_are_readable_and_unique() -> None:
    planned = plan_elements("first", {"actor.optimizer.lr": [1e-6, 3e-6], "reward.name": ["a b", "a:b"]}, [1, 2])
    assert [one.trial_name for one in planned[:3]] == [
        "first-lr_1e-06-name_a_b-seed_1", "first-lr_1e-06-name_a_b-seed_2", "first-lr_1e-06-name_a_b-seed_1.2",
    ]  # fmt: skip
    assert len({one.trial_name for one in planned}) == 8
    assert planned[0].overrides == ("actor.optimizer.lr=1e-06", "reward.name=a b", "seed=1")
    assert [one.trial_name for one in plan_elements("t", {"actor.dtype": ["x"], "rollout.dtype": ["y"]}, [])] == [
        "t-actor.dtype_x-rollout.dtype_y"
    ]
    assert plan_elements("t", {"a.b": [True, None]}, [])[1].overrides == ("a.b=null",)


@pytest.mark.parametrize(
    ("sweep", "seeds", "words"),
    [
        ({"a": []}, [], "a has no value"),
        ({"a": [1, 1]}, [], "a has a value twice"),
        ({"trial_name": ["x"]}, [], "trial_name cannot be swept"),
        ({}, [3, 3], "seed has a value twice"),
    ],
)
def test_wrong_sweeps_are_refused(sweep: dict[str, list[object]], seeds: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan_elements("t", sweep, seeds)


def test_values_of_the_command_line() -> None:
    assert parse_sweep(["a=1,2", "b=[1,2],[3]", "c='x,y',z"]) == {
        "a": ["1", "2"], "b": ["[1,2]", "[3]"], "c": ["'x,y'", "z"],
    }  # fmt: skip
    for text in ("a", "=1", "a="):
        with pytest.raises(ValueError, match=r"allowed: key=value1,value2"):
            parse_sweep([text])


def test_what_sbatch_takes_as_an_array() -> None:
    for text in ("0", "0-15%4", "1,3,5-9:2", "0-3,7%1"):
        check_array_text(text)
    for text in ("", "a", "0-", "0-3%", "-1", "0 - 3"):
        with pytest.raises(ValueError, match="--array"):
            check_array_text(text)
