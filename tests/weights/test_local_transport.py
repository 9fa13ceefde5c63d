"""The local transport: two threads of one process."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pekoe.pipeline.messages import PrepareWeights
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.weights.local import LocalTransport
from pekoe.pipeline.weights.transport_setup import TransferError, TransportSetup

pytestmark = pytest.mark.timeout(60)
MEMBERS = (0, 0, 1)


@pytest.fixture
def ends(tmp_path, request):
    """With a limit of 30 s, or what the test asks for."""
    made = {}
    for rank in (0, 1):
        setup = TransportSetup(
            rank, "trainer", RunDirectory(tmp_path), torch.device("cpu"), "gloo", "x", 64,
            bucket_seconds=getattr(request, "param", 30.0),
        )  # fmt: skip
        made[rank] = SimpleNamespace(sender=LocalTransport.sender(setup), receiver=LocalTransport.receiver(setup))
    return made


@pytest.fixture
def threads() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        yield pool


def start(threads: Any, end: Any, kit: Any, version: int, counted: Any, specs: Any = None) -> Any:
    specs = specs or kit.specs_of(counted.weights)
    end.receiver.prepare(PrepareWeights(version, 0, MEMBERS, "", specs))
    return threads.submit(end.sender.send, version, 0, MEMBERS, kit.specs_of(counted.weights), counted)


def test_each_rank_hands_over_to_itself_without_a_copy(ends, threads, kit):
    for version in (1, 2):
        models = {rank: kit.model(10 * version + rank) for rank in (0, 1)}
        sends = [start(threads, ends[rank], kit, version, kit.Counted(models[rank])) for rank in (0, 1)]
        for rank in (0, 1):
            found = list(ends[rank].receiver.receive(version))
            assert [name for name, _ in found] == [name for name, _ in models[rank]]
            for (_, tensor), (_, original) in zip(found, models[rank], strict=True):
                assert tensor.data_ptr() == original.data_ptr()
        for sent in sends:
            sent.result(20)


def test_a_tensor_is_gathered_only_when_the_one_before_was_taken(ends, threads, kit):
    counted = kit.Counted(kit.model(1))
    sent = start(threads, ends[0], kit, 1, counted)
    for number, _ in enumerate(ends[0].receiver.receive(1)):
        assert counted.taken == number + 1
    sent.result(20)


@pytest.mark.parametrize(("how", "ends"), [("raises", 30.0), ("closes", 30.0), ("never comes", 1.0)], indirect=["ends"])
def test_failing_engine_reaches_the_sender(ends, threads, kit, how):
    counted = kit.Counted(kit.model(1))
    sent = start(threads, ends[0], kit, 1, counted)
    if how != "never comes":
        stream = ends[0].receiver.receive(1)
        next(stream)
        next(stream)
        if how == "raises":
            with pytest.raises(ValueError, match="engine"):
                stream.throw(ValueError("engine is full"))
        else:
            stream.close()
    with pytest.raises(TransferError, match=r"engine is full|stopped reading .*layer\.1\.weight|did not take"):
        sent.result(20)
    assert counted.taken == len(counted.weights)
    again = kit.Counted(kit.model(2))
    sent = start(threads, ends[0], kit, 2, again)
    assert len(list(ends[0].receiver.receive(2))) == len(again.weights)
    sent.result(20)


def test_failing_gather_reaches_the_engine(ends, threads, kit):
    counted = kit.Counted(kit.model(1), fail_at=3)
    sent = start(threads, ends[0], kit, 1, counted)
    with pytest.raises(TransferError, match="gather failed"):
        list(ends[0].receiver.receive(1))
    with pytest.raises(RuntimeError, match="gather failed"):
        sent.result(20)


@pytest.mark.parametrize("ends", [1.0], indirect=True)
def test_absent_sender_and_rank_without_engine(ends, kit):
    ends[0].receiver.prepare(PrepareWeights(1, 0, MEMBERS, "", kit.specs_of(kit.model(1))))
    with pytest.raises(TransferError, match=r"gave no 'layer\.0\.weight' within 1 s"):
        list(ends[0].receiver.receive(1))
    counted = kit.Counted(kit.model(1))
    ends[1].sender.send(1, 0, (0, 0), kit.specs_of(counted.weights), counted)
    assert counted.taken == len(counted.weights)


@pytest.mark.parametrize("begun", [False, True])
def test_an_engine_that_fails_before_it_reads_ends_the_sending_at_once(ends, threads, kit, begun):
    """And the next epoch of the same version is another delivery."""
    weights = kit.model(1)
    specs = kit.specs_of(weights)
    end = ends[0]
    end.receiver.prepare(PrepareWeights(1, 0, MEMBERS, "", specs))
    if not begun:
        end.receiver.abandon("its process has died")
    sent = threads.submit(end.sender.send, 1, 0, MEMBERS, specs, kit.Counted(weights))
    if begun:
        time.sleep(0.1)
        end.receiver.abandon("its process has died")
    with pytest.raises(TransferError, match="rank 0's engine does not take them: its process has died"):
        sent.result(20)
    end.receiver.abandon("once more")
    end.receiver.prepare(PrepareWeights(1, 1, MEMBERS, "", specs))
    again = threads.submit(end.sender.send, 1, 1, MEMBERS, specs, kit.Counted(weights))
    assert [name for name, _ in end.receiver.receive(1)] == [name for name, _ in weights]
    again.result(20)
