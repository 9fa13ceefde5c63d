"""Loads the native library and gives pointers to arrays."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

ABI = 1
FILE = "_pekoe_native.abi3.so"


@cache
def native_library() -> ctypes.CDLL:
    """The library; every source's functions take raw pointers and 64-bit integers. OSError where it was not built (no
    compiler at installation), or is of another version."""
    path = Path(__file__).with_name(FILE)
    if not path.is_file():
        raise OSError(f"{path} was not built: install a C compiler and install Pekoe again")
    library = ctypes.CDLL(str(path))
    found = library.pekoe_abi()
    if found != ABI:
        raise OSError(f"{path} is of version {found}, not {ABI}: install Pekoe again")
    return library


def pointer(array: Any) -> ctypes.c_void_p:
    """To the first element of a numpy array or a torch tensor, which must be contiguous and outlive the call."""
    if hasattr(array, "data_ptr"):
        assert array.is_contiguous(), "native kernels take contiguous tensors"
        return ctypes.c_void_p(array.data_ptr())
    assert array.flags.c_contiguous, "native kernels take contiguous arrays"
    return ctypes.c_void_p(array.ctypes.data)
