"""The disk transport between real processes and real files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pekoe.pipeline import complete_folder, pins
from pekoe.pipeline.messages import PrepareWeights
from pekoe.pipeline.pins import Pin, Pins
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.weights.disk import DiskTransport
from pekoe.pipeline.weights.transport_setup import TransferError, TransportSetup

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    return run


def setup_of(run: RunDirectory, rank: int, seconds: float = 20.0, **settings: Any) -> TransportSetup:
    role = "rollout" if rank else "trainer"
    return TransportSetup(rank, role, run, torch.device("cpu"), "gloo", "127.0.0.1", 128, seconds, **settings)


def versions_on_disk(run: RunDirectory) -> list[int]:
    return sorted(int(path.name[2:]) for path in run.weights.glob("v-*") if path.name[2:].isdecimal())


def send(sender: Any, kit: SimpleNamespace, version: int, weights: Any) -> None:
    sender.send(version, 0, (0, 1), kit.specs_of(weights), kit.Counted(weights))


def test_two_readers_and_several_versions(world, kit):
    w = world("disk", 2, bucket_bytes=64, verify=True)
    for version in (1, 2, 3):
        weights = kit.model(version)
        counted = w.transfer(version, 0, weights)
        assert counted.taken == len(weights)
        for rank in (1, 2):
            assert w.receivers[rank].answer().get("tensors") == kit.described(weights)
    assert versions_on_disk(w.sender._setup.run) == [2, 3]


def test_sender_failure_reaches_readers_and_leaves_nothing(world, kit):
    w = world("disk", 1, bucket_bytes=64, bucket_seconds=30.0)
    weights = kit.model(1)
    counted = kit.Counted([*weights, ("more", torch.zeros(1))])
    began = time.monotonic()
    with pytest.raises(ValueError, match="'more' came after all"):
        w.transfer(1, 0, weights, counted=counted)
    assert counted.taken == len(weights) + 1
    assert "the sender failed: tensor 'more'" in w.receivers[1].answer()["error"]
    assert time.monotonic() - began < 25, "well before the limit"
    assert not list(w.sender._setup.run.weights.glob("v-1*part*"))
    w.transfer(1, 0, weights)
    assert w.receivers[1].answer().get("tensors") == kit.described(weights)


WRITER = """
import os, sys, time, torch
from pathlib import Path
from pekoe.pipeline.messages import TensorSpec
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.weights.disk import DiskTransport
from pekoe.pipeline.weights.transport_setup import TransportSetup
setup = TransportSetup(0, "trainer", RunDirectory(Path(sys.argv[1])), torch.device("cpu"), "gloo", "x", 64, 5.0)
sender = DiskTransport.sender(setup)
print(sender.open_epoch(0, (0, 1)), flush=True)
specs = [TensorSpec(f"t{i}", (300,), "float32") for i in range(40)]
def weights():
    for i, spec in enumerate(specs):
        if i == 20:
            print("half", flush=True)
            time.sleep(60)
        yield spec.name, torch.full((300,), float(i))
