"""The weights of a rollout rank: its engine stops, takes a version, is checked, goes on. Part of the rank loop.

```
 PrepareWeights ─► the engine stops (interrupt: at a token; drain: when what runs has ended), on a thread of its own
                     └─► Paused ─► WeightsReady ─► … ─► LoadWeights ─► load ─► log-probs ─► resume ─► WeightsLoaded
                   overlap: WeightsReady at once ─► LoadWeights ─► receive beside decoding ─► stop, load, as above
```
The loop goes on with other messages while the engine stops and while the head waits for other engines. A later
PrepareWeights replaces an earlier one, whatever state that is in. Nothing is answered while the engine is built anew:
the head has been told, and asks again once the engine stands.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pekoe.pipeline.messages import (
    EngineFailed,
    EngineRestored,
    LoadWeights,
    PhaseReached,
    PrepareWeights,
    WeightsLoaded,
    WeightsReady,
)
from pekoe.pipeline.rollout.engine import EngineFailedError
from pekoe.pipeline.rollout.staged_weights import StagedWeights

if TYPE_CHECKING:
    import torch

    from pekoe.pipeline.rollout.rank_loop import RolloutParts

logger = logging.getLogger(__name__)

ERROR_CHARACTERS = 2000


class WeightSource(Protocol):
    """The receiving end of a transport (`weights/transport.py`)."""

    def prepare(self, message: PrepareWeights) -> None: ...
    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]: ...
    def abandon(self, reason: str) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Paused:
    """From the thread that pauses: decoding has stopped, or why not."""

    error: BaseException | None = None


class WeightIntake:
    """Owns the engine's pauses. Belongs to the thread of the rank loop."""

    def __init__(self, parts: RolloutParts) -> None:
        self.parts = parts
        self.wanted: PrepareWeights | None = None
        """What the head has asked for last, until it is loaded."""
        self.is_down = False
        """The engine is being built anew."""
        self.is_paused = False
        self.is_asleep = False
        self.pausing: threading.Thread | None = None
        self.stopped_at = 0.0
        """Since when decoding stands still (monotonic seconds)."""
        self.staged = StagedWeights()

    def describe(self) -> str:
        """What the engine is waited for, or waits for; empty while it decodes."""
        if self.is_down:
            return "the engine is built anew"
        if self.pausing is not None:
            return "the engine stops for weights"
        return "waiting for weights" if self.is_paused and self.wanted is not None else ""

    def prepare(self, message: PrepareWeights) -> None:
        """The engine is to stop for a version."""
        if self.is_down:
            logger.info("version %d is not for this rank: its engine is being built anew", message.version)
            return
        self.wanted = message
        self.parts.weights.prepare(message)
        if self.is_paused or (self.parts.update_mode == "overlap" and self.pausing is None):
            self._say_ready()
        elif self.pausing is None:
            self.pausing = threading.Thread(target=self._pause_beside, name="engine-pause", daemon=True)
            self.pausing.start()

    def on_paused(self, message: Paused) -> None:
        """The engine has stopped. Raises what the engine said when it could not."""
        if message.error is not None:
            raise message.error
        if self.pausing is None:
            return
        self._note_pause()
        if self.wanted is not None:
            self._say_ready()
        elif not self.is_down:
            self.resume()

    def load(self, message: LoadWeights) -> None:
        """All members are ready. After a failed load the engine serves nothing until the next."""
        wanted = self.wanted
        if wanted is None or (wanted.version, wanted.epoch) != (message.version, message.epoch):
            logger.info("version %d, epoch %d is not wanted any more", message.version, message.epoch)
            return
        self.wanted = None
        self.parts.set_phase("loading weights")
        began = time.monotonic()
        try:
            self._take(wanted.version)
            ids = [np.asarray(sequence, dtype=np.int32) for sequence in self.parts.check_sequences]
            scored = self.parts.engine.logprobs(ids, self.parts.sampling.temperature)
            check = tuple(float(x) for row in scored for x in row)
        except EngineFailedError:
            logger.exception("the engine has failed while version %d was loaded", wanted.version)
            return
        except (RuntimeError, OSError, TimeoutError, ValueError) as failure:
            logger.exception("version %d did not load", wanted.version)
            text = f"{type(failure).__name__}: {failure}"[:ERROR_CHARACTERS]
            since = self.stopped_at if self.is_paused else began
            self._tell(WeightsLoaded(wanted.version, time.monotonic() - since, (), text))
            return
        self.parts.set_version(wanted.version)
        self.resume()
        self._tell(WeightsLoaded(wanted.version, time.monotonic() - self.stopped_at, check))

    def on_failed(self, message: EngineFailed) -> None:
        """The engine is built anew: the members of a transfer that has not begun must not wait for this one."""
        self.is_down = True
        if self.wanted is not None:
            self.wanted = None
            self.parts.weights.abandon("the engine has failed")
            self._wake()
        self._tell(message)

    def on_restored(self, message: EngineRestored) -> None:
        """The engine stands again: the head brings it the current version."""
        self.is_down = False
        self._tell(message)

    def rest(self, version: int) -> None:
        """Colocated: the device is the trainer's now."""
        self.parts.set_phase("resting")
        self._pause_now()
        if not self.is_asleep:
            self.parts.engine.sleep()
            self.is_asleep = True
        self._tell(PhaseReached(version))

    def resume(self) -> None:
        """On with the sequences, with the weights that are there."""
        self._wake()
        if self.is_paused:
            self.is_paused = False
            self.parts.engine.resume()

    def _take(self, version: int) -> None:
        """The weights into the engine, which stands still meanwhile, or (overlap) for the second half of it. One that
        sleeps wakes after the load: its cache needs no memory while old and new weights do."""
        weights: Iterable[tuple[str, torch.Tensor]] = self.parts.weights.receive(version)
        try:
            if not self.is_paused:
                self.staged.fill(weights)
                self._pause_now()
                weights = self.staged
            self.parts.engine.load_weights(weights, version)
        except BaseException as error:
            self.parts.weights.abandon(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._wake()

    def _say_ready(self) -> None:
        assert self.wanted is not None
        self._tell(WeightsReady(self.wanted.version, self.wanted.epoch))

    def _pause_beside(self) -> None:
        try:
            self.parts.engine.pause(drain=self.parts.update_mode == "drain")
            outcome = Paused()
        except BaseException as error:
            outcome = Paused(error)
        self.parts.inbox.put((self.parts.post.rank, outcome))  # type: ignore[arg-type]

    def _pause_now(self) -> None:
        """Stops at a token; one that is stopping already is waited for."""
        if self.pausing is not None:
            self.pausing.join()
            self._note_pause()
        elif not self.is_paused:
            self.parts.engine.pause()
            self._note_pause()

    def _note_pause(self) -> None:
        self.pausing, self.is_paused, self.stopped_at = None, True, time.monotonic()

    def _wake(self) -> None:
        if self.is_asleep:
            self.parts.engine.wake()
            self.is_asleep = False

    def _tell(self, message: EngineFailed | EngineRestored | PhaseReached | WeightsLoaded | WeightsReady) -> None:
        self.parts.post.send(self.parts.head, message)
