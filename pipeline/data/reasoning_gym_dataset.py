"""Procedurally generated reasoning tasks with verifiers (Reasoning Gym, arXiv:2505.24760), by name."""

from __future__ import annotations

import difflib

from pekoe.pipeline.config.dataset import DatasetConfig
from pekoe.pipeline.records import Example

GOLDEN = 1327217885
"""2^31 / golden ratio, odd: multiples modulo 2^31 lie as far from each other as can be (Knuth, TAOCP 3, 6.4)."""


def task_seed(seed: int) -> int:
    """The task's own seed, below 2^31: seeds 0..n-1 lie at least 2^31 / (2.3 n) apart.

    Tasks seed row i with `seed + i`, so neighbouring seeds would share all rows but one: a validation set with seed 2
    would be the training set with seed 1, moved by one row.
    """
    return seed * GOLDEN % 2**31


class ReasoningGymDataset:
    """The task named by `path` (`countdown`, `basic_arithmetic`, `gsm_symbolic`, …) with `args` as its options.

    `size` rows are generated from `seed`, each when it is asked for. `data` holds what the `reasoning_gym` reward
    needs to find the task's verifier again: `task`, `options`, and the row's `answer` and `metadata`.
    """

    def __init__(self, config: DatasetConfig) -> None:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if config.path not in DATASETS:
            near = difflib.get_close_matches(config.path, DATASETS, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"path: {config.path!r} is not a reasoning-gym task{hint}; there are {len(DATASETS)} of them"
            )
        if config.size is None:
            raise ValueError("size: a generated dataset needs a number of examples, got null")
        try:
            self._source = reasoning_gym.create_dataset(
                config.path, **config.args, seed=task_seed(config.seed), size=config.size
            )
        except (TypeError, AssertionError) as error:
            raise ValueError(f"args: {config.args} do not suit the task {config.path!r}: {error}") from error
        self._config = config

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Example:
        row = self._source[index]
        data = {
            "task": self._config.path,
            "options": dict(self._config.args),
            "question": row["question"],
            "answer": row["answer"],
            "metadata": row["metadata"],
        }
        name = f"{self._config.path}/{self._config.seed}/{index}"
        return Example(index, name, ({"role": "user", "content": row["question"]},), data)
