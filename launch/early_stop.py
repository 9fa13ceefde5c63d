"""A stop signal while the driver has no world: it waits for an earlier attempt, begins one, or is between two of them.

The signal's default would end the driver without a word, and the job would not go on. Here it becomes an exception; a
world that is started takes the handlers for its time, and gives them back.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from pekoe.launch.stop_signals import STOP_SIGNALS


class StoppedEarly(Exception):
    """A stop signal came while there was no world."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} before the world was there")
        self.number = number


@contextmanager
def stop_signals_raise() -> Iterator[None]:
    """Main thread only. The first stop signal raises StoppedEarly where the program is; later ones change nothing."""

    def on_signal(number: int, frame: object) -> None:
        for other in STOP_SIGNALS:
            signal.signal(other, lambda *_: None)
        raise StoppedEarly(number)

    before = {number: signal.signal(number, on_signal) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
