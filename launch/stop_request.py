"""A stop signal as a file: `RUN/logs/<attempt>/stop.json`, written by the launcher, looked for by the head.

srun passes SIGUSR2 on to ranks that are there; hydra passes nothing on that a rank could survive, and a rank that is
not there yet hears nothing. The head tells all others, as it does of a signal of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from pekoe.launch.fence import Fence
from pekoe.launch.stop_signals import StopSignals
from pekoe.pipeline import files
from pekoe.pipeline.run_directory import RunDirectory

logger = logging.getLogger(__name__)

NAME = "stop.json"
LOOK_SECONDS = 1.0
FENCE_SECONDS = 5.0


def stop_path(run: RunDirectory, attempt: int) -> Path:
    return run.logs(attempt) / NAME


def request_stop(run: RunDirectory, attempt: int, number: int) -> None:
    """As if this signal had come to the head of the attempt."""
    path = stop_path(run, attempt)
    files.make_folder(path.parent)
    files.write_json(path, {"signal": number, "time": time.time()})


@dataclass(frozen=True)
class HeadWatch:
    """What the head looks for in the run directory while its attempt runs."""

    fence: Fence
    signals: StopSignals

    def run(self, over: threading.Event) -> None:
        """A thread's loop until `over` is set: a stop request, a newer attempt (SupersededError). A filesystem that
        does not answer says neither."""
        path = stop_path(self.fence.run, self.fence.attempt)
        next_fence = time.monotonic() + FENCE_SECONDS
        while not over.wait(LOOK_SECONDS):
            try:
                if not self.signals.requested.is_set() and path.exists():
                    self.signals.request(int(files.read_json(path)["signal"]))
                if time.monotonic() >= next_fence:
                    next_fence = time.monotonic() + FENCE_SECONDS
                    self.fence.check()
            except OSError as error:
                logger.warning("the run directory cannot be read: %s", error)
