"""Checkpoints beside training, a full disk, stops: what the real controller does against simulated roles."""

from __future__ import annotations

import errno
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.control import disk_watch, pump
from pekoe.pipeline.control.checkpoint_saves import CheckpointFailure, CheckpointSaves, Committed
from pekoe.pipeline.control.disk_watch import DiskFull, DiskWatch
from pekoe.pipeline.control.pump import NoProgress
from pekoe.pipeline.control.stop_watch import LEAVING_SECONDS, StopWatch
from pekoe.pipeline.messages import PrepareWeights, Save, Saved

sys.path.insert(0, str(Path(__file__).resolve().parent))

from simulated_roles import Faults, Folder, Loopback, World

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (disk_watch, pump):
        monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    for name in ("checkpoint_saves", "weight_update"):
        monkeypatch.setattr(f"pekoe.pipeline.control.{name}.RETRY_SECONDS", 0.05)


def config(freq: int = 2, asynchronous: bool = True) -> RunConfig:
    made = RunConfig()
    made.train_dataset.batch_size = 3
    made.gconfig.n_samples = 2
    made.rollout.max_head_offpolicyness = 2
    made.cluster.progress_seconds = 20.0
    made.recover.freq_steps = freq
    made.recover.asynchronous = asynchronous
    return made


class SlowSaves:
    """Trainer ranks that write for a while, on a thread, while they answer everything else."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.log: list[tuple[str, int]] = []

    def __call__(self, world: World, message: Save) -> None:
        def write() -> None:
            time.sleep(self.seconds)
            self.log.append(("saved", message.version))
            world.tell_saved(message)

        self.log.append(("ordered", message.version))
        threading.Thread(target=write, daemon=True).start()


def test_training_goes_on_while_a_checkpoint_is_written() -> None:
    saves = SlowSaves(0.5)
    world = World(config(freq=4), 24, 8, faults=Faults(save=saves))
    steps_while_writing = []
    original = world._record

    def record(version: int, *rest: object) -> None:
        if ("ordered", 4) in saves.log and ("saved", 4) not in saves.log:
            steps_while_writing.append(version)
        original(version, *rest)  # type: ignore[arg-type]

    world._record = record  # type: ignore[assignment]
    assert world.run() == "finished"
    assert steps_while_writing, "no step was made while the checkpoint of version 4 was written"
    assert world.folder.committed == [4, 8]


def test_one_save_is_in_flight_at_most_and_a_due_one_waits() -> None:
    saves = SlowSaves(0.2)
    world = World(config(freq=1), 12, 4, faults=Faults(save=saves))
    assert world.run() == "finished"
    assert saves.log == [(what, version) for version in (1, 2, 3, 4) for what in ("ordered", "saved")]
    assert world.folder.committed == [1, 2, 3, 4]
    assert world.folder.tidied == 4


def test_a_failed_save_is_reported_and_made_up_for_at_the_next_boundary(caplog: pytest.LogCaptureFixture) -> None:
    def save(world: World, message: Save) -> None:
        world.tell_saved(message, error="planted" if message.version == 2 else "")

    world = World(config(freq=2, asynchronous=False), 18, 6, faults=Faults(save=save))
    with caplog.at_level(logging.ERROR):
        assert world.run() == "finished"
    assert world.folder.committed == [3, 4, 6]
    assert world.folder.abandoned == [2]
    assert "checkpoint of version 2 failed: rank 0: planted" in caplog.text
    assert [v["checkpoint/failures"] for _, v in world.metrics if "checkpoint/failures" in v] == [1.0]


def test_saves_that_always_fail_end_the_run_after_the_limit() -> None:
    world = World(config(freq=1), 30, 10, faults=Faults(save=lambda w, m: w.tell_saved(m, error="planted")))
    with pytest.raises(CheckpointFailure, match=r"3 checkpoints failed in a row \(recover.max_failures\).*planted"):
        world.run()
    assert not world.folder.committed
    assert len(world.folder.begun) == 3


def test_a_folder_that_cannot_be_sealed_counts_as_a_failed_save() -> None:
    world = World(config(freq=2, asynchronous=False), 12, 4)
    world.folder.commit_error = lambda version: OSError(5, "planted") if version == 2 else None
    assert world.run() == "finished"
    assert world.folder.committed == [3, 4]


def test_an_answer_of_an_abandoned_save_does_not_finish_the_next_one() -> None:
    folder, post = Folder(), Loopback(2)
    saves = CheckpointSaves(post, [0, 1], folder, DiskWatch(10.0), 3, -1)
    folder.tell = lambda message: saves.on_committed(message)  # type: ignore[arg-type]
    saves.begin(1, b"state")
    saves.on_saved(0, Saved(1, 0.1, error="planted"))
    assert saves.missing() == [1]
    saves.on_saved(1, Saved(1, 0.1))
    assert saves.in_flight is None
    assert saves.is_owed
    saves.begin(2, b"state")
    saves.on_saved(0, Saved(2, 0.1))
    saves.on_saved(1, Saved(1, 0.1))
    saves.on_committed(Committed(1))
    assert saves.in_flight is not None
    assert folder.committed == []
    saves.on_saved(1, Saved(2, 0.1))
    assert folder.committed == [2]
    assert (saves.complete_version, saves.is_owed, saves.failures) == (2, False, 0)


def test_a_folder_that_is_being_sealed_is_waited_for_on_the_head() -> None:
    saves = CheckpointSaves(Loopback(2), [0, 1], Folder(), DiskWatch(10.0), 3, -1)
    saves.begin(1, b"state")
    for rank, missing in ((0, [1]), (1, [0])):
        saves.on_saved(rank, Saved(1, 0.1))
        assert saves.missing() == missing


def test_a_full_disk_pauses_admission_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Shards find no room for half a second; nothing is admitted meanwhile, nothing is lost."""
    until: list[float] = []
    admitted: list[float] = []

    def refuse(rank: int) -> str:
        if not until and len(world.consumed) >= 2:
            until.append(time.monotonic() + 0.5)
        return str(FULL) if until and time.monotonic() < until[0] else ""

    world = World(config(), 30, 10, num_rollout=2, faults=Faults(refuse_disk=refuse))
    world.faults.hang = lambda assign: bool(admitted.append(time.monotonic()))  # type: ignore[func-returns-value]
    with caplog.at_level(logging.ERROR):
        assert world.run() == "finished"
    assert sorted(number for _, numbers in world.consumed for number in numbers) == list(range(30))
    begin, end = until[0] - 0.5, until[0]
    assert not [at for at in admitted if begin + 0.15 < at < end]
    assert [at for at in admitted if at > end]
    assert "paused: disk is full: a shard of rank" in caplog.text
    assert any("paused: disk is full" in phase for phase, _, _ in world.phases)


