"""The task's own verifier judges the answer; for rows of the `reasoning_gym` dataset."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym_reward(
    prompt: str,
    completions: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    task: str,
    metadata: dict[str, Any],
    answer: str | None = None,
    question: str = "",
    options: dict[str, Any] | None = None,
    **_: Any,
) -> float:
    """The verifier's score in [0, 1] of the last `<answer>…</answer>`, else of the whole completion."""
    tagged = ANSWER.findall(completions)
    entry = {"question": question, "answer": answer, "metadata": metadata}
    score = _verifier(task, json.dumps(options or {}, sort_keys=True)).score_answer(
        (tagged[-1] if tagged else completions).strip(), entry
    )
    return float(score)


@lru_cache(maxsize=64)
def _verifier(task: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **json.loads(options), size=1, seed=0)


def warm_up() -> None:
    """Pays for the import of all tasks before the first call."""
    import reasoning_gym  # noqa: F401
