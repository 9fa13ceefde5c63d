"""The disk transport: safetensors files by version on the shared filesystem.

    sender    weights/v-N.part/ files ─► marker with sizes ─► rename to v-N ─► removes versions nobody needs
    receiver  names v-N in readers/ ─► waits for v-N with this epoch's token ─► reads file by file ─► takes its name
    away

The epoch's token, told to members as its endpoint, tells these weights from those that an earlier attempt left under
the same number. The marker names the tensors, too, for a reader that no message told of them.
"""

from __future__ import annotations

import errno
import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pekoe.pipeline import complete_folder, files
from pekoe.pipeline.complete_folder import IncompleteFolderError
from pekoe.pipeline.messages import PrepareWeights, TensorSpec
from pekoe.pipeline.pins import Pin, Pins
from pekoe.pipeline.weights.buckets import Bucket, check_tensor, plan_buckets
from pekoe.pipeline.weights.transport_setup import TransferError, TransportSetup, exhaust

BUCKETS_PER_FILE = 16

logger = logging.getLogger(__name__)


class DiskTransport:
    """Names the two ends for the registry."""

    @staticmethod
    def sender(setup: TransportSetup) -> DiskSender:
        return DiskSender(setup)

    @staticmethod
    def receiver(setup: TransportSetup) -> DiskReceiver:
        return DiskReceiver(setup)


def version_folder(weights: Path, version: int) -> Path:
    return weights / f"v-{version}"


def failure_file(weights: Path, version: int) -> Path:
    """Where the sender says that a version will not come."""
    return weights / f"v-{version}.failed.json"


