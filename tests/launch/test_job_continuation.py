"""How a run goes on after an attempt: requeue, chain, restart in place, and when it does not."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pekoe.launch import job, slurm_commands
from pekoe.launch.attempts import RunDirectoryError, prepare_run
from pekoe.launch.claim import claim
from pekoe.launch.continuation import Continuation, attempts_by_itself
from pekoe.launch.environment import Facts, read
from pekoe.launch.job import WorldOutcome, WorldStart, newest_checkpoint, run_job, run_of_job
from pekoe.launch.job_nodes import NodesLackingError, ill_nodes, pick_nodes
from pekoe.launch.job_times import parse_times, time_variables
from pekoe.launch.node_layout import NodeGroup
from pekoe.pipeline.config.load import from_yaml_text
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.run_directory import RunDirectory

IN_JOB = read({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}, "n1")
SHOWN = (
    "JobId=12 JobName=x UserId=root(0) Account=physics QOS=normal JobState={state} Restarts={restarts} "
    "TimeLimit=1-02:00:00 Partition=long StartTime=2026-01-02T03:04:05 EndTime={end}"
)
FakeScontrol = Callable[..., None]


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeScontrol:
    """A command that answers `show job` with these facts and does `requeue` so; it notes what it was asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def write(requeue: str = "true", state: str = "RUNNING", restarts: int = 1, end: str = "Unknown") -> None:
        shown = SHOWN.format(state=state, restarts=restarts, end=end)
        script = f"""#!/bin/bash
echo "$@" >> {tmp_path}/asked
case "$*" in *show*) echo "{shown}" ;; *requeue*) {requeue} ;; esac
"""
        (folder / "scontrol").write_text(script)
        (folder / "scontrol").chmod(0o755)

    return write


def asked(tmp_path: Path) -> str:
    path = tmp_path / "asked"
    return path.read_text() if path.exists() else ""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return from_yaml_text(
        f"experiment_name: e\ntrial_name: t\ncluster: {{fileroot: {tmp_path}, continue_by: requeue, max_attempts: 3}}"
    )


def continuation_of(config: RunConfig, facts: Facts = IN_JOB) -> Continuation:
    return Continuation(RunDirectory(Path(config.cluster.fileroot)), config, facts)


def test_a_job_is_requeued_once(config: RunConfig, scontrol: FakeScontrol, tmp_path: Path) -> None:
    scontrol()
    assert continuation_of(config).requeue()
    assert asked(tmp_path).splitlines()[1:] == ["requeue 12"]


def test_a_scontrol_that_sleeps_an_hour_holds_nothing_up(
    config: RunConfig, scontrol: FakeScontrol, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slurm_commands, "COMMAND_SECONDS", 0.5)
    scontrol(requeue="exec sleep 3600")
    began = time.monotonic()
    assert not continuation_of(config).requeue()
    assert time.monotonic() - began < 5
    assert "no answer within" in capsys.readouterr().err


@pytest.mark.parametrize(("state", "restarts"), [("COMPLETING", 1), ("CANCELLED", 1), ("PENDING", 2), ("RUNNING", 2)])
def test_what_somebody_ended_or_slurm_has_put_back_itself_is_left_alone(
    config: RunConfig, scontrol: FakeScontrol, tmp_path: Path, state: str, restarts: int
) -> None:
    scontrol(state=state, restarts=restarts)
    assert not continuation_of(config).requeue()
    assert "requeue" not in asked(tmp_path)


def test_outside_of_jobs_nothing_goes_on_by_itself(config: RunConfig) -> None:
    assert continuation_of(config, read({}, "laptop")).how == "none"


def test_the_next_job_of_a_chain_asks_for_what_this_one_was_given(config: RunConfig, scontrol: FakeScontrol) -> None:
    scontrol()
    config.cluster.slurm.account = "own"
    given = continuation_of(config)._same_request()
    assert given == ["cluster.slurm.partition=long", "cluster.slurm.qos=normal", "cluster.time_limit=1-02:00:00"]
    assert from_yaml_text("{}", given).cluster.time_limit == "1-02:00:00"
    config.cluster.time_limit = "1:00:00"
    assert "time_limit" not in " ".join(continuation_of(config)._same_request())


