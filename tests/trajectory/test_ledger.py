"""The ledger: each group ends once, records are immutable, resume sets the abandoned future aside."""

from __future__ import annotations

import errno
import os

import pytest

from pekoe.pipeline import files
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.ledger import Entry, Ledger


def entry(group: int, shard: str = "shards/0-a/000000.h5", reason: str = "") -> Entry:
    return Entry(group, 0, shard, (0, 1), reason)


@pytest.fixture
def ledger(run: RunDirectory) -> Ledger:
    return Ledger(run)


def test_records_come_back_in_order(ledger: Ledger) -> None:
    ledger.record(1, consumed=[entry(0), entry(1)], filtered=[entry(2, reason="equal rewards")])
    ledger.record(2, consumed=[entry(4)], skipped=[Entry(3, 2, reason="timeout")])
    first, second = ledger.read()
    assert first.consumed == (entry(0), entry(1))
    assert second.skipped == (Entry(3, 2, "", (), "timeout"),)
    assert ledger.read(1) == [first]
    assert ledger.read(0) == []


def test_a_step_is_recorded_once_and_a_group_ends_once(ledger: Ledger) -> None:
    ledger.record(1, consumed=[entry(0)])
    with pytest.raises(ValueError, match="step 1 is recorded already"):
        ledger.record(1)
    with pytest.raises(ValueError, match=r"ends groups twice: \[5\]"):
        ledger.record(2, consumed=[entry(5)], skipped=[entry(5)])
    assert ledger.steps() == [1]


def test_a_missing_or_damaged_record_stops_a_resume(ledger: Ledger, run: RunDirectory) -> None:
    for step in (1, 2, 3):
        ledger.record(step, consumed=[entry(step)])
    with pytest.raises(ValueError, match="no record of step 4"):
        ledger.read(4)
    (run.ledger / "step-00000002.json").write_text("{")
    with pytest.raises(ValueError, match=r"step-00000002.json is damaged"):
        ledger.read()
    (run.ledger / "step-00000002.json").unlink()
    with pytest.raises(ValueError, match="no record of step 2"):
        ledger.read(3)


def test_resume_sets_later_records_aside_and_steps_can_be_made_again(ledger: Ledger, run: RunDirectory) -> None:
    for step in (1, 2, 3):
        ledger.record(step, consumed=[entry(step)])
    assert ledger.set_aside_after(1) == [2, 3]
    assert ledger.steps() == [1]
    ledger.record(2, consumed=[entry(9)])
    assert {ended.group for record in ledger.read() for ended in record.ended} == {1, 9}
    assert ledger.set_aside_after(1) == [2]
    assert len(list(run.set_aside.glob("ledger__step-00000002*"))) == 4


def test_a_full_disk_leaves_no_record(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        ledger.record(1, consumed=[entry(0)])
    monkeypatch.undo()
    assert ledger.steps() == []
    ledger.record(1, consumed=[entry(0)])


def test_losses_after_the_last_step_are_recorded_and_set_aside_on_resume(ledger: Ledger, run: RunDirectory) -> None:
    ledger.record(1, consumed=[entry(0)])
    ledger.record_end(1, [], [])
    assert not list(run.ledger.glob("end-*"))
    ledger.record_end(1, [entry(1)], [entry(2)])
    assert len(list(run.ledger.glob("end-*"))) == 1
    assert ledger.steps() == [1]
    ledger.set_aside_after(1)
    assert not list(run.ledger.glob("end-*"))
