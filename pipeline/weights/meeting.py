"""Where the members of one transfer group meet: a key-value store that the sender serves, beside the group itself.

Before the group exists the members compare their settings here. While it works, errors and confirmations pass through
here, since a broken collective cannot tell its own end. Keys, under a token that strangers do not know:

    hello/RANK            a member's settings (JSON)
    go                    the sender's verdict: empty, or why no group is formed
    error                 the first failure of the epoch, by whoever had it; final
    alive/RANK            a member has seen the error
    done/VERSION/RANK     a member has every tensor of a version
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError

from pekoe.pipeline.weights.transport_setup import TransferError

LOOK_SECONDS = 0.25
GO, ERROR = "go", "error"


class Meeting:
    """One end of an epoch's store."""

    def __init__(self, server: TCPStore, token: str, timeout_seconds: float) -> None:
        self.token = token
        self.timeout_seconds = timeout_seconds
        self.store = PrefixStore(token, server)
        self._server = server

    @classmethod
    def open(cls, host: str, timeout_seconds: float) -> Meeting:
        """The sender's end: binds a free port and holds it. Does not block."""
        server = TCPStore(
            host, 0, None, True, timedelta(seconds=timeout_seconds), wait_for_workers=False
        )  # fmt: skip
        return cls(server, uuid.uuid4().hex, timeout_seconds)

    @classmethod
    def join(cls, endpoint: str, timeout_seconds: float) -> Meeting:
        """A member's end; raises TransferError when nobody answers there in time."""
        address, _, token = endpoint.partition("#")
        host, _, port = address.rpartition(":")
        if not (host and port.isdecimal() and token):
            raise ValueError(f"endpoint {endpoint!r}: must be host:port#token")
        try:
            server = TCPStore(
                host, int(port), None, False, timedelta(seconds=timeout_seconds), wait_for_workers=False
            )  # fmt: skip
        except DistError as error:
            raise TransferError(f"nobody answers at {address} within {timeout_seconds:g} s") from error
        return cls(server, token, timeout_seconds)

    @property
    def endpoint(self) -> str:
        """host:port#token; only who knows the token finds the epoch's keys."""
        return f"{self._server.host}:{self._server.port}#{self.token}"

    def present(self, rank: int, settings: dict[str, Any]) -> None:
        """A member shows its settings and waits for the verdict."""
        self._set(f"hello/{rank}", json.dumps(settings))
        self._wait([GO], f"rank {rank} waits for the sender to form the group")
        if verdict := self._get(GO):
            raise TransferError(verdict)

    def gather(self, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The sender waits for the settings of all members; raises TransferError naming those that did not come."""
        self._wait([f"hello/{rank}" for rank in ranks], "the sender waits for members to connect")
        return {rank: json.loads(self._get(f"hello/{rank}")) for rank in ranks}

    def give_verdict(self, problem: str) -> None:
        """Empty: the group is formed now."""
        self._set(GO, problem)

    def report(self, text: str, rank: int) -> None:
        """Records the epoch's first failure, and that this rank knows of it. Never raises: the other end may be
        gone."""
        try:
            self.store.compare_set(ERROR, "", text or "failed")
            self._set(f"alive/{rank}", "1")
        except DistError:
            pass

    def look(self) -> None:
        """Raises TransferError when anybody has reported a failure, or the sender's end is gone."""
        if self._check([ERROR]):
            raise TransferError(self._get(ERROR))

    def confirm(self, version: int, rank: int) -> None:
        self._set(f"done/{version}/{rank}", "1")

    def await_confirmations(self, version: int, ranks: Sequence[int]) -> None:
        """The sender waits until every member has every tensor."""
        keys = [f"done/{version}/{rank}" for rank in ranks]
        self._wait(keys, f"weights version {version}: the sender waits for confirmations")
        for key in keys:
            self.store.delete_key(key)

    def silent(self, version: int, ranks: Sequence[int], seconds: float) -> list[int]:
        """After a failure: which members neither have all of `version` nor have seen the failure within `seconds`.
        The dead and the stuck are among them."""
        deadline = time.monotonic() + seconds
        unfinished = [rank for rank in ranks if not self._check([f"done/{version}/{rank}"])]
        while True:
            missing = [rank for rank in unfinished if not self._check([f"alive/{rank}"])]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(0.02)

    def _wait(self, keys: list[str], what: str) -> None:
        began = time.monotonic()
        next_look = began + LOOK_SECONDS
        while not self._check(keys):
            now = time.monotonic()
            if now - began > self.timeout_seconds:
                missing = [key for key in keys if not self._check([key])]
                raise TransferError(f"{what}: not within {self.timeout_seconds:g} s: {', '.join(missing)}")
            if now > next_look:
                self.look()
                next_look = now + LOOK_SECONDS
            time.sleep(min(0.02, max(0.0005, (now - began) / 16)))

    def _check(self, keys: list[str]) -> bool:
        try:
            return not keys or bool(self.store.check(keys))
        except DistError as error:
            raise TransferError(f"the sender of epoch {self.token[:8]} is gone: {first_line(error)}") from error

    def _get(self, key: str) -> str:
        try:
            return bytes(self.store.get(key)).decode()
        except DistError as error:
            raise TransferError(f"the sender of epoch {self.token[:8]} is gone: {first_line(error)}") from error

    def _set(self, key: str, value: str) -> None:
        try:
            self.store.set(key, value)
        except DistError as error:
            raise TransferError(f"the sender of epoch {self.token[:8]} is gone: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Without the native stack that torch appends."""
    return str(error).partition("\n")[0]
