"""Weights on disk for attached worlds: written beside training, one version at a time, the newest one that is wanted.

The learner writes in its own order, so an order goes out at a step boundary only (while a batch is gathered, or right
after an update); its answer is a message. Attached worlds hear of a version when it is complete.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pekoe.pipeline.control.disk_watch import RETRY_SECONDS, DiskWatch
from pekoe.pipeline.messages import Post, ShareWeights, WeightsShared

logger = logging.getLogger(__name__)

MAX_TRIES = 3
WHO = "weights for attached worlds"


class SharedWeightsError(RuntimeError):
    """A version could not be written, for another reason than lack of room."""


@dataclass
class SharedWeights:
    """Belongs to the controller's thread."""

    post: Post
    trainer_ranks: Sequence[int]
    announce: Callable[[WeightsShared], None]
    """Tells attached worlds of a version that is complete."""
    in_flight: int | None = None
    written: int = -1
    failures: int = 0
    not_before: float = 0.0

    def bring(self, version: int) -> None:
        """At a step boundary: orders this version to be written, unless it is, or one is in flight (the next boundary
        then orders its own)."""
        if self.in_flight is not None or self.written == version or time.monotonic() < self.not_before:
            return
        self.in_flight = version
        for rank in self.trainer_ranks:
            self.post.send(rank, ShareWeights(version))

    def on_shared(self, message: WeightsShared, disk: DiskWatch) -> None:
        """The version in flight is complete, or not. Raises SharedWeightsError after MAX_TRIES failures in a row."""
        self.in_flight = None
        if not message.error:
            disk.accept(WHO)
            self.written, self.failures = message.version, 0
            self.announce(message)
            return
        self.not_before = time.monotonic() + RETRY_SECONDS
        if message.disk_is_full:
            disk.refuse(WHO, message.error)
            return
        self.failures += 1
        if self.failures == MAX_TRIES:
            raise SharedWeightsError(
                f"version {message.version} could not be written for attached worlds: {message.error}"
            )
