"""What every role of a run is built from, and the world as the roles see it."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pekoe.pipeline.config.check import context_limit
from pekoe.pipeline.config.paths import model_context_limit
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.devices.device import Device
from pekoe.pipeline.messages import Post
from pekoe.pipeline.observe.phases import SetPhase
from pekoe.pipeline.observe.progress_watch import ProgressWatch, ReadProgress
from pekoe.pipeline.rollout.child.nursery import EngineNursery
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.start import RunData, StartPoint

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

HEAD = 0
"""World rank of the head: trainer ranks come first."""
NUM_CHECK_SEQUENCES, CHECK_LENGTH = 4, 16


class World(Protocol):
    """The part of `launch/world.py` that roles use."""

    rank: int
    size: int
    hosts: tuple[str, ...]
    """Host of each rank."""
    address: str
    """Under which other ranks reach this one."""
    job_id: str | None
    """Slurm job that the world runs in, with the array's task; None outside of jobs."""
    attempt: int
    post: Post
    stop_requested: threading.Event
    gauges: Callable[[], dict[str, float]] | None
    ends_at: float | None
    """When the job ends, seconds since 1970, equal on all ranks; None: not known."""

    def listen(self) -> tuple[socket.socket, str]: ...
    def share(self, value: Any, root: int = 0) -> Any: ...
    def collect(self, value: Any) -> list[Any]: ...
    def start(self, name: str, target: Callable[[], Any]) -> None: ...
    def serve(self, done: threading.Event) -> None: ...
    def abort(self, error: BaseException, thread: str = "") -> None: ...
    def set_role(self, role: str) -> None: ...
    def set_phase(self, phase: str) -> None: ...
    def set_thread_phase(
        self, who: str, phase: str, limit: float | None = None, on: Sequence[int] = (), moved: float | None = None
    ) -> None: ...
    def add_check(self, check: Callable[[], None]) -> None: ...
    def add_watch(self, watch: ProgressWatch) -> None: ...
    def stacks_of(self, ranks: Sequence[int], seconds: float = 2.0) -> dict[int, str]: ...
    def peer_failed(self) -> bool: ...
    def check_newest(self) -> None: ...
    def set_version(self, version: int) -> None: ...


class EnginePart(Protocol):
    """One engine of the allocation."""

    @property
    def engine(self) -> str: ...
    @property
    def instances(self) -> tuple[tuple[int, ...], ...]: ...


class Ranks(Protocol):
    """The part of the placement (`launch/placement.py`) that roles use."""

    @property
    def trainer_ranks(self) -> tuple[int, ...]: ...
    @property
    def rollout_ranks(self) -> tuple[int, ...]: ...
    @property
    def rollout_leaders(self) -> tuple[int, ...]: ...
    @property
    def colocated(self) -> bool: ...
    @property
    def actor(self) -> EnginePart: ...
    @property
    def rollout(self) -> EnginePart | None: ...
    def roles_of(self, rank: int) -> tuple[str, ...]: ...


@dataclass
class RunContext:
    """One rank of one attempt."""

    config: RunConfig
    world: World
    ranks: Ranks
    run: RunDirectory
    device: Device
    device_index: int
    """Among the devices that this process sees."""
    start: StartPoint
    data: RunData
    attached: str = ""
    """Name of the attached world; empty for a rank of the run's own world."""
    nursery: EngineNursery | None = None
    """Starts processes for engines; None where this rank's engine runs in its own."""
    building: threading.Lock = field(default_factory=threading.Lock)
    """Held while a model is built: transformers changes global state meanwhile, and a colocated rank builds two."""
    gauges: dict[str, Callable[[], dict[str, float]]] = field(default_factory=dict)
    """What the parts of this rank measure, for heartbeats."""

    def add_gauges(self, who: str, read: Callable[[], dict[str, float]]) -> None:
        """Heartbeats show them as `who/name`; `read` is called on the main thread."""
        self.gauges[who] = read
        self.world.gauges = self.read_gauges

    def read_gauges(self) -> dict[str, float]:
        """What all parts say now; one that cannot say is left out, since a gauge must not end a run."""
        found = {}
        for who, read in list(self.gauges.items()):
            try:
                found.update({f"{who}/{name}": value for name, value in read().items()})
            except RuntimeError:
                logger.debug("the gauges of %s cannot be read", who, exc_info=True)
        return found

    @property
    def torch_device(self) -> torch.device:
        return self.device.torch_device(self.device_index)

    @property
    def num_steps(self) -> int:
        """Training steps of the whole run."""
        return self.start.num_steps

    @property
    def tokenizer_path(self) -> str:
        return self.config.tokenizer_path or self.config.actor.path

    @property
    def is_head(self) -> bool:
        return self.world.rank == HEAD

    def phase_of(self, who: str) -> SetPhase:
        """A setter of the phase of one of this rank's threads: what it does or waits for, for how long at most
        (`limit` in seconds, without progress since `moved`), and on which ranks (`on`). Heartbeats show them all."""

        def set_phase(
            phase: str, *, limit: float | None = None, on: Sequence[int] = (), moved: float | None = None
        ) -> None:
            self.world.set_thread_phase(who, phase, limit, on, moved)

        return set_phase

    def watch(self, who: str, read: ReadProgress, limit: float | None = None) -> None:
        """Ends the world with StalledRoleError when a thread is busy for `limit` seconds without progress.

        `read()` gives (a counter that grows with the work done, is there work to do); the main thread calls it about
        every second, so it must be cheap. `limit` is `cluster.progress_seconds` where none is given.
        """
        self.world.add_watch(ProgressWatch(who, read, limit or self.config.cluster.progress_seconds))


def sequence_limit(config: RunConfig) -> int:
    """Most tokens of prompt plus completion: what the configuration and the model allow, and a trainer can take."""
    budget = config.actor.mb_spec.max_tokens_per_mb
    limit = context_limit(config, model_context_limit(config.actor.path))
    return budget if limit is None else min(limit, budget)


def evaluation_limit(config: RunConfig) -> int:
    """Most tokens of prompt plus completion in evaluation: its own `max_tokens` where given (nothing is trained on)."""
    own = config.eval_gconfig.max_tokens if config.eval_gconfig is not None else None
    return sequence_limit(config) if own is None else own


def model_facts(path: str) -> dict[str, Any]:
    """`config.json` of a model folder."""
    facts: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
    return facts


def check_sequences(config: RunConfig) -> list[list[int]]:
    """Fixed token sequences on which engines and trainer compare log-probs after each update, within the context."""
    rng = np.random.Generator(np.random.Philox(config.seed))
    size = int(model_facts(config.actor.path)["vocab_size"])
    length = min(CHECK_LENGTH, sequence_limit(config))
    return [rng.integers(0, size, length).tolist() for _ in range(NUM_CHECK_SEQUENCES)]