class DiskSender:
    """On every trainer rank; the first of `members` writes, the others only take part in the gathers."""

    def __init__(self, setup: TransportSetup) -> None:
        self._setup = setup
        self._weights = setup.weights_folder
        self._tokens: dict[int, str] = {}
        self._written: list[int] = []
        self._readers = Pins(setup.weights_folder, patience_seconds=4 * setup.bucket_seconds)

    def open_epoch(self, epoch: int, members: tuple[int, ...]) -> str:
        """Returns the epoch's token."""
        self._tokens[epoch] = uuid.uuid4().hex
        return self._tokens[epoch]

    def send(
        self, version: int, epoch: int, members: tuple[int, ...], specs: Sequence[TensorSpec],
        weights: Iterator[tuple[str, torch.Tensor]],
    ) -> None:  # fmt: skip
        """Returns when the version is complete on disk. On failure nothing of it stays, the iterator is exhausted, and
        the error is raised and left for the readers."""
        pending = iter(weights)
        if not members or members[0] != self._setup.rank:
            exhaust(pending)
            return
        if epoch not in self._tokens:
            raise ValueError(f"epoch {epoch} was not opened on rank {self._setup.rank}")
        token = self._tokens[epoch]
        part, final = self._weights / f"v-{version}{files.PART}", version_folder(self._weights, version)
        try:
            for left_over in self._weights.glob("v-*.failed.json"):
                files.remove(left_over)
            files.put_away(part)
            files.make_folder(part)
            self._write(part, specs, pending)
            facts = {"version": version, "token": token, "tensors": [[s.name, list(s.shape), s.dtype] for s in specs]}
            complete_folder.seal(part, facts, hashed=self._setup.verify)
            files.put_away(final)
            files.publish(part, final)
        except Exception as error:
            exhaust(pending)
            for remains in (part, final):
                with suppress(OSError):
                    files.put_away(remains)
            self._tell_failure(version, token, error)
            raise
        self._written = [number for number in self._written if number != version] + [version]
        try:
            self._prune()
        except OSError as error:
            logger.warning("older weights stay on the disk for now: %s", error)

    def close(self) -> None:
        """Files stay: they belong to the run."""

    def _write(self, part: Path, specs: Sequence[TensorSpec], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        plan = plan_buckets(specs, BUCKETS_PER_FILE * self._setup.bucket_bytes)
        for number, bucket in enumerate(plan.buckets):
            tensors = _collect(bucket, weights)
            files.write_with(part / f"weights-{number:05d}.safetensors", partial(save_file, tensors))
        if (surplus := next(weights, None)) is not None:
            raise ValueError(f"tensor {surplus[0]!r} came after all announced ones")

    def _tell_failure(self, version: int, token: str, error: Exception) -> None:
        """On a filesystem that takes nothing more the readers find out by their own limit."""
        try:
            files.write_json(failure_file(self._weights, version), {"token": token, "error": str(error)})
        except OSError:
            return

    def _prune(self) -> None:
        """Keeps the newest versions, by the order of writing (numbers go back after a resume), and those in use."""
        there = {int(path.name[2:]) for path in self._weights.glob("v-*") if path.name[2:].isdecimal()}
        in_order = sorted(there - set(self._written)) + [version for version in self._written if version in there]
        for version in in_order[: -self._setup.keep_versions]:
            self._readers.remove_unless_pinned(version, version_folder(self._weights, version))
        for away in self._weights.glob(f"v-*{files.DISCARDED}"):
            files.put_away(away)


def _collect(bucket: Bucket, weights: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The bucket's tensors in host memory, as copies: the iterator may reuse its own."""
    tensors: dict[str, torch.Tensor] = {}
    for slot in bucket.slots:
        found = next(weights, None)
        if found is None:
            raise ValueError(f"weights ended before tensor {slot.spec.name!r}")
        name, tensor = found
        check_tensor(slot.spec, name, tensor)
        tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return tensors


class DiskReceiver:
    """On every rollout rank."""

    def __init__(self, setup: TransportSetup) -> None:
        self._setup = setup
        self._weights = setup.weights_folder
        self._pin = Pin(setup.weights_folder, setup.reader or f"rank-{setup.rank}")
        self._token = ""
        self._specs: tuple[TensorSpec, ...] = ()

    def prepare(self, message: PrepareWeights) -> None:
        if message.endpoint:
            self._token = message.endpoint
        if message.tensors or message.endpoint:
            self._specs = message.tensors

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every tensor from the mapped files, in the announced order; without one, in the sender's."""
        if not self._token:
            raise TransferError(f"weights version {version}: no epoch is prepared on rank {self._setup.rank}")
        self._pin.hold(version)
        try:
            marker = self._await_version(version)
            specs = self._specs or tuple(
                TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in marker["tensors"]
            )
            yield from self._read(version, [str(entry["name"]) for entry in marker["files"]], specs)
        finally:
            self._pin.release()

    def abandon(self, reason: str) -> None:
        """The sender does not wait for readers."""

    def close(self) -> None:
        self._pin.release()

    def _await_version(self, version: int) -> dict[str, Any]:
        """The marker; raises TransferError when the writer failed, or made no progress within the time limit."""
        limit = self._setup.bucket_seconds
        folder = version_folder(self._weights, version)
        progress, since, pause = self._progress(version), time.monotonic(), 0.01
        reason = "it is not there"
        while time.monotonic() - since <= limit:
            try:
                marker = complete_folder.verify(folder, deep=self._setup.verify)
                if marker.get("token") == self._token:
                    return marker
                reason = "what is there was written by an earlier attempt"
            except IncompleteFolderError as error:
                reason = str(error)
            self._raise_failure(version)
            if (now := self._progress(version)) != progress:
                progress, since = now, time.monotonic()
            time.sleep(pause)
            pause = min(pause * 1.5, 0.5)
        raise TransferError(f"weights version {version}: no progress on disk for {limit:g} s: {reason}")

    def _progress(self, version: int) -> list[tuple[str, int]]:
        part = self._weights / f"v-{version}{files.PART}"
        try:
            return sorted((path.name, path.stat().st_size) for path in part.iterdir())
        except FileNotFoundError:
            return []

    def _raise_failure(self, version: int) -> None:
        path = failure_file(self._weights, version)
        if path.exists():
            try:
                told = files.read_json(path, retry_seconds=0.0)
            except FileNotFoundError:
                return
            if told["token"] == self._token:
                raise TransferError(f"weights version {version}: the sender failed: {told['error']}")

    def _read(
        self, version: int, names: list[str], specs: tuple[TensorSpec, ...]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        expected = {spec.name: spec for spec in specs}
        for name in names:
            self._pin.hold(version)
            with self._open(version_folder(self._weights, version) / name) as content:
                keys = set(content.keys())
                if unknown := keys - expected.keys():
                    raise TransferError(f"weights version {version}: {name} holds {sorted(unknown)}, not announced")
                for spec in [spec for spec in specs if spec.name in keys]:
                    tensor = content.get_tensor(spec.name)
                    check_tensor(spec, spec.name, tensor)
                    del expected[spec.name]
                    yield spec.name, tensor
        if expected:
            raise TransferError(f"weights version {version}: tensors missing on disk: {sorted(expected)}")

    def _open(self, path: Path) -> Any:
        """Opens a file that the marker names; a name or handle that is late is tried again."""
        deadline = time.monotonic() + self._setup.bucket_seconds
        while True:
            try:
                return safe_open(path, framework="pt", device=str(self._setup.device))
            except OSError as error:
                late = isinstance(error, FileNotFoundError) or error.errno in (errno.ENOENT, errno.ESTALE)
                if not late or time.monotonic() > deadline:
                    raise TransferError(f"{path}: cannot be read: {error}") from error
            time.sleep(0.1)
