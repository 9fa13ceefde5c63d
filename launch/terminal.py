"""Messages on the terminal that a run was started from, beside the live display that its head draws there.

The display hides the cursor, leaves it at the end of its last line, and clears its own lines (upwards from the cursor)
before it draws itself again.
"""

from __future__ import annotations

import contextlib
import sys

SHOW_CURSOR = "\x1b[?25h"
DISPLAY_LINES = 6
"""At least the display's height: a message with so many lines below it is not cleared."""


def has_display() -> bool:
    """Does the head draw on this process' standard output?"""
    return sys.stdout.isatty()


def say(text: str, fresh: bool = True, above_display: bool = False) -> None:
    """A message for people on standard error, on a fresh line; a terminal that is gone is no error."""
    beside = has_display() and sys.stderr.isatty()
    before = "\n" if beside and fresh else ""
    room = "\n" * DISPLAY_LINES if beside and above_display else ""
    with contextlib.suppress(OSError):
        print(f"{before}pekoe: {text}{room}", file=sys.stderr, flush=True)


def give_back() -> None:
    """Shows the cursor again: a display that was killed could not."""
    if has_display():
        with contextlib.suppress(OSError):
            sys.stdout.write(SHOW_CURSOR)
            sys.stdout.flush()
