"""Reading a checkpoint of a run that may be going on: it is pinned meanwhile, so that the run's head keeps it."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pekoe.pipeline import complete_folder
from pekoe.pipeline.complete_folder import IncompleteFolderError
from pekoe.pipeline.pins import Pin
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.train.checkpoint import Checkpoints

logger = logging.getLogger(__name__)

BEAT_SECONDS = 10.0
"""Well below the head's patience with silent readers."""
TRIES = 5
SETTLE_SECONDS = 2.0
"""A head that looked at the pins in the same moment takes so long, at most, to put the folder back."""


@contextmanager
def pinned_checkpoint(run: RunDirectory, step: int | None = None) -> Iterator[tuple[int, Path]]:
    """(step, folder) of the newest (or the named) complete checkpoint, which stays until the block is left.

    Names and sizes are verified. Raises ValueError when there is none such, CheckpointError when all are damaged.
    """
    checkpoints = Checkpoints(run, keep=1)
    pin = Pin(run.checkpoints, f"reader-{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}")
    over = threading.Event()
    try:
        found = _pin_one(run.path, checkpoints, pin, step)
        beat = threading.Thread(target=_beat, args=(pin, found[0], over), name="pin", daemon=True)
        beat.start()
        try:
            yield found
        finally:
            over.set()
            beat.join()
    finally:
        with suppress(OSError):
            pin.release()


def _pin_one(run: Path, checkpoints: Checkpoints, pin: Pin, step: int | None) -> tuple[int, Path]:
    """Whoever deletes looks at the pins after it has renamed the folder away: one that is there after it was pinned
    stays."""
    for _ in range(TRIES):
        found = checkpoints.latest() if step is None else (step, checkpoints.complete(step))
        if found is None:
            raise ValueError(f"{run}: no complete checkpoint; allowed: a run that has saved one (recover.freq_steps)")
        _hold(pin, found[0])
        try:
            complete_folder.verify(found[1], retry_seconds=SETTLE_SECONDS)
        except IncompleteFolderError:
            logger.info("%s was removed just now", found[1])
            continue
        return found
    raise ValueError(
        f"step: checkpoints went away {TRIES} times while they were looked at; a higher recover.keep helps"
    )


def _beat(pin: Pin, step: int, over: threading.Event) -> None:
    while not over.wait(BEAT_SECONDS):
        _hold(pin, step)


def _hold(pin: Pin, step: int) -> None:
    """A run directory that cannot be written to (an archive, a full disk) can still be read."""
    try:
        pin.hold(step)
    except OSError as error:
        logger.warning("the checkpoint of step %d cannot be pinned: %s; a running job may remove it", step, error)