def test_a_disk_that_stays_full_ends_the_run_with_a_clear_reason() -> None:
    world = World(config(), 30, 10, faults=Faults(refuse_disk=lambda rank: str(FULL)))
    world.config.cluster.full_disk_seconds = 0.4
    with pytest.raises(DiskFull, match=r"a shard of rank 1: .*No space left.*cluster.full_disk_seconds.*resume"):
        world.run()


def test_a_checkpoint_without_room_is_tried_again_while_the_run_is_paused() -> None:
    """It does not count as a failure, however often; admission waits for it."""
    tries: list[int] = []

    def save(world: World, message: Save) -> None:
        tries.append(message.version)
        full = len(tries) <= 6
        world.tell_saved(message, error=str(FULL) if full else "", disk_is_full=full)

    world = World(config(freq=2), 30, 10, faults=Faults(save=save))
    assert world.run() == "finished"
    assert len(tries) >= 7
    assert world.folder.committed[0] <= 5, "with eta 2 at most three more steps can be made without admission"
    assert world.folder.committed[-1] == 10


def test_a_ledger_without_room_is_waited_for() -> None:
    world = World(config(), 12, 4)
    original, refused = world._record, []

    def record(version: int, *rest: object) -> None:
        if version == 2 and len(refused) < 3:
            refused.append(version)
            raise FULL
        original(version, *rest)  # type: ignore[arg-type]

    world._record = record  # type: ignore[assignment]
    assert world.run() == "finished"
    assert [version for version, _ in world.consumed] == [1, 2, 3, 4]
    assert refused == [2, 2, 2]


def stop_after(world: World, steps: int) -> None:
    original = world._record

    def record(version: int, *rest: object) -> None:
        original(version, *rest)  # type: ignore[arg-type]
        if version == steps:
            world.stop.set()

    world._record = record  # type: ignore[assignment]


def test_a_stop_saves_once_after_the_roll_call() -> None:
    world = World(config(freq=100), 30, 10)
    stop_after(world, 3)
    assert world.run() == "stopped"
    assert world.folder.committed == [3]
    assert world.post.sent["RollCall"] == 1
    assert world.post.sent["Save"] == 1


def test_no_save_begins_when_a_trainer_rank_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    world = World(config(freq=100), 30, 10, faults=Faults(answers_roll_call=False))
    world.config.cluster.acknowledge_seconds = 0.3
    stop_after(world, 3)
    with caplog.at_level(logging.ERROR):
        assert world.run() == "stopped"
    assert world.post.sent["Save"] == 0
    assert "ranks [0] did not answer within 0 s (cluster.acknowledge_seconds)" in caplog.text
    assert "--resume goes on from 0" in caplog.text