@pytest.mark.parametrize(
    ("automatic", "count"),
    [([], 0), ([False], 1), ([False, True, True], 3), ([False, True, False], 1), ([False, True, False, True], 2)],
)
def test_attempts_count_from_the_last_that_a_person_started(tmp_path: Path, automatic: list[bool], count: int) -> None:
    run = RunDirectory(tmp_path)
    run.run_json.write_text(json.dumps({"attempts": [{"automatic": one} for one in automatic]}))
    assert attempts_by_itself(run) == count


def test_times_of_the_job_where_slurm_does_not_export_them(scontrol: FakeScontrol) -> None:
    scontrol(end="2026-01-02T04:04:05")
    found = time_variables(IN_JOB)
    assert int(found["SLURM_JOB_END_TIME"]) - int(found["SLURM_JOB_START_TIME"]) == 3600
    assert time.localtime(int(found["SLURM_JOB_START_TIME"]))[:6] == (2026, 1, 2, 3, 4, 5)
    assert parse_times("StartTime=Unknown EndTime=soon") == {}
    assert time_variables(read({"SLURM_JOB_ID": "12", "SLURM_JOB_END_TIME": "99"}, "n1")) == {}
    assert time_variables(read({}, "laptop")) == {}


def test_spare_nodes_take_the_place_of_ill_ones(tmp_path: Path, scontrol: FakeScontrol) -> None:
    scontrol()
    sinfo = tmp_path / "bin" / "sinfo"
    sinfo.write_text("#!/bin/bash\nprintf 'a allocated\\nb down*\\nc draining\\nd mixed\\nd mixed\\ne idle*\\n'\n")
    sinfo.chmod(0o755)
    ill = ill_nodes(["a", "b", "c", "d", "e"])
    assert ill == {"b": "down*", "e": "idle*"}
    groups = (NodeGroup((2, 2), 2), NodeGroup((1,)))
    assert pick_nodes(groups, (("a", "b", "c"), ("d",)), ill) == ("a", "c", "d")
    with pytest.raises(NodesLackingError, match="1 of the nodes a, b are well, 2 are needed; ill: b"):
        pick_nodes(groups, (("a", "b"), ("d",)), ill)


@pytest.fixture
def tiny(tmp_path: Path, tiny_model: Path, sums: Path) -> RunConfig:
    return from_yaml_text(
        f"{{experiment_name: e, trial_name: t, allocation: 'hf:d1+fsdp:d1', actor: {{path: {tiny_model}}}, "
        f"train_dataset: {{type: jsonl, path: {sums}, batch_size: 2}}, reward: {{name: gsm8k}}, "
        f"gconfig: {{max_new_tokens: 8}}, cluster: {{fileroot: {tmp_path}, device: cpu, max_attempts: 2}}}}"
    )


class World:
    """Stands where a world is started: ends with the given outcomes, one after the other."""

    def __init__(self, run: RunDirectory, outcomes: Iterator[tuple[WorldOutcome, bool]]) -> None:
        self.run, self.outcomes, self.attempts = run, outcomes, []

    def __call__(self, start: WorldStart, facts: Facts, on_terminated: Callable[[], None]) -> WorldOutcome:
        self.attempts.append(start.attempt)
        outcome, progress = next(self.outcomes)
        if progress:
            (self.run.checkpoints / f"step-{start.attempt + 1}").mkdir()
        return outcome


FAILED, DONE, STOPPED, WRONG = WorldOutcome(1), WorldOutcome(0), WorldOutcome(75, stopped=True), WorldOutcome(78)


