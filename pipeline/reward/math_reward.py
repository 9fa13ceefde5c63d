"""1 when the completion's final answer equals the gold answer as mathematics, by math-verify.

math-verify's own time limits need SIGALRM, thus a main thread, and turn an overrun into "wrong". They are switched
off: this works in any thread, and the pool's hard limit bounds it and says `timeout`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

BOX = "\\boxed{"
INFINITY = re.compile(r"(?<![A-Za-z\\])oo(?![A-Za-z])")


def math_reward(
    prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], answer: str, **_: Any
) -> float:
    """Judges the last `\\boxed{…}` of the completion, else the last expression in it, against `answer` (TeX or plain).

    Gold comes first: the comparison is not symmetric. Raises ValueError when the gold answer cannot be parsed.
    """
    from math_verify import verify

    gold = parse_gold(str(answer))
    boxed = last_boxed(completions)
    found = _parse(completions if boxed is None else f"{BOX}{boxed}}}")
    return float(bool(found) and verify(list(gold), found, timeout_seconds=None))


def last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{…}` with balanced braces; None when there is none."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    depth = 1
    for position in range(start + len(BOX), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len(BOX) : position]
    return None


@lru_cache(maxsize=4096)
def parse_gold(answer: str) -> tuple[Any, ...]:
    """The gold answer as math-verify's candidates: its last box, else the number after `####`, else all of it in a
    box."""
    content = last_boxed(answer)
    if content is None:
        content = answer.rpartition("####")[2].strip().strip("$")
    found = _parse(f"{BOX}{content}}}")
    if not found:
        raise ValueError(f"answer: math-verify cannot parse {answer!r}")
    return tuple(found)


def warm_up() -> None:
    """Pays for math-verify's and SymPy's lazy imports before the first call."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    math_reward("", "$\\boxed{\\frac{1}{2}}$", [], [], answer="0.5")
    math_reward("", "so it is 7.", [], [], answer="x^2 + 1")


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return list(parse(INFINITY.sub(r"\\infty", text), parsing_timeout=None))
