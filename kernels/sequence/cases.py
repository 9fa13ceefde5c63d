"""What the self-test tries of the sequence room: sequences of odd lengths, empty ones, none at all; both precisions."""

from __future__ import annotations

import torch
from torch import Tensor

from pekoe.kernels.self_test import Case, CaseMaker

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


class Maker:
    """Random tensors of a seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def whole(self, low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high, (size,), generator=self.generator)

    def normal(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(size, generator=self.generator, dtype=dtype)

    def boundaries(self) -> list[Tensor]:
        """[S+1] of sequences of 0 to 70 tokens; of one; of none."""
        some = torch.cat([torch.zeros(1, dtype=torch.int64), self.whole(0, 71, 9).cumsum(0)])
        return [some, torch.tensor([0, 0, 37]), torch.zeros(1, dtype=torch.int64)]


def gae(seed: int) -> list[Case]:
    make, cases = Maker(seed), []
    for dtype, tolerance in TOLERANCE.items():
        for bounds in make.boundaries():
            size, count = int(bounds[-1]), len(bounds) - 1
            for whole in (None, torch.int32, torch.int64):
                turns = None if whole is None else make.whole(0, 2, size).cumsum(0).to(whole)
                without = make.whole(0, 4, 1).item() == 0
                arguments = {
                    "rewards": make.normal(size, dtype),
                    "values": None if without else make.normal(size, dtype),
                    "mask": make.whole(0, 4, size) > 0,
                    "cu_seqlens": bounds,
                    "discount": 0.99,
                    "lambdas": torch.rand(count, generator=make.generator, dtype=torch.float64),
                    "turns": turns,
                    "bootstrap": None if without else make.normal(count, torch.float64),
                }
                cases.append(Case(arguments, tolerance))
    return cases


def discounted_sums(seed: int) -> list[Case]:
    make = Maker(seed)
    return [
        Case(
            {
                "values": make.normal(int(bounds[-1]), dtype),
                "decay": torch.rand(len(bounds) - 1, generator=make.generator, dtype=torch.float64),
                "cu_seqlens": bounds,
                "from_left": from_left,
            },
            tolerance,
        )
        for dtype, tolerance in TOLERANCE.items()
        for bounds in make.boundaries()
        for from_left in (False, True)
    ]


def segments(seed: int) -> list[Case]:
    """Of `segment_sum` and `segment_mean`."""
    make, cases = Maker(seed), []
    for dtype, tolerance in TOLERANCE.items():
        for bounds in make.boundaries():
            size = int(bounds[-1])
            for mask in (None, make.whole(0, 2, size) > 0):
                values = make.normal(size, dtype)
                cases.append(Case({"values": values, "mask": mask, "cu_seqlens": bounds}, tolerance))
    return cases


CASES: dict[str, CaseMaker] = {
    "sequence.gae": gae,
    "sequence.discounted_sums": discounted_sums,
    "sequence.segment_sum": segments,
    "sequence.segment_mean": segments,
}
