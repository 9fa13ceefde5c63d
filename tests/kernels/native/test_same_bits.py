"""The native library gives the same bits for every instruction set, and keeps inside its arrays.

The self-test cases of all operations run once, with each call of a C function written down. A C program that is
compiled for each instruction set makes these calls again and prints a hash of everything that each left.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pekoe.kernels.native.native_library import native_library

sys.path.insert(0, str(Path(__file__).resolve().parent))

from replayed import FLAGS, SOURCES, WARNINGS, Recording, compile_all, record

pytestmark = pytest.mark.kernels
IS_X86 = platform.machine() == "x86_64"
LEVELS = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}
"""Each with a word of /proc/cpuinfo that tells whether it runs here."""


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def expected(recording: Recording) -> list[str]:
    """As the library is built."""
    return recording.replay("gcc", [])


def test_the_cases_call_every_function(recording: Recording) -> None:
    library = Path(str(native_library()._name))
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, timeout=60, check=True
    )
    exported = {line.split()[-1].partition(".")[0] for line in listed.stdout.splitlines()}
    called = {prototype[0] for prototype in recording.prototypes}
    assert {name for name in exported if name.startswith("pekoe_")} - called == {"pekoe_sources"}


@pytest.mark.skipif(not IS_X86, reason="the levels are of x86-64")
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_of_the_instruction_set_gives_the_same_bits(
    recording: Recording, expected: list[str], level: str
) -> None:
    flags = [f"-march={level}", "-DPEKOE_NO_CLONES"]
    if LEVELS[level] not in Path("/proc/cpuinfo").read_text().split():
        compile_all(["gcc", *FLAGS, *WARNINGS, *flags, "-shared", "-fPIC", *map(str, SOURCES), "-o", os.devnull])
        pytest.skip(f"this machine has no {LEVELS[level]}: it was compiled, not run")
    found = recording.replay("gcc", flags)
    assert [line for line in zip(found, expected, strict=True) if line[0] != line[1]] == []
    assert len(found) > len(recording.prototypes)


def test_nothing_is_read_or_written_outside_the_arrays(recording: Recording, expected: list[str]) -> None:
    """By gcc's sanitizers; a copy of nothing from nowhere is not worth a branch."""
    flags = ["-fsanitize=address,undefined", "-fno-sanitize=nonnull-attribute", "-fno-sanitize-recover=all"]
    assert recording.replay("gcc", [*flags, "-DPEKOE_NO_CLONES", "-DBEHIND=0", "-O1"]) == expected


@pytest.fixture(scope="module")
def cross_compiler() -> str:
    """Debian's, installed where that is possible."""
    wanted = {"aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu", "qemu-aarch64-static": "qemu-user-static"}
    lacking = [package for program, package in wanted.items() if shutil.which(program) is None]
    if lacking:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            pytest.skip(f"{', '.join(lacking)}: not installed, and only root with apt-get can install it here")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-qy", "--no-install-recommends", *lacking, "libc6-dev-arm64-cross"]):
            done = subprocess.run(
                ["apt-get", *command], env=environment, capture_output=True, text=True, timeout=280, check=False
            )
            assert done.returncode == 0, done.stderr[-2000:]
    return "aarch64-linux-gnu-gcc"


def test_aarch64_gives_the_same_bits(recording: Recording, expected: list[str], cross_compiler: str) -> None:
    """Compiled without a warning, run by an emulator."""
    found = recording.replay(cross_compiler, ["-static"], runner=["qemu-aarch64-static"])
    assert [line for line in zip(found, expected, strict=True) if line[0] != line[1]] == []


def test_another_result_would_be_seen(recording: Recording, expected: list[str]) -> None:
    """A library that is allowed to fuse and to reorder gives other bits somewhere."""
    if not IS_X86 or "avx2" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("needs fused multiply-adds of x86-64")
    flags = ["-DPEKOE_NO_CLONES", "-march=x86-64-v3", "-ffp-contract=fast", "-fassociative-math", "-fno-signed-zeros"]
    assert recording.replay("gcc", flags) != expected
