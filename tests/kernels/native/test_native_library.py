"""Loading the native library: the process stays as it was, many may do it at once, what is not its own is refused."""

from __future__ import annotations

import ast
import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pekoe.kernels.native import native_library as module
from pekoe.kernels.native.native_library import native_library, pointer

sys.path.insert(0, str(Path(__file__).resolve().parent))

from replayed import FLAGS

ROOT = Path(__file__).resolve().parents[3]
NATIVE = ROOT / "kernels" / "native"
EVERY = """
import importlib, sys
from pekoe.kernels import registry
for row in (row for rows in registry.OPERATIONS.values() for row in rows if row.name == 'native'):
    importlib.import_module(row.target.partition(':')[0])
from pekoe.kernels.native.native_library import native_library
native_library()
"""
"""Imports every native module and loads the library."""
PROBE = """
def flushes():
    import ctypes, numpy, torch
    small = numpy.full(64, 2.0 ** -126, dtype=numpy.float32)
    in_numpy = bool((small * numpy.float32(0.5) == 0).all())
    in_torch = bool((torch.from_numpy(small) * 0.5 == 0).all())
    in_python = 2.0 ** -1022 * float(small[0] * 2.0 ** 125) == 0
    return [in_numpy, in_torch, in_python]
"""


def run(code: str, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env={**os.environ, **variables}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.kernels
@pytest.mark.parametrize(("action", "expected"), [(EVERY, False), ("torch.set_flush_denormal(True)", True)])
def test_small_numbers_are_kept_after_loading(action: str, expected: bool) -> None:
    """In a fresh process; the probe sees what a library does that was linked with -ffast-math."""
    code = f"import torch\n{PROBE}\nprint(flushes())\n{action}\nprint(flushes())\n"
    before, after = (ast.literal_eval(line) for line in run(code).splitlines())
    assert before == [False] * 3
    assert after == [expected] * 3


@pytest.mark.kernels
@pytest.mark.parametrize(("imports", "num_processes", "num_rounds"), [("", 4, 4), (EVERY, 2, 1)])
def test_processes_import_at_once_from_one_folder(
    tmp_path: Path, imports: str, num_processes: int, num_rounds: int
) -> None:
    """A new copy of the package, without any compiled Python, in each round."""
    code = f"""
import sys, time
import numpy
sys.path.insert(0, sys.argv[1])
time.sleep(max(0, float(sys.argv[2]) - time.time()))
{imports}
from pekoe.kernels import registry, self_test
assert registry.__file__.startswith(sys.argv[1]), registry.__file__
row = registry.OPERATIONS['packing.karmarkar_karp'][0]
print(row.name, self_test.run_cases('packing.karmarkar_karp', row))
"""
    for number in range(num_rounds):
        place = tmp_path / str(number)
        shutil.copytree(ROOT / "kernels", place / "pekoe" / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
        before = {path for path in place.rglob("*") if path.is_file()}
        command = [sys.executable, "-c", code, str(place), str(time.time() + 0.3)]
        processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(num_processes)
        ]
        ended = [process.communicate(timeout=120) for process in processes]
        assert [process.returncode for process in processes] == [0] * num_processes, ended
        assert len({output for output, _ in ended}) == 1
        assert ended[0][0].startswith("native Outcome(num_cases=")
        assert "failure=None" in ended[0][0]
        assert {path for path in place.rglob("*") if path.is_file() and path.suffix != ".pyc"} == before


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The path of another library in the place of the installed one."""
    path = tmp_path / "other.so"
    monkeypatch.setenv(module.VARIABLE, str(path))
    return path


def test_what_is_no_library_is_refused_with_a_remedy(installed: Path) -> None:
    load = native_library.__wrapped__
    with pytest.raises(OSError, match=r"other.so was not built: install a C compiler"):
        load()
    installed.write_bytes(b"cut off")
    with pytest.raises(
        OSError, match=r"other.so: .*: the native library cannot be loaded on this machine: install a C"
    ):
        load()


@pytest.mark.kernels
@pytest.mark.parametrize("digest", ["", "0123456789abcdef"])
def test_a_library_of_other_sources_is_refused(installed: Path, digest: str) -> None:
    flags = ["-shared", "-fPIC", "-fvisibility=hidden", f'-DPEKOE_SOURCES="{digest}"']
    subprocess.run(["gcc", *flags, str(NATIVE / "library_info.c"), "-o", str(installed)], check=True, timeout=60)
    with pytest.raises(OSError, match=r"other.so was built of other sources than those beside it: install Pekoe again"):
        native_library.__wrapped__()
    subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", str(installed)], check=True, timeout=60)
    with pytest.raises(OSError, match=r"other.so was built of other sources"):
        native_library.__wrapped__()


@pytest.mark.kernels
def test_an_edited_source_makes_the_library_another_one(tmp_path: Path) -> None:
    """A copy of the package with one more space in a comment falls back to the reference, with one warning."""
    shutil.copytree(ROOT / "kernels", tmp_path / "pekoe" / "kernels")
    code = (
        f"import logging, sys\nsys.path.insert(0, {str(tmp_path)!r})\nlogging.basicConfig(level='INFO')\n"
        "from pekoe.kernels.packing import packing\npacking.best_fit([1], 2); packing.equal_count([1.0], 1)\n"
    )
    assert "kernel packing.best_fit on cpu: native" in stderr_of(code)
    with (tmp_path / "pekoe" / "kernels" / "native" / "library_info.c").open("a") as file:
        file.write("/* */\n")
    said = stderr_of(code)
    assert "kernel packing.best_fit on cpu: reference" in said
    assert said.count("WARNING") == 1
    assert "was built of other sources than those beside it: install Pekoe again" in said


def stderr_of(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def test_pointers_are_to_the_first_element_of_contiguous_arrays() -> None:
    import torch

    array, tensor = np.arange(6, dtype=np.int64), torch.arange(6).reshape(2, 3)
    assert pointer(array[2:]).value == array.ctypes.data + 16
    assert pointer(tensor[1]).value == tensor.data_ptr() + 24
    for view in (array[::2], tensor.T):
        with pytest.raises(AssertionError, match="contiguous"):
            pointer(view)
    assert ctypes.sizeof(ctypes.c_void_p) == 8


def test_no_flag_changes_arithmetic_or_names_a_machine() -> None:
    assert "-ffp-contract=off" in FLAGS
    unsafe = ("fast", "unsafe", "native", "finite", "reciprocal", "associative", "march", "mtune")
    assert [flag for flag in FLAGS if any(word in flag for word in unsafe)] == []


def test_sources_include_the_c_standard_and_their_own_headers_only() -> None:
    allowed = {"float.h", "limits.h", "math.h", "stdbool.h", "stddef.h", "stdint.h", "stdlib.h", "string.h"}
    own = {path.name for path in NATIVE.glob("*.h")}
    sources = [*NATIVE.glob("*.c"), *NATIVE.glob("*.h")]
    assert len(sources) > len(own) > 0
    for source in sources:
        included = set(re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', source.read_text(), re.MULTILINE))
        assert included <= allowed | own, source.name


@pytest.mark.kernels
def test_the_library_calls_nothing_whose_results_depend_on_the_machine() -> None:
    """libm's exp and log have variants by instruction set; sqrt is exact everywhere."""
    path = str(native_library()._name)
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", path], capture_output=True, text=True, timeout=60, check=True
    )
    called = {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines()}
    memory = {"malloc", "calloc", "realloc", "free", "memcpy", "memmove", "memset", "memcmp", "aligned_alloc", "qsort"}
    linking = {"__cxa_finalize", "__gmon_start__", "__cpu_model", "__cpu_indicator_init", "__stack_chk_fail"}
    loose = {name for name in called if not name.startswith(("_ITM_", "__"))} - memory - linking
    assert loose <= {"sqrt", "sqrtf", "fmin", "fmax", "floor", "ceil"}, loose


@pytest.mark.kernels
@pytest.mark.skipif(platform.machine() != "x86_64", reason="there are levels of the instruction set on x86-64 alone")
def test_the_linker_chooses_among_three_copies_of_each_hot_function() -> None:
    """IFUNC: the address is found when the library is loaded."""
    command = ["readelf", "--wide", "--dyn-syms", native_library()._name]
    table = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    chosen = {line.split()[-1] for line in table.splitlines() if " IFUNC " in line}
    assert chosen >= {
        "pekoe_gae_token_f32", "pekoe_segments_f32", "pekoe_discounted_sums_f32", "pekoe_logprob_statistics",
        "pekoe_logprob_gradient",
    }  # fmt: skip
