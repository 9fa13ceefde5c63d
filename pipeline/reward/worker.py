"""A worker: imports reward functions and calls them one at a time, in its main thread (SIGALRM works).

Started by the supervisor as `python -m pekoe.pipeline.reward.worker PARENT FD`. It waits for frames only; whatever a
function does (spins, exits, closes files, starts children) is the supervisor's business.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from pekoe.pipeline.child_processes import ignore_job_signals
from pekoe.pipeline.process_tree import be_first_out_of_memory, die_with_parent
from pekoe.pipeline.registry import REWARDS, resolve
from pekoe.pipeline.reward.frames import Answer, Call, Load, Loaded, receive_frame, send_frame

DETAIL_CHARACTERS = 2000

Functions = dict[str, Callable[..., Any]]


def load(functions: Functions, frame: Load) -> Loaded:
    """Imports a function and calls its module's `warm_up()` where there is one."""
    sys.path.extend(entry for entry in frame.path if entry not in sys.path)
    try:
        function = resolve(REWARDS, frame.target, "reward.name")
        if not callable(function):
            raise ValueError(f"reward.name: {frame.target!r} is not a function")
        warm_up = getattr(sys.modules.get(function.__module__), "warm_up", None)
        if warm_up is not None:
            warm_up()
    except BaseException:
        return Loaded(traceback.format_exc()[-DETAIL_CHARACTERS:])
    functions[frame.target] = function
    return Loaded("")


def judge(function: Callable[..., Any], call: Call, runner: asyncio.Runner) -> Answer:
    """Calls `function(prompt, completion, prompt_ids, completion_ids, **data)`; async functions are awaited."""
    started = time.monotonic()
    value, status, detail = math.nan, "error", ""
    try:
        prompt, completion, prompt_ids, completion_ids, data = pickle.loads(call.payload)
        result = function(prompt, completion, prompt_ids, completion_ids, **data)
        if inspect.isawaitable(result):
            result = runner.run(_wait_for(result))
        value, status, detail = number(result)
    except BaseException:
        detail = traceback.format_exc()[-DETAIL_CHARACTERS:]
    finally:
        signal.alarm(0)
    return Answer(call.number, value, status, detail, time.monotonic() - started)


def number(result: Any) -> tuple[float, str, str]:
    """(value, status, detail): a finite real number, also a 0-dimensional array or tensor, is `ok`, all else
    `invalid`."""
    if hasattr(result, "item") and getattr(result, "shape", None) == ():
        result = result.item()
    if not isinstance(result, numbers.Real) or not math.isfinite(result):
        return math.nan, "invalid", f"the reward function returned {result!r:.200}, which is not a finite number"
    return float(result), "ok", ""


def main() -> None:
    parent, descriptor = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    be_first_out_of_memory()
    ignore_job_signals()
    sys.stdout = sys.stderr
    channel = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    functions: Functions = {}
    with asyncio.Runner() as runner:
        while (frame := receive_frame(channel)) is not None:
            if isinstance(frame, Load):
                send_frame(channel, load(functions, frame))
            elif isinstance(frame, Call):
                send_frame(channel, judge(functions[frame.target], frame, runner))


async def _wait_for(result: Any) -> Any:
    return await result


if __name__ == "__main__":
    main()
