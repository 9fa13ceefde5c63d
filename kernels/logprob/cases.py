"""What the self-test tries of the logprob room: odd shapes, few rows and none, all precisions, impossible tokens,
targets outside. Gradients are of random slopes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pekoe.kernels.logprob.reference import hidden_statistics, logits_statistics
from pekoe.kernels.self_test import Case, CaseMaker

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 1e-2}
SHAPES = ((0, 5, 7), (1, 3, 1), (13, 17, 517), (37, 9, 1531))
"""(K, H, V)"""


@dataclass
class Maker:
    """Random tensors of a seed, in one dtype."""

    seed: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype or self.dtype)

    def targets(self, count: int, num_columns: int) -> Tensor:
        """Some lie outside, as those of another part of the vocabulary do."""
        return torch.randint(-2, num_columns + 3, (count,), generator=self.generator)

    def slopes(self, maximum: Tensor) -> dict[str, Tensor]:
        a, b, c = (self.normal(len(maximum), dtype=maximum.dtype) for _ in range(3))
        return {"maximum": maximum, "a": a, "b": b, "c": c}

    def of_hidden(self, num_rows: int, size: int, num_columns: int) -> dict[str, object]:
        return {
            "hidden": self.normal(num_rows, size),
            "weight": self.normal(num_columns, size),
            "bias": None if num_rows == 13 else self.normal(num_columns),
            "targets": self.targets(num_rows, num_columns),
            "num_valid": num_columns - 1 if num_columns > 1 else num_columns,
            "temperature": 0.7,
        }

    def of_logits(self, num_rows: int, num_columns: int) -> dict[str, object]:
        logits = 5 * self.normal(num_rows, num_columns)
        impossible = torch.rand(logits.shape, generator=self.generator) < 0.2
        impossible[:, :1] = False
        return {
            "logits": logits.masked_fill(impossible, -torch.inf),
            "targets": self.targets(num_rows, num_columns),
            "temperature": 1.3,
        }


def makers(seed: int) -> list[tuple[Maker, float]]:
    return [(Maker(seed, dtype), tolerance) for dtype, tolerance in TOLERANCE.items()]


def of_hidden_statistics(seed: int) -> list[Case]:
    return [
        Case({**make.of_hidden(*shape), "moments": moments}, tolerance)
        for make, tolerance in makers(seed)
        for shape in SHAPES
        for moments in (False, True)
    ]


def of_hidden_gradients(seed: int) -> list[Case]:
    cases = []
    for make, tolerance in makers(seed):
        for shape in SHAPES:
            arguments = make.of_hidden(*shape)
            maximum = hidden_statistics(**arguments, moments=False)[0]  # type: ignore[arg-type]
            needs = (True, True, arguments["bias"] is not None)
            cases.append(Case({**arguments, **make.slopes(maximum), "needs": needs}, tolerance))
    return cases


def of_logits_statistics(seed: int) -> list[Case]:
    return [
        Case({**make.of_logits(num_rows, num_columns), "moments": moments, "chunk_rows": 5}, tolerance)
        for make, tolerance in makers(seed)
        for num_rows, _, num_columns in SHAPES
        for moments in (False, True)
    ]


def of_logits_gradient(seed: int) -> list[Case]:
    cases = []
    for make, tolerance in makers(seed):
        for num_rows, _, num_columns in SHAPES:
            arguments = make.of_logits(num_rows, num_columns)
            maximum = logits_statistics(**arguments, moments=False, chunk_rows=num_rows)[0]  # type: ignore[arg-type]
            cases.append(Case({**arguments, **make.slopes(maximum), "chunk_rows": 5}, tolerance))
    return cases


CASES: dict[str, CaseMaker] = {
    "logprob.hidden_statistics": of_hidden_statistics,
    "logprob.hidden_gradients": of_hidden_gradients,
    "logprob.logits_statistics": of_logits_statistics,
    "logprob.logits_gradient": of_logits_gradient,
}
