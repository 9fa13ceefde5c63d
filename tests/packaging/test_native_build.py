"""The native library in wheels, source distributions and editable installs, with and without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from pekoe.kernels.native.native_library import FILE

NATIVE = "kernels/native"
LOADED = (
    "from pekoe.kernels.native import native_library as module\n"
    "print(module.__file__)\nprint(module.native_library()._name)\n"
)

pytestmark = pytest.mark.kernels


def run(command: list[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PEKOE_NATIVE", "CC")}
    return subprocess.run(
        command, cwd=cwd, env={**kept, **variables}, capture_output=True, text=True, timeout=240, check=False
    )


def test_the_wheel_holds_the_library_for_every_python_from_3_11(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert "-cp311-abi3-linux_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert f"pekoe/{NATIVE}/{FILE}" in names


def test_the_sdist_holds_the_sources_and_nothing_compiled(built: Path, checkout: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {f"{NATIVE}/{path.name}" for path in (checkout / NATIVE).iterdir() if path.suffix in (".c", ".h")}
    assert len(sources) > 1
    assert sources - names == set()
    assert [name for name in names if name.endswith(".so")] == []


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Of an environment without Pekoe, which sees the other packages of this one."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return str(folder / "bin" / "python")


def install(python: str, checkout: Path, *arguments: str, **variables: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-build-isolation"]
    done = run([*command, *arguments], checkout, **variables)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("mode", ["default", "strict"])
def test_editable_installs_find_the_library(checkout: Path, tmp_path: Path, python: str, mode: str) -> None:
    copy = tmp_path / "pekoe"
    shutil.copytree(checkout, copy)
    settings = ["--config-settings", "editable_mode=strict"] if mode == "strict" else []
    install(python, copy, *settings, "-e", ".", PEKOE_NATIVE="required")
    done = run([python, "-c", LOADED], tmp_path)
    assert done.returncode == 0, done.stderr
    module, library = (Path(line) for line in done.stdout.splitlines())
    assert module.is_relative_to(copy)
    assert library == module.with_name(FILE)


def test_without_a_compiler_pekoe_installs_and_the_references_run(checkout: Path, tmp_path: Path, python: str) -> None:
    copy = tmp_path / "pekoe"
    shutil.copytree(checkout, copy)
    install(python, copy, ".", CC="/nowhere/cc")
    done = run([python, "-c", LOADED], tmp_path)
    assert "was not built: install a C compiler" in done.stderr
    doctor = run([python, "-m", "pekoe.launch.cli", "doctor", "--kernels"], tmp_path)
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert "native is not available: " in doctor.stdout
    assert "was not built: install a C compiler" in doctor.stdout


@pytest.mark.parametrize(
    ("variables", "code", "words"),
    [
        ({"PEKOE_NATIVE": "required", "CC": "/nowhere/cc"}, 1, "No such file or directory: '/nowhere/cc'"),
        ({"PEKOE_NATIVE": "always"}, 1, "PEKOE_NATIVE: 'always' is not allowed; allowed: optional, required"),
        ({"CC": "/nowhere/cc"}, 0, 'building extension "pekoe.kernels.native._pekoe_native" failed'),
    ],
)
def test_a_required_library_that_cannot_be_built_is_an_error(
    checkout: Path, tmp_path: Path, variables: dict[str, str], code: int, words: str
) -> None:
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    done = run(command, checkout, **variables)
    assert done.returncode == code
    assert words in done.stdout + done.stderr
    assert list(tmp_path.rglob("*.so")) == []
