"""The collective transport between real processes: what arrives, and what happens when somebody fails."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pekoe.pipeline.messages import TensorSpec
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.weights.collective import CollectiveTransport
from pekoe.pipeline.weights.transport_setup import TransferError, TransportSetup

pytestmark = pytest.mark.timeout(240)


def expect_all(kit: Any, world: Any, weights: Any, ranks: tuple[int, ...] = (1, 2)) -> None:
    for rank in ranks:
        answer = world.receivers[rank].answer()
        assert answer.get("tensors") == kit.described(weights), answer


def expect_recovery(kit: Any, world: Any, ranks: tuple[int, ...]) -> None:
    """A new epoch of the living works."""
    weights = kit.model(77)
    world.transfer(77, 50, weights, ranks=ranks)
    expect_all(kit, world, weights, ranks)


def test_versions_in_one_epoch_then_other_members(world, kit):
    w = world("collective", 2)
    for version, epoch in ((1, 0), (2, 0), (3, 1)):
        weights = kit.model(version, dtype=torch.float32 if epoch == 0 else torch.bfloat16)
        counted = w.transfer(version, epoch, weights)
        assert counted.taken == len(weights)
        expect_all(kit, w, weights)
    weights = kit.model(4)
    w.transfer(4, 2, weights, ranks=(2,))
    expect_all(kit, w, weights, (2,))


@pytest.mark.parametrize("bucket_bytes", [512, 128, 1, 1 << 20])
def test_total_is_a_multiple_of_the_bucket(world, kit, bucket_bytes):
    w = world("collective", 1, bucket_bytes=bucket_bytes, verify=True)
    weights = [(f"t{i}", torch.full((32,), float(i))) for i in range(16)]
    w.transfer(1, 0, weights)
    expect_all(kit, w, weights, (1,))


def test_no_tensors_and_only_empty_tensors(world, kit):
    w = world("collective", 1)
    w.transfer(1, 0, [])
    expect_all(kit, w, [], (1,))
    empty = [("a", torch.empty(0)), ("b", torch.empty(3, 0, dtype=torch.bfloat16))]
    w.transfer(2, 1, empty)
    expect_all(kit, w, empty, (1,))


def test_receiver_raises_in_mid_transfer(world, kit):
    w = world("collective", 2, bucket_seconds=20.0)
    weights = kit.model(1)
    w.transfer(1, 0, weights)
    expect_all(kit, w, weights)
    began = time.monotonic()
    with pytest.raises(TransferError, match=r"rank 2: the engine stopped reading .* tensor 'layer\.4\.weight'"):
        w.transfer(2, 0, weights, jobs={2: {"at": 4, "action": "raise"}})
    assert time.monotonic() - began < 15, "well before the limit"
    assert w.last.taken == len(weights)
    assert "engine cannot load" in w.receivers[2].answer()["error"]
    answer = w.receivers[1].answer()
    assert "error" in answer
    assert answer["seconds"] < 15
    with pytest.raises(TransferError, match="open a new epoch"):
        w.sender.send(3, 0, (0, 1, 2), kit.specs_of(weights), kit.Counted(weights))
    expect_recovery(kit, w, (1, 2))


@pytest.mark.parametrize("at", [0, 5, 13])
def test_receiver_is_killed_in_mid_transfer(world, kit, at):
    w = world("collective", 2, bucket_seconds=6.0)
    weights = kit.model(1)
    began = time.monotonic()
    with pytest.raises(TransferError, match=r"no sign of life from ranks \[1\]"):
        w.transfer(1, 0, weights, jobs={1: {"at": at, "action": "kill"}})
    assert time.monotonic() - began < 30
    assert w.last.taken == len(weights)
    answer = w.receivers[2].answer()
    assert "error" in answer or answer["tensors"] == kit.described(weights)
    expect_recovery(kit, w, (2,))


@pytest.mark.parametrize("has_met", [False, True])
def test_receiver_that_declines_before_the_transfer_holds_up_nobody(world, kit, has_met):
    """Its engine failed between its answer and the transfer."""
    w = world("collective", 2, bucket_seconds=20.0)
    weights = kit.model(1)
    if has_met:
        w.transfer(1, 0, weights)
        expect_all(kit, w, weights)
    began = time.monotonic()
    with pytest.raises(TransferError, match="rank 2: the engine has failed"):
        w.transfer(2, 0, weights, jobs={2: {"action": "decline"}})
    answer = w.receivers[1].answer()
    assert time.monotonic() - began < 15, "well before the limit"
    assert "rank 2: the engine has failed" in answer["error"] or "is gone" in answer["error"]
    assert w.last.taken == len(weights)
    assert w.receivers[2].answer() == {"error": "declined"}
    expect_recovery(kit, w, (1,))
    weights = kit.model(3)
    w.transfer(3, 60, weights)
    expect_all(kit, w, weights)


def test_receiver_that_hangs_breaks_the_epoch_at_the_limit(world, kit):
    w = world("collective", 2, bucket_seconds=2.0)
    weights = kit.model(1)
    with pytest.raises(TransferError, match=r"weights version 1, (bucket \d+/\d+ \(.*layer|the sender waits)"):
        w.transfer(1, 0, weights, jobs={2: {"at": 3, "action": "sleep", "seconds": 8}})
    assert w.receivers[2].answers.empty(), "before it went on"
    assert w.last.taken == len(weights)
    assert "error" in w.receivers[1].answer()
    assert "error" in w.receivers[2].answer()
    expect_recovery(kit, w, (1, 2))


def test_wrong_shape_on_the_receiver_names_what_differs(world, kit):
    w = world("collective", 1)
    weights = kit.model(1)
    specs = list(kit.specs_of(weights))
    specs[3] = TensorSpec(specs[3].name, (2, 2), specs[3].dtype)
    with pytest.raises(TransferError, match="tensor names, shapes, dtypes or the bucket size differ"):
        w.transfer(1, 0, weights, specs=specs)
    assert w.last.taken == len(weights)
    assert "differ" in w.receivers[1].answer()["error"]
    expect_recovery(kit, w, (1,))


@pytest.mark.parametrize("fault", ["shape", "name", "surplus", "missing", "raises"])
def test_sender_with_unexpected_tensors(world, kit, fault):
    w = world("collective", 1)
    announced = kit.model(1)
    given = list(announced)
    fail_at = -1
    if fault == "shape":
        given[4] = (given[4][0], torch.zeros(1))
        expected = r"layer\.4\.weight.*float32\[1\], announced as float32\[23, 7\]"
    elif fault == "name":
        given[4] = ("other", given[4][1])
        expected = r"tensor 'other' came where 'layer\.4\.weight' was announced"
    elif fault == "surplus":
        given.append(("more", torch.zeros(1)))
        expected = "tensor 'more' came after all"
    elif fault == "missing":
        given.pop()
        expected = r"weights ended before tensor 'lm_head\.weight'"
    else:
        fail_at, expected = 6, "gather failed"
    counted = kit.Counted(given, fail_at)
    with pytest.raises((ValueError, RuntimeError), match=expected):
        w.transfer(1, 0, announced, counted=counted)
    assert counted.taken == (6 if fault == "raises" else len(given))
    assert "error" in w.receivers[1].answer()
    expect_recovery(kit, w, (1,))


def test_member_that_never_comes_is_named(world, kit):
    w = world("collective", 1, bucket_seconds=1.5)
    w.endpoint[0] = w.sender.open_epoch(0, (0, 1))
    counted = kit.Counted(kit.model(1))
    began = time.monotonic()
    with pytest.raises(TransferError, match="hello/1"):
        w.sender.send(1, 0, (0, 1), kit.specs_of(counted.weights), counted)
    assert time.monotonic() - began < 20
    assert counted.taken == len(counted.weights)
    expect_recovery(kit, w, (1,))


def test_settings_that_differ_are_named_before_the_group_is_made(world, kit):
    w = world("collective", 2, environment={2: {"GLOO_DEVICE_TRANSPORT": "TCP", "GLOO_SOCKET_IFNAME": "lo"}})
    with pytest.raises(TransferError, match=r"GLOO_DEVICE_TRANSPORT is None on rank 0 and 'TCP' on rank 2"):
        w.transfer(1, 0, kit.model(1))
    for rank in (1, 2):
        assert "GLOO_DEVICE_TRANSPORT" in w.receivers[rank].answer()["error"]
    expect_recovery(kit, w, (1,))


def test_sender_that_dies_is_noticed(kit, tmp_path):
    """The receiver's side of a dead sender: its store is gone, and the error says so in time."""
    setup = TransportSetup(
        0, "trainer", RunDirectory(tmp_path), torch.device("cpu"), "gloo", "127.0.0.1", 1024, bucket_seconds=2.0
    )
    from pekoe.pipeline.messages import PrepareWeights

    sender = CollectiveTransport.sender(setup)
    endpoint = sender.open_epoch(0, (0, 1))
    receiver = CollectiveTransport.receiver(
        TransportSetup(1, "rollout", setup.run, setup.device, "gloo", "127.0.0.1", 1024, bucket_seconds=2.0)
    )
    receiver.prepare(PrepareWeights(1, 0, (0, 1), endpoint, kit.specs_of(kit.model(1))))
    timer = threading.Timer(0.5, sender.close)
    timer.start()
    began = time.monotonic()
    with pytest.raises(TransferError, match=r"closed|gone|nobody answers"):
        list(receiver.receive(1))
    assert time.monotonic() - began < 20
    with pytest.raises(TransferError, match="in no working epoch"):
        list(receiver.receive(1))
    timer.join()


def test_other_trainer_ranks_only_take_part_in_the_gathers(kit, tmp_path):
    setup = TransportSetup(1, "trainer", RunDirectory(Path(tmp_path)), torch.device("cpu"), "gloo", "x", 1024, 1.0)
    counted = kit.Counted(kit.model(1))
    CollectiveTransport.sender(setup).send(1, 0, (0, 2, 3), kit.specs_of(counted.weights), counted)
    assert counted.taken == len(counted.weights)
