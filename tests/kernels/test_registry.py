"""Which implementation runs where: automatic choice, PEKOE_KERNELS, what cannot be used."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pekoe.kernels import registry
from pekoe.kernels.native import native_library
from pekoe.kernels.registry import ANYWHERE, VARIABLE, Implementation, KernelError, kernel
from pekoe.launch.checked_config import load_checked

MODULES = {
    "sound_kernels": "\n".join(f"def {name}(): return {name!r}" for name in ("native", "triton", "reference")),
    "no_package_kernels": "import a_package_that_nobody_has\n",
    "no_library_kernels": "import ctypes; ctypes.CDLL('/nowhere/libcuda.so')\n",
    "unfit_kernels": "raise RuntimeError('compiled against another version')\n",
}


def rows(*names: str, module: str = "sound_kernels") -> tuple[Implementation, ...]:
    """Implementations by preference; all but the reference come from `module`."""
    devices = {"native": ("cpu",), "triton": ("cuda", "npu"), "torch": ANYWHERE, "reference": ANYWHERE}
    return tuple(
        Implementation(name, f"{'sound_kernels' if name == 'reference' else module}:{name}", devices[name])
        for name in names
    )


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[Implementation, ...]]]:
    """Operations of this file alone, over modules that are really imported."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    operations = {
        "scan.sum": rows("native", "triton", "reference"),
        "scan.mean": rows("native", "reference"),
        "head.loss": rows("triton", "reference"),
    }
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "OPERATIONS", operations)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(registry, "_why_no_launch", lambda device_type: None)  # there is no such device
    forget()
    yield operations
    forget()


def forget() -> None:
    registry._chosen.clear()
    registry.why_not.cache_clear()
    registry._warn_once.cache_clear()


@pytest.mark.parametrize(
    ("operation", "device_type", "name"),
    [
        ("scan.sum", "cpu", "native"), ("scan.sum", "cuda", "triton"), ("scan.sum", "npu", "triton"),
        ("scan.mean", "cuda", "reference"), ("head.loss", "cpu", "reference"),
    ],
)  # fmt: skip
def test_the_first_that_runs_on_the_device_type_is_chosen_and_logged_once(
    operation: str, device_type: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, registry.__name__)
    with ThreadPoolExecutor(4) as threads:
        found = {future.result()() for future in [threads.submit(kernel, operation, device_type) for _ in range(40)]}
    assert found == {name}
    assert caplog.messages == [f"kernel {operation} on {device_type}: {name}"]


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ("scan=reference", {"scan.sum": "reference", "scan.mean": "reference", "head.loss": "reference"}),
        ("scan.sum=reference", {"scan.sum": "reference", "scan.mean": "native"}),
        ("scan=reference, scan.sum=native", {"scan.sum": "native", "scan.mean": "reference"}),
        ("scan.sum = native,,scan=reference", {"scan.sum": "native", "scan.mean": "reference"}),
        ("head=reference", {"scan.sum": "native", "head.loss": "reference"}),
        (" ", {"scan.sum": "native"}),
    ],
)
def test_an_override_names_an_implementation_for_a_room_or_an_operation(
    overrides: str, names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, overrides)
    assert {operation: kernel(operation)() for operation in names} == names


def test_a_changed_override_holds_from_the_next_call_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, registry.__name__)
    assert kernel("scan.sum")() == "native"
    monkeypatch.setenv(VARIABLE, "scan.sum=reference")
    assert kernel("scan.sum")() == "reference"
    assert caplog.messages[1:] == [f"kernel scan.sum on cpu: reference (by {VARIABLE})"]