def test_no_save_begins_when_another_rank_has_failed() -> None:
    world = World(config(freq=100), 30, 10)
    world.peer_failed = True
    stop_after(world, 3)
    assert world.run() == "stopped"
    assert world.post.sent["RollCall"] == world.post.sent["Save"] == 0


def test_no_save_begins_that_would_not_be_over_in_time() -> None:
    world = World(config(freq=2, asynchronous=False), 30, 10, faults=Faults(save=SlowSaves(0.5)))
    world.grace_seconds = 0.3
    stop_after(world, 3)
    assert world.run() == "stopped"
    assert world.folder.committed == [2]


def test_the_grace_counts_from_the_signal_not_from_the_boundary() -> None:
    """The signal comes while weights load for longer than would leave time for a save."""
    world = World(config(freq=100), 30, 10)

    def load(message: PrepareWeights) -> str:
        if message.version == 3:
            world.stop.set()
            time.sleep(0.5)
        return ""

    world.faults.load_error = load
    world.grace_seconds, world.save_seconds = 0.8, 0.5
    assert world.run() == "stopped"
    assert world.folder.begun == []


def test_a_save_in_flight_may_become_complete_where_another_one_would_not_fit() -> None:
    world = World(config(freq=2), 30, 10)

    def save(world: World, message: Save) -> None:
        threading.Timer(1.0 if message.version == 2 else 0.3, world.tell_saved, (message,)).start()

    world.faults.save = save
    world.grace_seconds = 0.9
    stop_after(world, 5)
    assert world.run() == "stopped"
    assert world.folder.committed == [2, 4]


def test_a_stop_is_not_held_up_by_a_checkpoint_that_finds_no_room(caplog: pytest.LogCaptureFixture) -> None:
    def save(world: World, message: Save) -> None:
        world.tell_saved(message, error=str(FULL), disk_is_full=True)

    world = World(config(freq=100), 30, 10, faults=Faults(save=save))
    world.grace_seconds = 0.5
    world.config.cluster.full_disk_seconds = 40.0
    stop_after(world, 3)
    began = time.monotonic()
    assert world.run() == "stopped"
    assert time.monotonic() - began < 30.0
    assert len(world.folder.begun) > 1
    assert "stopping without a checkpoint of version 3" in caplog.text


@pytest.mark.parametrize("refused", ["export_refused", "weights_refused"])
def test_a_stop_gives_up_what_waits_for_room(refused: str) -> None:
    """The resumed run does it: nothing of it belongs into the last checkpoint."""
    world = World(config(freq=100), 30, 10, faults=Faults(**{refused: str(FULL)}))
    world.config.saver.freq_steps = 1
    world.config.cluster.full_disk_seconds = 10.0
    threading.Timer(0.7, world.stop.set).start()
    assert world.run() == "stopped"
    assert world.post.sent["Export" if refused == "export_refused" else "PublishWeights"] > 1
    assert world.folder.committed == [1]


def test_a_pause_for_room_is_not_taken_for_the_length_of_a_step(held_up: Callable[[], float]) -> None:
    world = World(config(freq=100), 12, 4)
    original, refused = world._record, []

    def record(version: int, *rest: object) -> None:
        if version == 2 and len(refused) < 10:
            refused.append(version)
            raise FULL
        original(version, *rest)  # type: ignore[arg-type]

    world._record = record  # type: ignore[assignment]
    assert world.run() == "finished"
    assert 0.0 < world.controller.parts.stop.step_seconds < 0.5 + held_up()


def test_an_export_counts_as_a_step_without_its_pause_for_room(held_up: Callable[[], float]) -> None:
    faults = Faults(export_refused=str(FULL), export_seconds=0.2)
    world = World(config(freq=100), 8, 2, faults=faults)
    world.config.saver.freq_steps = 1
    threading.Timer(1.5, lambda: setattr(faults, "export_refused", "")).start()
    assert world.run() == "finished"
    assert world.post.sent["Export"] > 2
    assert 0.2 <= world.controller.parts.stop.step_seconds < 1.0 + held_up()


def test_the_time_of_a_save_is_remembered_over_an_attempt_that_has_not_measured_its_own() -> None:
    world = World(config(freq=2, asynchronous=False), 30, 4)
    world.save_seconds = 7.0
    assert world.run() == "finished"
    assert world.folder.snapshots[2]["save_seconds"] == 7.0
    assert world.folder.snapshots[4]["save_seconds"] < 7.0