@pytest.mark.parametrize(
    ("outcomes", "code", "count"),
    [
        pytest.param([(FAILED, True), (DONE, True)], 0, 2, id="a failure, then the end"),
        pytest.param([(FAILED, False), (FAILED, False), (DONE, True)], 1, 2, id="again without progress"),
        pytest.param([(FAILED, True), (FAILED, True), (FAILED, True)], 1, 3, id="no more than twice"),
        pytest.param([(WRONG, False), (DONE, True)], 78, 1, id="a wrong configuration"),
        pytest.param([(STOPPED, True), (DONE, True)], 75, 1, id="a stop signal"),
        pytest.param([(WorldOutcome(1, stopped=True), True), (DONE, True)], 1, 1, id="a failure in a stop"),
    ],
)
def test_restart_in_place(
    tiny: RunConfig, monkeypatch: pytest.MonkeyPatch,
    outcomes: list[tuple[WorldOutcome, bool]], code: int, count: int,
) -> None:  # fmt: skip
    tiny.cluster.restart_in_place, tiny.cluster.max_attempts = 2, 20
    run = prepare_run(tiny)
    world = World(run, iter(outcomes))
    monkeypatch.setattr(job, "run_world", world)
    assert run_job(run) == code
    assert world.attempts == list(range(count))
    entries = json.loads(run.run_json.read_text())["attempts"]
    assert [entry["automatic"] for entry in entries] == [False, *[True] * (count - 1)]


def test_only_complete_checkpoints_are_progress(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert newest_checkpoint(run) == (-1, 0)
    for name in ("step-2", "step-10", "step-10.1", "step-12.attempt-0.part"):
        (run.checkpoints / name).mkdir(parents=True)
    assert newest_checkpoint(run) == (10, 1)


def test_a_requeued_job_begins_no_more_attempts_than_are_allowed(
    tiny: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = prepare_run(tiny)
    record = json.loads(run.run_json.read_text())
    entries = [{"number": 0, "automatic": False}, {"number": 1, "automatic": True}]
    run.run_json.write_text(json.dumps({**record, "attempts": entries}))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setattr(job, "run_world", World(run, iter([])))
    assert run_job(run) == 1
    assert "cluster.max_attempts: 2 attempts have begun by themselves" in capsys.readouterr().err
    assert len(json.loads(run.run_json.read_text())["attempts"]) == 2


def test_a_job_that_is_started_again_finds_its_run_and_no_other_does(tiny: RunConfig) -> None:
    first = read({"SLURM_JOB_ID": "12"}, "n1")
    run = run_of_job(tiny, first)
    mine = claim(run, "12", 0)
    assert mine is not None
    (run.checkpoints / "step-2").mkdir()
    assert run_of_job(tiny, IN_JOB) == run
    with pytest.raises(RunDirectoryError, match="holds a run already"):
        run_of_job(tiny, read({"SLURM_JOB_ID": "13"}, "n1"))


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
@pytest.mark.parametrize("where", ["waiting for the old ranks", "between two attempts"])
def test_a_stop_without_a_world_is_a_stop_with_a_checkpoint(
    tiny: RunConfig, monkeypatch: pytest.MonkeyPatch, scontrol: FakeScontrol, tmp_path: Path, where: str, number: int
) -> None:
    """The driver would die of the signal, and the job would not go on."""
    scontrol(restarts=0)
    tiny.cluster.continue_by, tiny.cluster.restart_in_place, tiny.cluster.max_attempts = "requeue", 1, 20
    run = prepare_run(tiny)
    before = signal.getsignal(number)
    waits = iter([where == "waiting for the old ranks", True])

    def wait_until_silent(*_: object) -> None:
        if next(waits):
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            time.sleep(5)

    monkeypatch.setattr(job, "run_world", World(run, iter([(FAILED, True)])))
    monkeypatch.setattr(job, "wait_until_silent", wait_until_silent)
    monkeypatch.setattr(job, "wait_for_end", lambda: None)
    monkeypatch.setattr(job, "first_nodes", lambda *_: ("n1",))
    monkeypatch.setattr(job, "ill_nodes", lambda names: {})
    monkeypatch.setattr(job, "pick_nodes", lambda *_: ("n1",))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert run_job(run) == 75
    assert "requeue 12" in asked(tmp_path)
    assert signal.getsignal(number) == before
    assert len(json.loads(run.run_json.read_text())["attempts"]) == (0 if where.startswith("waiting") else 1)
