"""Every operation of the disk fails, or is the last one: nothing is half visible, nothing promised is lost, and the
next try, in this process or another, goes through."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pekoe.launch import attempts
from pekoe.pipeline.run_directory import RunDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent))

from begin_scenarios import BeginFresh, BeginResumed, Resume
from crash_scenarios import (
    CheckpointsOfARun,
    Export,
    LedgerRecords,
    PutAside,
    Scenario,
    Shards,
    WeightsOnDisk,
    leftovers,
)
from faulty_disk import Crash, Fault, FaultyDisk, UnsyncedDisk, installed

torch.set_num_threads(1)
QUICK = (Shards, LedgerRecords, CheckpointsOfARun, Export, WeightsOnDisk, PutAside)
SLOW = (BeginFresh, BeginResumed, Resume)
REFUSALS = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENOLCK]


@pytest.fixture(autouse=True)
def small_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A code snapshot of two files, not two hundred."""
    root = tmp_path / "package"
    for name in ("pipeline/records.py", "launch/rank.py"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(f"# {name}\n" * 50)
    monkeypatch.setattr(attempts, "PACKAGE_ROOT", root)


class Cases:
    """The same state before, again and again."""

    def __init__(self, make: Callable[[], Scenario], folder: Path) -> None:
        self.make = make
        self.folder = folder
        with installed(UnsyncedDisk()):
            make().prepare(self._run(folder / "case"))
        (folder / "case").rename(folder / "template")

    @staticmethod
    def _run(folder: Path) -> RunDirectory:
        return RunDirectory(folder / "root" / "e" / "t")

    @contextmanager
    def case(self, fault: Fault | None) -> Iterator[tuple[Scenario, RunDirectory, FaultyDisk]]:
        """A fresh copy; what goes wrong is told with the place of the fault."""
        folder = self.folder / "case"
        shutil.copytree(self.folder / "template", folder)
        disk = FaultyDisk(folder / "graveyard", fault)
        try:
            with installed(UnsyncedDisk()):
                yield self.make(), self._run(folder), disk
        except BaseException as error:
            error.add_note(f"{fault}: {disk.operations[fault.at] if fault and fault.at < len(disk.operations) else ''}")
            raise
        finally:
            disk.close()
            shutil.rmtree(folder)

    def count(self) -> int:
        """Operations of the work when nothing goes wrong."""
        with self.case(None) as (scenario, run, disk):
            work = scenario.start(run)
            with installed(disk):
                work()
            scenario.done(run)
            return len(disk.operations)


@pytest.fixture(params=QUICK + SLOW, ids=lambda scenario: scenario.__name__)
def cases(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cases]:
    """In memory where there is a filesystem for that: thousands of small folders."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Cases(request.param, Path(folder))


def refused(cases: Cases, fault: Fault) -> None:
    """An error at one place is reported as such or does no harm; then the same process tries again."""
    with cases.case(fault) as (scenario, run, disk):
        work, before = scenario.start(run), leftovers(run.path)
        with installed(disk):
            try:
                work()
            except OSError as error:
                if error.errno != fault.code:
                    raise
                scenario.check(run)
                if not fault.happened:
                    own = set(leftovers(run.shards) + leftovers(run.ledger)) - set(before)
                    assert not own, "temporary files of what failed"
                disk.mend()
                work()
        scenario.done(run)


@pytest.mark.parametrize("code", REFUSALS, ids=errno.errorcode.get)
def test_every_operation_is_refused(cases: Cases, code: int) -> None:
    """Where a case is slow, every operation gets one of the errors, in turn."""
    places = range(cases.count())
    if cases.make in SLOW:
        places = places[REFUSALS.index(code) :: len(REFUSALS)]
    for at in places:
        refused(cases, Fault(at, code))


def test_every_operation_happens_and_is_reported_as_failed(cases: Cases) -> None:
    for at in range(cases.count()):
        refused(cases, Fault(at, errno.EIO, happened=True))


def test_the_disk_is_full_from_any_operation_on(cases: Cases) -> None:
    for at in range(cases.count()):
        refused(cases, Fault(at, errno.ENOSPC, lasting=True))


@pytest.mark.parametrize("power_loss", [None, 0, 1], ids=["killed", "power lost", "power partly lost"])
def test_every_operation_is_the_last_one(cases: Cases, power_loss: int | None) -> None:
    for at in range(cases.count()):
        with cases.case(Fault(at)) as (scenario, run, disk):
            work = scenario.start(run)
            with installed(disk), pytest.raises(Crash):
                work()
            if power_loss is not None:
                disk.lose_power(power_loss + at if power_loss else 0)
            scenario.check(run)
            scenario.start(run)()
            scenario.done(run)
