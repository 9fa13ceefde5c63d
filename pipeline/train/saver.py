"""Writes staged checkpoints beside training: one save in flight, the next one waits for it.

learner thread    wait for the last save ─► engines' stage(), random states   (training stands still until here)
saver thread      engines' files, then the rank's other files ─► Saved to the head
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pekoe.pipeline import files
from pekoe.pipeline.messages import Post, Saved, WrittenFile
from pekoe.pipeline.train.engine import StagedState

logger = logging.getLogger(__name__)

ERROR_CHARACTERS = 2000


@dataclass(frozen=True)
class StagedSave:
    """One save on one rank, copied at a step boundary; its version is its id."""

    version: int
    folder: Path
    """Where the checkpoint is being put together."""
    engines: Mapping[str, StagedState]
    """By the folder of their files below `folder`; the same on all ranks, in one order."""
    others: Mapping[str, bytes]
    """This rank's other files by name."""
    began: float
    """When the order came (monotonic)."""
    stage_seconds: float


class Saver:
    """Belongs to the learner's thread; `start_thread` must end the run when a thread raises."""

    def __init__(
        self, post: Post, head: int, start_thread: Callable[[str, Callable[[], None]], None], asynchronous: bool
    ) -> None:
        self._post, self._head = post, head
        self._start_thread = start_thread
        self._asynchronous = asynchronous
        self._idle = threading.Event()
        self._idle.set()

    @property
    def is_busy(self) -> bool:
        return not self._idle.is_set()

    def wait(self) -> None:
        """Until no save is in flight; how long that may take is for the head to say."""
        self._idle.wait()

    def begin(self, save: StagedSave) -> None:
        """Writes it and tells the head, on a thread of its own or at once."""
        if self.is_busy:
            raise AssertionError(f"save of version {save.version} while another one is in flight")
        if not self._asynchronous:
            self._post.send(self._head, write_save(save))
            return
        self._idle.clear()
        self._start_thread("saver", lambda: self._run(save))

    def _run(self, save: StagedSave) -> None:
        saved = write_save(save)
        # The next one may begin before the head hears of this one: each answer carries its version.
        self._idle.set()
        self._post.send(self._head, saved)


def write_save(save: StagedSave) -> Saved:
    """All of this rank's files, durable and hashed. What the disk refuses is told in the answer; anything else is
    raised."""
    written: list[WrittenFile] = []
    failure: OSError | None = None
    try:
        for engine_folder, staged in save.engines.items():
            for file in staged.write(save.folder / engine_folder):
                written.append(WrittenFile(f"{engine_folder}/{file.name}", file.num_bytes, file.blake2b))
        # Only now, where no collective follows, may something fail on this rank alone.
        for engine_folder in save.engines:
            files.fsync_folder(save.folder / engine_folder)
        for name, content in sorted(save.others.items()):
            with files.create(save.folder / name) as file_out:
                file_out.write(content)
            written.append(WrittenFile(name, file_out.num_bytes, file_out.digest))
        files.fsync_folder(save.folder)
    except OSError as error:
        logger.exception("checkpoint of version %d failed", save.version)
        failure = error
        # A refusal is every rank's: none of them writes the engines that come after it.
        for staged in save.engines.values():
            staged.discard()
    return Saved(
        save.version,
        seconds=time.monotonic() - save.began,
        stage_seconds=save.stage_seconds,
        files=() if failure else tuple(written),
        error=f"{type(failure).__name__}: {failure}"[:ERROR_CHARACTERS] if failure else "",
        disk_is_full=failure is not None and files.is_full(failure),
    )