def test_a_rooms_override_leaves_operations_without_such_an_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "scan=triton")
    assert kernel("scan.mean")() == "native"
    assert kernel("scan.sum", "cuda")() == "triton"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("scans=native", ["'scans=native'", "head, head.loss, scan, scan.mean, scan.sum"]),
        ("scan.max=native", ["'scan.max=native'", "scan.sum"]),
        ("native", ["'native'", "NAME=IMPLEMENTATION"]),
        ("scan=cuda", ["scan=cuda is not allowed", "native, reference, triton"]),
        ("scan.mean=triton", ["scan.mean=triton is not allowed", "scan.mean has native, reference"]),
        ("scan=", ["scan= is not allowed", "native, reference, triton"]),
        ("scan=native,scan=triton", ["scan is named twice", "native and triton"]),
        ("head.loss=triton", ["head.loss=triton does not run on 'cpu'; allowed: reference", "TRITON_INTERPRET=1"]),
        ("head=triton", ["head.loss=triton does not run on 'cpu'"]),
    ],
)
def test_an_override_that_cannot_be_met_is_an_error_at_every_call(
    overrides: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the operation that is called first, where the text itself is wrong."""
    monkeypatch.setenv(VARIABLE, overrides)
    operation = "head.loss" if "does not run" in words[0] else "scan.sum"
    for _ in range(2):
        with pytest.raises(KernelError, match=f"^{VARIABLE}: ") as error:
            kernel(operation)
        assert [word for word in words if word not in str(error.value)] == []


def test_native_kernels_do_not_run_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "scan=native")
    with pytest.raises(KernelError, match=r"scan.sum=native does not run on 'cuda'; allowed: triton, reference$"):
        kernel("scan.sum", "cuda")


def test_the_interpreter_of_triton_runs_on_the_cpu_by_name_only(
    table: dict[str, tuple[Implementation, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    table["scan.sum"] = rows("triton", "native", "reference")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernel("scan.sum")() == "native"
    monkeypatch.setenv(VARIABLE, "scan=triton")
    assert kernel("scan.sum")() == "triton"


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("no_package_kernels", "ModuleNotFoundError: No module named 'a_package_that_nobody_has'"),
        ("no_library_kernels", "/nowhere/libcuda.so: cannot open shared object file"),
        ("unfit_kernels", "RuntimeError: compiled against another version"),
    ],
)
def test_what_cannot_be_imported_is_passed_over_with_one_warning_and_refused_by_name(
    module: str, reason: str, table: dict[str, tuple[Implementation, ...]],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    table["scan.sum"] = table["head.loss"] = rows("triton", "reference", module=module)
    assert kernel("scan.sum", "cuda")() == kernel("head.loss", "cuda")() == "reference"
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert message.startswith("triton kernels cannot be used; slower ones run in their place: ")
    assert reason in message
    monkeypatch.setenv(VARIABLE, "scan=triton")
    with pytest.raises(KernelError, match=re.escape(f"{VARIABLE}: scan.sum=triton cannot be used here: {reason}")):
        kernel("scan.sum", "cuda")


def test_a_library_that_was_not_built_is_one_warning_that_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(native_library.VARIABLE, str(tmp_path / "none.so"))
    native_library.native_library.cache_clear()
    try:
        assert kernel("scan.sum")() == kernel("scan.mean")() == "reference"
        (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert f"{tmp_path}/none.so was not built: install a C compiler" in message
        monkeypatch.setenv(VARIABLE, "scan=native")
        with pytest.raises(KernelError, match=r"scan.sum=native cannot be used here: .* was not built: install"):
            kernel("scan.sum")
    finally:
        native_library.native_library.cache_clear()


def test_an_operation_or_a_device_type_that_nothing_serves_is_named(
    table: dict[str, tuple[Implementation, ...]],
) -> None:
    with pytest.raises(KernelError, match=r"kernel 'scan.max': there is no such operation; allowed: head.loss, scan"):
        kernel("scan.max")
    with pytest.raises(KernelError, match=r"kernel scan.sum: there is no implementation for 'mps'$"):
        kernel("scan.sum", "mps")
    table["head.loss"] = rows("triton", module="no_package_kernels")
    with pytest.raises(KernelError, match=r"for 'cuda' \(triton: ModuleNotFoundError: .*a_package_that_nobody_has"):
        kernel("head.loss", "cuda")


def test_a_mistake_in_the_table_is_no_unavailability(table: dict[str, tuple[Implementation, ...]]) -> None:
    table["scan.sum"] = (Implementation("native", "sound_kernels:missing", ("cpu",)), *rows("reference"))
    with pytest.raises(AttributeError, match="missing"):
        kernel("scan.sum")


def test_a_wrong_override_stops_a_configuration_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "scan=cuda")
    with pytest.raises(KernelError, match=r"scan=cuda is not allowed"):
        load_checked(Path(native_library.__file__).parents[2] / "configs" / "quickstart.yaml", [])
    monkeypatch.setenv(VARIABLE, "scan=native")
    load_checked(Path(native_library.__file__).parents[2] / "configs" / "quickstart.yaml", [])


def test_triton_that_cannot_launch_is_passed_over_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine without such a device the trial fails for real, as it does without a compiler."""
    monkeypatch.undo()
    forget()
    row, passed_over = registry.choice("packing.pack", "cuda", "")
    assert row.name == "reference"
    ((name, reason),) = passed_over
    assert (name, reason.startswith("a kernel cannot be launched: ")) == ("triton", True)
    with pytest.raises(KernelError, match=r"packing.pack=triton cannot be used here: a kernel cannot be launched: "):
        registry.choice("packing.pack", "cuda", "packing.pack=triton")
    forget()
