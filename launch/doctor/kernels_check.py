"""`pekoe doctor --kernels`: each operation's implementations, what can be used here, whether it computes what the
reference does, and which one is chosen for which device type, by PEKOE_KERNELS or by itself."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from dataclasses import dataclass, field

from pekoe.kernels import registry, self_test
from pekoe.kernels.registry import OPERATIONS, VARIABLE, Implementation, KernelError
from pekoe.kernels.self_test import Outcome
from pekoe.pipeline.devices.device import choose
from pekoe.pipeline.registry import DEVICES
from pekoe.pipeline.runs.finding import counted

EXIT_WELL, EXIT_PROBLEMS = 0, 1
HEADINGS = ("operation", "implementation", "runs on", "available", "self-test", "chosen for")


@dataclass(frozen=True)
class Row:
    """One implementation of one operation."""

    operation: str
    implementation: str
    devices: tuple[str, ...]
    unavailable: str | None
    """Why it cannot be used on any device of this machine; None when it can."""
    tests: dict[str, Outcome] = field(default_factory=dict)
    """By device type of this machine; empty where it cannot be used, and for the reference on the CPU."""
    chosen_for: tuple[str, ...] = ()
    """Device types of this machine."""


@dataclass(frozen=True)
class Kernels:
    """What was found on this machine."""

    host: str
    devices: tuple[str, ...]
    """Device types that are here."""
    override: str
    """The text of PEKOE_KERNELS."""
    rows: list[Row]
    problems: list[str]
    """A self-test that failed; an override that cannot be met."""

    @property
    def exit_code(self) -> int:
        return EXIT_PROBLEMS if self.problems else EXIT_WELL

    def text(self) -> str:
        """A table; below it why something is not available, and the problems."""
        by = f", {VARIABLE}={self.override}" if self.override else ""
        cells = [HEADINGS, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
        lines = [f"kernels on {self.host} ({', '.join(self.devices)}{by})"]
        lines += ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells]
        reasons = {(row.implementation, row.unavailable): None for row in self.rows if row.unavailable}
        lines += [f"  note    {name} is not available: {reason}" for name, reason in reasons]
        lines += [f"  PROBLEM {problem}" for problem in self.problems]
        lines.append(counted(len(self.problems), "problem") if self.problems else "nothing is wrong")
        return "\n".join(line.rstrip() for line in lines)

    def json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "exit_code": self.exit_code}, indent=1)


def diagnose_kernels() -> Kernels:
    """Runs the self-tests of all that can be used here, in seconds. KernelError for a PEKOE_KERNELS that names what
    does not exist."""
    overrides = os.environ.get(VARIABLE, "")
    registry.check_overrides()
    devices = tuple(kind for kind in DEVICES if choose(kind).is_available())
    rows: list[Row] = []
    problems: list[str] = []
    for operation, implementations in OPERATIONS.items():
        chosen: dict[str, str] = {}
        served = {device for row in implementations for device in row.devices}
        for device in (device for device in devices if device in served):
            try:
                chosen[device] = registry.choice(operation, device, overrides)[0].name
            except KernelError as error:
                problems.append(str(error))
        rows += [_examine(operation, row, devices, chosen) for row in implementations]
    problems += [
        f"{row.operation}: {row.implementation} on {device}: {outcome.failure}"
        for row in rows
        for device, outcome in row.tests.items()
        if outcome.failure is not None
    ]
    return Kernels(socket.gethostname(), devices, overrides, rows, problems)


def _examine(operation: str, row: Implementation, devices: tuple[str, ...], chosen: dict[str, str]) -> Row:
    can = [device for device in registry.device_types(row) if device in devices]
    unavailable = registry.why_not(row)
    if unavailable is None and not can:
        unavailable = f"there is no {' or '.join(row.devices)} here"
    if unavailable is not None:
        return Row(operation, row.name, row.devices, unavailable)
    tried = [device for device in can if not (row.name == "reference" and device == "cpu")]
    tests = {device: self_test.run_cases(operation, row, device, _seeds(row, device)) for device in tried}
    chosen_for = tuple(device for device, name in chosen.items() if name == row.name)
    return Row(operation, row.name, row.devices, None, tests, chosen_for)


def _seeds(row: Implementation, device: str) -> tuple[int, ...]:
    """One where Triton's interpreter runs: it takes a second a case."""
    return self_test.SEEDS if device in row.devices else self_test.SEEDS[:1]


def _cells(row: Row) -> tuple[str, ...]:
    results = [_result(device if len(row.tests) > 1 else "", outcome) for device, outcome in row.tests.items()]
    return (
        row.operation,
        row.implementation,
        " ".join(row.devices),
        "no" if row.unavailable else "yes",
        "; ".join(results) or "-",
        " ".join(row.chosen_for) or "-",
    )


def _result(device: str, outcome: Outcome) -> str:
    where = f"{device}: " if device else ""
    if outcome.failure is not None:
        return f"{where}FAILED"
    error = f"error {outcome.max_error:.1e}" if outcome.max_error else "exact"
    return f"{where}{error}, {counted(outcome.num_cases, 'case')}"
