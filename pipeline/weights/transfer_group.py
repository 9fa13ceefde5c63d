"""The process group of one epoch: broadcasts from the sender with a time limit each, and an end that never hangs.

The group is independent of torch's default group, which rollout ranks do not have.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, Work

from pekoe.pipeline.devices.device import for_backend
from pekoe.pipeline.weights.meeting import LOOK_SECONDS, Meeting, first_line
from pekoe.pipeline.weights.transport_setup import TransferError, TransportSetup

MAY_DIFFER = ("_DEBUG", "_DEBUG_FILE", "_DEBUG_SUBSYS", "_SOCKET_IFNAME", "_IF_IP", "_IF_BASE_PORT", "_HOSTID")


def member_settings(setup: TransportSetup) -> dict[str, Any]:
    """What must fit together in a group, as JSON."""
    device = for_backend(setup.backend)
    on_device = setup.backend != "gloo"
    return {
        "backend": setup.backend,
        "bucket_bytes": setup.bucket_bytes,
        "verify": setup.verify,
        "torch": torch.__version__,
        "environment": communication_variables(device.communication_prefix, os.environ),
        "device": device.identity(setup.device.index or 0) if on_device else "",
    }


def communication_variables(prefix: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of the communication library that must not differ between members."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(prefix) and not name.endswith(MAY_DIFFER)
    }


def disagreement(settings: Mapping[int, Mapping[str, Any]]) -> str:
    """Why these members (rank -> settings) cannot form a group; empty when they can."""
    ranks = list(settings)
    first = settings[ranks[0]]
    devices: dict[str, int] = {}
    for rank in ranks:
        mine = settings[rank]
        for key in ("backend", "bucket_bytes", "verify", "torch"):
            if mine[key] != first[key]:
                return f"weights: {key} is {first[key]!r} on rank {ranks[0]} and {mine[key]!r} on rank {rank}"
        for name in sorted({*first["environment"], *mine["environment"]}):
            here, there = first["environment"].get(name), mine["environment"].get(name)
            if here != there:
                return f"weights: {name} is {here!r} on rank {ranks[0]} and {there!r} on rank {rank}; it must be equal"
        if mine["device"] and mine["device"] in devices:
            return (
                f"weights: ranks {devices[mine['device']]} and {rank} are on the same device {mine['device']}; "
                "a collective needs one each (colocated roles hand weights over locally)"
            )
        devices[mine["device"]] = rank
    return ""


class Transfer:
    """One broadcast on its way."""

    def __init__(self, work: Work, meeting: Meeting, what: str, on_host: bool) -> None:
        """`on_host`: the back-end moves bytes by host threads, so that waiting in slices is free (others are polled:
        their wait only orders streams, or ends the group at its limit)."""
        self._work = work
        self._meeting = meeting
        self._what = what
        self._on_host = on_host

    def wait(self) -> None:
        """Returns when the buffer is sent or filled; raises TransferError at the limit, or once a failure is known."""
        began = time.monotonic()
        next_look = began + LOOK_SECONDS
        limit = self._meeting.timeout_seconds
        while not self._work.is_completed():
            now = time.monotonic()
            if now - began > limit:
                raise TransferError(f"{self._what}: not finished within {limit:g} s")
            if now > next_look:
                self._meeting.look()
                next_look = now + LOOK_SECONDS
            self._wait_a_little(now - began)
        try:
            self._work.wait()
        except RuntimeError as error:
            self._meeting.look()
            raise TransferError(f"{self._what}: {first_line(error)}") from error

    def _wait_a_little(self, waited_seconds: float) -> None:
        if not self._on_host:
            time.sleep(min(0.02, max(0.00005, waited_seconds / 16)))
            return
        # a slice that ends early says so by an exception; a failure of the work is raised again after the loop
        with contextlib.suppress(RuntimeError):
            self._work.wait(timedelta(seconds=LOOK_SECONDS))


class TransferGroup:
    """The sender is rank 0 of it, receivers follow in the order of `members`."""

    def __init__(self, setup: TransportSetup, meeting: Meeting, members: Sequence[int]) -> None:
        """Blocks until all members are there; raises TransferError when they are not in time."""
        self._meeting = meeting
        self._pending: Work | None = None
        self._on_host = setup.backend == "gloo"
        limit = timedelta(seconds=setup.bucket_seconds)
        store = PrefixStore("group", meeting.store)
        index = members.index(setup.rank)
        try:
            self._group: Any = for_backend(setup.backend).process_group(store, index, len(members), limit, setup.host)
        except RuntimeError as error:
            meeting.look()
            raise TransferError(
                f"weights: the group of ranks {list(members)} was not formed: {first_line(error)}"
            ) from error

    def broadcast(self, buffer: torch.Tensor, what: str) -> Transfer:
        """Starts a broadcast of `buffer` from the sender; `what` names it in errors."""
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.asyncOp = True
        try:
            work = self._group.broadcast([buffer], options)
        except RuntimeError as error:
            self._meeting.look()
            raise TransferError(f"{what}: {first_line(error)}") from error
        self._pending = work
        return Transfer(work, self._meeting, what, self._on_host)

    def retire(self) -> None:
        """Lets the group go. One with an operation still under way is held by a thread of its own until the back-end's
        own limit ends that: dropping it earlier would block the whole process."""
        group, work = self._group, self._pending
        self._group = self._pending = None
        if group is None or work is None or work.is_completed():
            return
        group.abort()
        threading.Thread(target=_hold, args=(group, work), name="retired-transfer-group", daemon=True).start()


def _hold(group: object, work: Work) -> None:
    while not work.is_completed():
        time.sleep(0.1)
