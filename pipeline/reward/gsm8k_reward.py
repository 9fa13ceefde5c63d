"""1 when the completion's final number equals the answer's, exactly; for GSM8K and for plain arithmetic."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

NUMBER = re.compile(
    r"(?<![\w.)])(?P<sign>[-\u2212+]?)(?:\$\s?)?(?P<inner>-?)(?P<digits>[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
)
BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")


def gsm8k_reward(
    prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], answer: str, **_: Any
) -> float:
    """Compares with the number after the last `####`, else in the last `\\boxed{}`, else with the last number in the
    text.

    `answer` is a number, or a solution with `#### number`. Raises ValueError when it holds no number.
    """
    gold = last_number(str(answer).rpartition("####")[2])
    if gold is None:
        raise ValueError(f"answer: {answer!r} holds no number")
    return float(last_number(final_part(completions)) == gold)


def final_part(text: str) -> str:
    """Where the final answer stands, if the text says so; else the whole text."""
    if "####" in text:
        return text.rpartition("####")[2]
    boxed = BOXED.findall(text)
    return boxed[-1] if boxed else text


def last_number(text: str) -> Fraction | None:
    """The last decimal number as an exact fraction; thousands commas and a dollar sign are allowed."""
    found = list(NUMBER.finditer(text))
    if not found:
        return None
    last = found[-1]
    value = Fraction(last["digits"].replace(",", ""))
    return -value if (last["sign"] in ("-", "\u2212")) != (last["inner"] == "-") else value