sender.send(7, 0, (0, 1), specs, weights())
"""


def test_kill_of_the_writer_in_mid_write_leaves_no_version(run, kit):
    before = kit.model(6)
    sender = DiskTransport.sender(setup_of(run, 0))
    sender.open_epoch(0, (0, 1))
    send(sender, kit, 6, before)
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    token = child.stdout.readline().strip()
    assert child.stdout.readline() == "half\n"
    child.kill()
    child.wait(10)
    assert list((run.weights / "v-7.part").iterdir())
    receiver = DiskTransport.receiver(setup_of(run, 1, seconds=0.6))
    receiver.prepare(PrepareWeights(7, 0, (0, 1), token, kit.specs_of(before)))
    with pytest.raises(TransferError, match=r"version 7: no progress on disk for 0\.6 s"):
        list(receiver.receive(7))
    complete_folder.verify(run.weights / "v-6", deep=True)
    again = DiskTransport.sender(setup_of(run, 0))
    token = again.open_epoch(0, (0, 1))
    send(again, kit, 7, before)
    receiver.prepare(PrepareWeights(7, 1, (0, 1), token, kit.specs_of(before)))
    assert kit.described([(n, t.clone()) for n, t in receiver.receive(7)]) == kit.described(before)


def test_weights_of_an_earlier_attempt_are_not_taken(run, kit):
    old, new = kit.model(1), kit.model(2)
    first = DiskTransport.sender(setup_of(run, 0))
    first.open_epoch(0, (0, 1))
    send(first, kit, 5, old)
    second = DiskTransport.sender(setup_of(run, 0))
    token = second.open_epoch(0, (0, 1))
    receiver = DiskTransport.receiver(setup_of(run, 1))
    receiver.prepare(PrepareWeights(5, 0, (0, 1), token, kit.specs_of(new)))
    late = threading.Timer(0.7, lambda: send(second, kit, 5, new))
    late.start()
    assert kit.described([(n, t.clone()) for n, t in receiver.receive(5)]) == kit.described(new)
    late.join()


def test_versions_kept_by_order_of_writing(run, kit):
    weights = kit.model(1, tensors=1)
    first = DiskTransport.sender(setup_of(run, 0))
    first.open_epoch(0, (0, 1))
    for version in (8, 9):
        send(first, kit, version, weights)
    resumed = DiskTransport.sender(setup_of(run, 0))
    resumed.open_epoch(0, (0, 1))
    send(resumed, kit, 3, weights)
    assert versions_on_disk(run) == [3, 9]
    send(resumed, kit, 4, weights)
    assert versions_on_disk(run) == [3, 4]


def test_pinned_version_stays_until_its_reader_is_done_or_dead(run, kit, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(pins, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    weights = kit.model(1, tensors=1)
    sender = DiskTransport.sender(setup_of(run, 0, seconds=0.2, keep_versions=1))
    sender.open_epoch(0, (0, 1))
    pin = Pin(run.weights, "rank-9")
    send(sender, kit, 1, weights)
    pin.hold(1)
    send(sender, kit, 2, weights)
    assert versions_on_disk(run) == [1, 2]
    clock[0] += 1.0
    pin.hold(1)
    send(sender, kit, 3, weights)
    assert versions_on_disk(run) == [1, 3], "the reader has shown life"
    clock[0] += 1.0
    send(sender, kit, 4, weights)
    assert versions_on_disk(run) == [4], "a reader that is silent for 4 x the limit is dead"


def test_reader_that_comes_between_look_and_removal_gets_its_version_back(run, monkeypatch):
    folder = run.weights / "v-1"
    folder.mkdir()
    readers = Pins(run.weights, patience_seconds=10)
    real = os.rename

    def rename(source: Any, target: Any) -> None:
        real(source, target)
        if "discarded" in str(target):
            Pin(run.weights, "rank-2").hold(1)

    monkeypatch.setattr(os, "rename", rename)
    assert not readers.remove_unless_pinned(1, folder)
    assert folder.is_dir()


def test_damaged_or_foreign_content_is_refused(run, kit):
    weights = kit.model(1)
    sender = DiskTransport.sender(setup_of(run, 0))
    token = sender.open_epoch(0, (0, 1))
    send(sender, kit, 1, weights)
    receiver = DiskTransport.receiver(setup_of(run, 1, seconds=0.4))
    specs = list(kit.specs_of(weights))
    receiver.prepare(PrepareWeights(1, 0, (0, 1), token, tuple(specs[:-1])))
    with pytest.raises(TransferError, match=r"\['lm_head.weight'\], not announced"):
        list(receiver.receive(1))
    file = next((run.weights / "v-1").glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)
    receiver.prepare(PrepareWeights(1, 1, (0, 1), token, tuple(specs)))
    with pytest.raises(TransferError, match=r"bytes, .* were written"):
        list(receiver.receive(1))
    assert not list((Path(run.weights) / "readers").glob("*.json"))
    marker = json.loads((run.weights / "v-1" / complete_folder.MARKER).read_text())
    assert marker["token"] == token
