"""Every operation that Triton has passes its room's self-test in the interpreter."""

from __future__ import annotations

import pytest

from pekoe.kernels.registry import OPERATIONS
from pekoe.kernels.self_test import run_cases

ROWS = [(operation, row) for operation, rows in OPERATIONS.items() for row in rows if row.name == "triton"]


def test_there_are_some() -> None:
    assert {operation.partition(".")[0] for operation, _ in ROWS} == {"packing", "sequence", "logprob"}


@pytest.mark.parametrize(("operation", "row"), ROWS, ids=[operation for operation, _ in ROWS])
def test_cases(operation: str, row: object) -> None:
    outcome = run_cases(operation, row, "cpu", seeds=(1,))
    assert outcome.failure is None
    assert outcome.num_cases > 0
