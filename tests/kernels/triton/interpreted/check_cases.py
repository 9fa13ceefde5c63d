"""Every operation that Triton has passes its room's self-test in the interpreter."""

from __future__ import annotations

import pytest

from pekoe.kernels.registry import OPERATIONS, Implementation, load
from pekoe.kernels.self_test import cases_of, largest_error, reference_of, results_of
from pekoe.kernels.sequence.triton_sequence import IS_ASCEND

ROWS = [(operation, row) for operation, rows in OPERATIONS.items() for row in rows if row.name == "triton"]
COARSEST = 1e-5 if IS_ASCEND else 0.0
"""What is allowed where float64 is computed in float32."""


def test_all_rooms_are_here() -> None:
    assert {operation.partition(".")[0] for operation, _ in ROWS} == {"packing", "sequence", "logprob"}


@pytest.mark.parametrize(("operation", "row"), ROWS, ids=[operation for operation, _ in ROWS])
def test_cases(operation: str, row: Implementation) -> None:
    make = cases_of(operation)
    assert make is not None
    for number, case in enumerate(make(1)):
        expected = results_of(load(reference_of(operation)), case, "cpu")
        error = largest_error(expected, results_of(load(row), case, "cpu"))
        assert error <= max(case.tolerance, COARSEST), f"case {number}: {case.arguments}"
