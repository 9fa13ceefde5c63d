"""Loads the native library and gives pointers to arrays."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

ABI = 1
"""As in library_info.c."""
FILE = "_pekoe_native.abi3.so"
VARIABLE = "PEKOE_NATIVE_LIBRARY"
"""Another library in the place of the one that was installed; for tests."""
REMEDY = "install a C compiler (Debian: apt-get install gcc libc6-dev) and install Pekoe again, in a checkout with "
REMEDY += "scripts/setup_venv.sh"


@cache
def native_library() -> ctypes.CDLL:
    """The library; every source's functions take raw pointers and 64-bit integers. OSError where it was not built (no
    compiler at installation), cannot be loaded, or was built of other sources."""
    path = Path(os.environ.get(VARIABLE) or Path(__file__).with_name(FILE))
    if not path.is_file():
        raise OSError(f"{path} was not built: {REMEDY}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise OSError(f"{error}: the native library cannot be loaded on this machine: {REMEDY}") from error
    if not hasattr(library, "pekoe_abi") or library.pekoe_abi() != ABI:
        raise OSError(f"{path} is of another version than the code around it: {REMEDY}")
    return library


def pointer(array: Any) -> ctypes.c_void_p:
    """To the first element of a numpy array or a torch tensor, which must be contiguous and outlive the call."""
    if hasattr(array, "data_ptr"):
        assert array.is_contiguous(), "native kernels take contiguous tensors"
        return ctypes.c_void_p(array.data_ptr())
    assert array.flags.c_contiguous, "native kernels take contiguous arrays"
    return ctypes.c_void_p(array.ctypes.data)