def test_the_end_of_the_job_stops_the_run_in_time() -> None:
    """The job ends 40 s from now at first; at step 3 it turns out that it ends at once."""
    world = World(config(freq=100), 300, 100)
    world.seconds_left = 400.0
    original = world._record

    def record(version: int, *rest: object) -> None:
        original(version, *rest)  # type: ignore[arg-type]
        if version == 3:
            world.seconds_left = 10.0

    world._record = record  # type: ignore[assignment]
    assert world.run() == "stopped"
    assert world.folder.committed == [3]


def test_what_is_needed_to_stop_is_measured() -> None:
    left = [10_000.0]
    watch = StopWatch(lambda: False, lambda: left[0], grace_seconds=60.0)
    watch.begin()
    assert watch.needed() == pytest.approx(60.0 + LEAVING_SECONDS)
    watch.save_seconds, watch.step_seconds = 300.0, 100.0
    left[0] = 416.0
    assert not watch.requested()
    left[0] = 414.0
    assert watch.requested()
    left[0] = 500.0
    assert watch.requested(), "a stop is final"


def test_tidying_up_does_not_eat_the_grace_of_a_stop() -> None:
    signalled, left = [False], [1000.0]
    watch = StopWatch(lambda: signalled[0], lambda: left[0], grace_seconds=40.0)
    assert watch.spare(60.0) == 60.0
    signalled[0] = True
    assert watch.spare(60.0) == pytest.approx(20.0, abs=1.0)
    left[0] = -1.0
    assert watch.spare(60.0) == 0.0


def test_a_short_job_is_not_eaten_by_the_guesses() -> None:
    left = [120.0]
    watch = StopWatch(lambda: False, lambda: left[0], grace_seconds=60.0)
    watch.begin()
    assert watch.needed() == pytest.approx(24.0)
    assert not watch.requested()
    left[0] = 23.0
    assert watch.requested()


def test_without_a_known_end_only_signals_stop() -> None:
    signalled = [False]
    watch = StopWatch(lambda: signalled[0], lambda: None, grace_seconds=60.0, save_seconds=1e9)
    watch.begin()
    assert not watch.requested()
    signalled[0] = True
    assert watch.requested()
    assert not watch.fits()


def test_a_wait_without_progress_names_the_ranks_and_shows_their_stacks() -> None:
    world = World(config(), 12, 4, num_rollout=2, faults=Faults(hang=lambda assign: assign.group >= 6))
    world.config.cluster.progress_seconds = 0.6
    world.config.rollout.stale_wait_seconds = 100.0
    with pytest.raises(
        NoProgress, match=r"for the batch of version 2 on ranks? [12].*\(cluster.progress_seconds is 0.6\)"
    ) as caught:
        world.run()
    assert set(caught.value.ranks) <= {1, 2}
    assert caught.value.stacks == {rank: f"stacks of rank {rank}" for rank in caught.value.ranks}
    waits = [(limit, on) for phase, limit, on in world.phases if phase == "waiting for the batch of version 2"]
    assert waits[0][0] == 0.6


def test_a_run_that_was_suspended_as_a_whole_has_not_waited_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time jumps by an hour between two looks: neither the wait nor the full disk is over its limit."""
    until: list[float] = []
    jumped = [0.0]

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + jumped[0]

    def refuse(rank: int) -> str:
        if not until and len(world.consumed) >= 2:
            until.append(time.monotonic() + 0.6)
            threading.Timer(0.3, lambda: jumped.__setitem__(0, 3600.0)).start()
        return str(FULL) if until and time.monotonic() < until[0] else ""

    world = World(config(), 30, 10, faults=Faults(refuse_disk=refuse))
    world.config.cluster.full_disk_seconds = 60.0
    for module in (disk_watch, pump):
        monkeypatch.setattr(module, "time", Clock)
    assert world.run() == "finished"
    assert jumped == [3600.0]


def test_a_step_that_the_ledger_has_no_room_for_is_not_saved_when_the_job_ends() -> None:
    """No signal comes, and nobody waits until `full_disk_seconds`: the step is done again after a resume."""
    world = World(config(freq=2, asynchronous=False), 30, 10)
    world.seconds_left = 400.0
    original = world._record

    def record(version: int, *rest: object) -> None:
        if version == 3:
            world.seconds_left = 1.0
            raise FULL
        original(version, *rest)  # type: ignore[arg-type]

    world._record = record  # type: ignore[assignment]
    assert world.run() == "stopped"
    assert [version for version, _ in world.consumed] == [1, 2]
    assert world.folder.committed == [2]
