"""Loads the native library, gives its functions, and pointers to arrays for them."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

FILE = "_pekoe_native.abi3.so"
VARIABLE = "PEKOE_NATIVE_LIBRARY"
"""Another library in the place of the one that was installed; for tests."""
POINTER, SIZE, FLAG, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double
"""Types of arguments."""
AGAIN = (
    "install Pekoe again (pip install --force-reinstall --no-deps --no-cache-dir; in a checkout: scripts/setup_venv.sh)"
)
REMEDY = f"install a C compiler, gcc from 9 on or clang (Debian: apt-get install gcc libc6-dev), and {AGAIN}"


@cache
def native_library() -> ctypes.CDLL:
    """The library; every source's functions take raw pointers and 64-bit integers. OSError where it was not built (no
    compiler at installation), cannot be loaded, or was built before the sources beside it changed."""
    path = Path(os.environ.get(VARIABLE) or Path(__file__).with_name(FILE))
    if not path.is_file():
        raise OSError(f"{path} was not built: {REMEDY}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise OSError(f"{error}: the native library cannot be loaded on this machine: {REMEDY}") from error
    if not _is_built_of(library, source_digest(Path(__file__).parent)):
        raise OSError(f"{path} was built of other sources than those beside it: {AGAIN}")
    return library


class NativeFunctions(dict[str, Any]):
    """Functions of the library by their names without `pekoe_`, each loaded when it is first asked for. `signatures`
    has the types of their arguments, `result` that of what all of them return (None: nothing)."""

    def __init__(self, signatures: Mapping[str, tuple[Any, ...]], result: Any = None) -> None:
        super().__init__()
        self._signatures, self._result = signatures, result

    def __missing__(self, name: str) -> Any:
        function = getattr(native_library(), f"pekoe_{name}")
        function.argtypes, function.restype = self._signatures[name], self._result
        self[name] = function
        return function


def source_digest(folder: Path) -> str:
    """Of the C sources in a folder, by names and contents; setup.py compiles it into the library. "" where there are
    none."""
    sources = sorted(path for path in folder.iterdir() if path.suffix in (".c", ".h"))
    digest = hashlib.sha256()
    for path in sources:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16] if sources else ""


def _is_built_of(library: ctypes.CDLL, digest: str) -> bool:
    if not hasattr(library, "pekoe_sources"):
        return False
    library.pekoe_sources.restype = ctypes.c_char_p
    return digest in ("", library.pekoe_sources().decode())


def pointer(array: Any) -> ctypes.c_void_p:
    """To the first element of a numpy array or a torch tensor, which must be contiguous and outlive the call."""
    if hasattr(array, "data_ptr"):
        assert array.is_contiguous(), "native kernels take contiguous tensors"
        return ctypes.c_void_p(array.data_ptr())
    assert array.flags.c_contiguous, "native kernels take contiguous arrays"
    return ctypes.c_void_p(array.ctypes.data)
