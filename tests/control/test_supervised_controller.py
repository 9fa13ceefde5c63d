"""A full disk pauses a supervised run: the real controller against one simulated trainer rank."""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.control.disk_watch import DiskFull
from pekoe.pipeline.control.stop_watch import StopWatch
from pekoe.pipeline.control.supervised_controller import ControlParts, SupervisedController
from pekoe.pipeline.control.supervised_report import SupervisedReport
from pekoe.pipeline.messages import Commit, Hello, Message, Present, RollCall, Save, Saved, StepDone, StopTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent))

from simulated_roles import Folder, Loopback

FULL = str(OSError(errno.ENOSPC, "No space left on device"))


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pekoe.pipeline.control.checkpoint_saves.RETRY_SECONDS", 0.05)


class SupervisedWorld:
    """The trainer's saves find no room for the first `num_refused` times."""

    def __init__(self, num_refused: float, asynchronous: bool = True, full_disk_seconds: float = 20.0) -> None:
        self.config = RunConfig()
        self.config.recover.freq_steps, self.config.recover.asynchronous = 2, asynchronous
        self.config.saver.at_end = False
        self.config.cluster.progress_seconds, self.config.cluster.full_disk_seconds = 20.0, full_disk_seconds
        self.config.cluster.grace_seconds = 0.5
        self.num_refused = num_refused
        self.post = Loopback(1)
        self.folder = Folder(tell=lambda message: self.post.control.put((0, message)))
        self.log: list[tuple[str, int]] = []
        self.refusals: list[float] = []
        self.stop = threading.Event()

    def run(self, num_steps: int = 8) -> str:
        """The controller in this thread, the trainer rank in its own."""
        parts = ControlParts(
            post=self.post, inbox=self.post.control, trainer_ranks=[0], num_validation=0, done_before=frozenset(),
            checkpoints=self.folder,
            report=SupervisedReport(
                lambda step, values: self.refusals.append(values.get("disk/refusals", 0.0)), lambda state: None
            ),
            stop=StopWatch(self.stop.is_set, lambda: None, self.config.cluster.grace_seconds),
            peer_failed=lambda: False, stacks_of=lambda ranks: {}, set_phase=lambda phase, **more: None,
        )  # fmt: skip
        self.controller = SupervisedController(self.config, parts, num_steps, 0)
        threading.Thread(target=self._trainer, daemon=True).start()
        return self.controller.run()

    def _tell(self, message: Message) -> None:
        self.post.send_from(0, 0, message)

    def _trainer(self) -> None:
        self._tell(Hello("trainer", 0))
        while True:
            _, message = self.post.queues[0].get()
            match message:
                case Commit():
                    self.log.append(("step", message.version + 1))
                    self._tell(StepDone(message.version + 1, 0.0, {"rows/tokens": 1.0, "rows/sequences": 1.0}))
                case Save():
                    self.log.append(("save", message.version))
                    is_full = sum(what == "save" for what, _ in self.log) <= self.num_refused
                    self._tell(Saved(message.version, 0.0, error=FULL if is_full else "", disk_is_full=is_full))
                case RollCall():
                    self._tell(Present(message.number))
                case StopTrainer():
                    return


@pytest.mark.parametrize("asynchronous", [True, False])
def test_no_step_begins_until_a_refused_checkpoint_is_written(asynchronous: bool, held_up: Callable[[], float]) -> None:
    world = SupervisedWorld(5, asynchronous)
    assert world.run() == "finished"
    tries = [version for what, version in world.log if what == "save"][:6]
    paused_at = tries[-1]
    assert paused_at <= 3, "beside the save that is refused one step is made at most"
    assert tries.count(paused_at) >= 5
    assert world.folder.committed == sorted({paused_at, 4, 6, 8})
    assert max(world.refusals) == 5.0
    assert world.controller.parts.stop.step_seconds < 0.5 + held_up()


def test_a_disk_that_stays_full_ends_the_run_with_one_step_lost_at_most() -> None:
    world = SupervisedWorld(float("inf"), full_disk_seconds=0.5)
    with pytest.raises(DiskFull, match=r"a checkpoint: .*No space left.*cluster.full_disk_seconds.*resume"):
        world.run(1000)
    assert world.controller.version <= 3


def test_a_stop_ends_the_pause() -> None:
    world = SupervisedWorld(float("inf"))
    threading.Timer(0.4, world.stop.set).start()
    began = time.monotonic()
    assert world.run(1000) == "stopped"
    assert time.monotonic() - began < 15.0
    assert world.controller.version <= 3
