"""The self-test: every operation has cases, a wrong result fails, and `pekoe doctor --kernels` says what came out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from pekoe.kernels import registry, self_test
from pekoe.kernels.registry import OPERATIONS, VARIABLE, Implementation
from pekoe.kernels.self_test import Case, largest_error, results_of
from pekoe.launch import cli
from pekoe.launch.doctor import kernels_check
from pekoe.launch.stop_signals import EXIT_CONFIGURATION

EVERY = [(operation, row) for operation, rows in OPERATIONS.items() for row in rows]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_has_one_reference_at_the_end_and_cases(operation: str) -> None:
    names = [row.name for row in OPERATIONS[operation]]
    assert len(set(names)) == len(names)
    assert names[-1] == "reference"
    assert set(names) <= {"native", "triton", "torch", "reference"}
    make = self_test.cases_of(operation)
    assert make is not None, "cases.py of its room has none"
    assert len(make(1)) > 1


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("operation", "row"), [pair for pair in EVERY if "cpu" in pair[1].devices],
    ids=[f"{operation}-{row.name}" for operation, row in EVERY if "cpu" in row.devices],
)  # fmt: skip
def test_what_runs_on_the_cpu_is_here_and_passes(operation: str, row: Implementation) -> None:
    assert registry.why_not(row) is None
    outcome = self_test.run_cases(operation, row)
    assert outcome.failure is None
    assert outcome.num_cases > 3


@pytest.mark.parametrize(
    ("expected", "found", "error"),
    [
        ([1.0, 2.0, 4.0], [1.0, 2.0, 4.0], 0.0),
        ([0.1], [0.3], 0.2),
        ([1.0, -8.0], [1.4, -8.0], 0.05),
        ([1, 2], [1, 2], 0.0),
        ([1, 2], [1, 3], np.inf),
        ([True], [False], np.inf),
        ([1.0], [1.0, 2.0], np.inf),
        ([1.0], [1], np.inf),
        ([np.nan, np.inf], [np.nan, np.inf], 0.0),
        ([np.nan, 1.0], [1.0, 1.0], np.inf),
        ([np.inf], [-np.inf], np.inf),
        ([1.0], [np.nan], np.inf),
        ([], [], 0.0),
    ],
)
def test_the_error_is_relative_to_the_largest_expected(expected: list[Any], found: list[Any], error: float) -> None:
    assert largest_error([np.array(expected)], [np.array(found)]) == pytest.approx(error)


def test_another_number_of_results_or_another_precision_is_wrong() -> None:
    one = np.ones(2, dtype=np.float32)
    assert largest_error([one], [one, one]) == np.inf
    assert largest_error([one], [one.astype(np.float64)]) == np.inf


def test_results_hold_gradients_and_what_dataclasses_hold() -> None:
    @dataclass
    class Two:
        first: torch.Tensor
        second: tuple[int, None]

    x = torch.tensor([1.0, 2.0])
    found = results_of(lambda x: Two(x**2, (3, None)), Case({"x": x}, gradients=("x",)), "cpu")
    assert [array.tolist() for array in found[:2]] == [[1.0, 4.0], 3]
    assert (found[2] / x.numpy() > 0).all(), "a weighting of 2 x"
    assert not x.requires_grad


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[Implementation, ...]]]:
    """Two operations, one of which is computed wrongly."""
    module = ModuleType("sound_kernels")
    vars(module).update(double=double, twice=twice, half=half, nearly_half=nearly_half)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    here = f"{module.__name__}:"
    operations = {
        "sound.double": (
            Implementation("torch", f"{here}twice", ("cpu",)),
            Implementation("reference", f"{here}double", ("cpu", "cuda")),
        ),
        "sound.half": (
            Implementation("triton", f"{here}half", ("cuda", "npu")),
            Implementation("torch", f"{here}nearly_half", ("cpu",)),
            Implementation("reference", f"{here}half", ("cpu",)),
        ),
    }
    for user in (registry, self_test, kernels_check):
        monkeypatch.setattr(user, "OPERATIONS", operations)
    monkeypatch.setattr(self_test, "cases_of", lambda operation: cases)
    monkeypatch.delenv(VARIABLE, raising=False)
    registry.why_not.cache_clear()
    yield operations
    registry.why_not.cache_clear()


def cases(seed: int) -> list[Case]:
    return [Case({"x": np.arange(4.0) + seed}, tolerance=1e-6)]


def double(x: Any) -> Any:
    return 2 * x


def twice(x: Any) -> Any:
    return x + x


def half(x: Any) -> Any:
    return x / 2


def nearly_half(x: Any) -> Any:
    return x * 0.501


def test_the_doctor_prints_a_table_and_fails_for_a_wrong_result(
    table: dict[str, tuple[Implementation, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--kernels"]) == 1
    title, headings, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("kernels on ")
    assert title.endswith("(cpu)")
    assert headings.split("  ")[0] == "operation"
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    assert cells[:5] == [
        ["sound.double", "torch", "cpu", "yes", "exact, 3 cases", "cpu"],
        ["sound.double", "reference", "cpu cuda", "yes", "-", "-"],
        ["sound.half", "triton", "cuda npu", "no", "-", "-"],
        ["sound.half", "torch", "cpu", "yes", "FAILED", "cpu"],
        ["sound.half", "reference", "cpu", "yes", "-", "-"],
    ]
    assert lines[5:] == [
        "  note    triton is not available: there is no cuda or npu here",
        "  PROBLEM sound.half: torch on cpu: seed 1, case 0: error 0.002, allowed 1e-06",
        "1 problem",
    ]


def test_the_doctor_honours_the_override_and_speaks_json(
    table: dict[str, tuple[Implementation, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "sound=reference")
    assert cli.main(["doctor", "--kernels", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["override"], found["exit_code"], found["devices"]) == ("sound=reference", 1, ["cpu"])
    chosen = {row["operation"]: row["implementation"] for row in found["rows"] if row["chosen_for"] == ["cpu"]}
    assert chosen == {"sound.double": "reference", "sound.half": "reference"}
    assert found["rows"][0]["tests"] == {"cpu": {"num_cases": 3, "max_error": 0.0, "failure": None}}


def test_an_override_that_cannot_be_met_is_a_problem_and_a_wrong_one_is_configuration(
    table: dict[str, tuple[Implementation, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv(VARIABLE, "sound.half=triton")
    assert cli.main(["doctor", "--kernels"]) == 1
    assert "PROBLEM PEKOE_KERNELS: sound.half=triton does not run on 'cpu'" in capsys.readouterr().out
    monkeypatch.setenv(VARIABLE, "sounds=triton")
    assert cli.main(["doctor", "--kernels"]) == EXIT_CONFIGURATION
    assert "PEKOE_KERNELS: 'sounds=triton' is not allowed" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["runs/x"], ["--deep"], ["--config", "c.yaml"]])
def test_kernels_are_looked_at_alone(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--kernels", *more]) == EXIT_CONFIGURATION
    assert "it takes no RUN, SITE, --config or --deep" in capsys.readouterr().err


def test_an_implementation_that_raises_has_failed(table: dict[str, tuple[Implementation, ...]]) -> None:
    row = Implementation("torch", "math:sqrt", ("cpu",))
    outcome = self_test.run_cases("sound.double", row)
    assert outcome.failure is not None
    assert outcome.failure.startswith("seed 1, case 0: TypeError: ")
