"""The frames between a rank and the process of its engine, and how exceptions travel.

Both ends are processes of one run and one user on one host: frames are pickles. Call numbers and the numbers of loads
never come twice, so what belongs to a call that nobody waits for is simply dropped.
"""

from __future__ import annotations

import builtins
import pickle
import traceback
from dataclasses import dataclass
from typing import Any

from pekoe.pipeline.framed_stream import frame
from pekoe.pipeline.rollout.engine import (
    EngineClosedError,
    EngineFailedError,
    EngineSettings,
    GenerationRequest,
    Response,
)

OWN_ERRORS = {error.__name__: error for error in (EngineFailedError, EngineClosedError)}


NOT_FROM_A_TEXT = (UnicodeError, BaseExceptionGroup)
"""Python's own exceptions that are not made from one text."""


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An exception of the other process."""

    kind: str
    """Name of its class."""
    text: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def exception(self) -> Exception:
        """The same type where it is Python's own or the engine protocol's, else RuntimeError with the type's name in
        its text; the other process' traceback is a note."""
        found = OWN_ERRORS.get(self.kind, getattr(builtins, self.kind, None))
        error: Exception = RuntimeError(f"{self.kind}: {self.text}")
        if isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, NOT_FROM_A_TEXT):
            error = found(self.text)
        error.add_note(f"in the engine's process:\n{self.trace}")
        return error


@dataclass(frozen=True, slots=True)
class Build:
    """Rank -> host, first: what to serve."""

    engine: str
    """A registered name, or `module:Class`."""
    settings: EngineSettings
    path: tuple[str, ...]
    """The rank's `sys.path`."""
    log_level: int
    gauge_seconds: float
    """Between two reports of gauges, which also say that the process lives."""


@dataclass(frozen=True, slots=True)
class Generate:
    """Rank -> host: sample one completion."""

    number: int
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """Rank -> host: nobody waits for this completion any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Verb:
    """Rank -> host: a method of the engine. They run one after the other, beside what is being sampled."""

    number: int
    name: str
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a bucket."""

    name: str
    dtype: str
    """torch's name."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the bucket."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rank -> host: a bucket is full (or the last one); it is the host's until it says Taken."""

    load: int
    bucket: int
    size: int
    """Bytes of the bucket's memory, all of which both ends map."""
    entries: tuple[Entry, ...]
    handle: bytes = b""
    """Of a bucket on a device, where it is new: by torch's reductions."""


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """Rank -> host: that was all; `failure` says why it is not."""

    load: int
    num_tensors: int
    num_bytes: int
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Close:
    """Rank -> host: close the engine and exit."""

    number: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Host -> rank: what became of a call."""

    number: int
    value: Response | Any = None
    error: RemoteError | None = None
    gauges: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """Host -> rank: the bucket may be filled again."""

    load: int
    bucket: int


@dataclass(frozen=True, slots=True)
class Gauges:
    """Host -> rank, every `gauge_seconds`."""

    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Failed:
    """Host -> rank: the engine has stopped for good."""

    error: RemoteError


ToHost = Build | Generate | Cancel | Verb | Chunk | LoadEnd | Close
ToRank = Answer | Taken | Gauges | Failed


def encode(message: ToHost | ToRank) -> bytes:
    return frame(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def decode(body: bytes) -> Any:
    return pickle.loads(body)
