"""Runs the self-test cases of every native implementation and writes down what each C function is called with.

    python record_calls.py OUT      OUT/calls: one record per call; OUT/functions.json: prototypes in C

A record is the function's index (int64), then per argument 8 bytes: an integer, a double, or a pointer's size in bytes
and those bytes (-1: null; -2 - k: the same as argument k). Parts of tensors, and numpy arrays that did not come through
`pointer`, are written with what follows them in memory.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from pathlib import Path
from typing import IO, Any

import torch

from pekoe.kernels import registry, self_test
from pekoe.kernels.native import native_library as module

WINDOW_BYTES = 1 << 16
INTEGERS: dict[Any, str] = {ctypes.c_int64: "int64_t", ctypes.c_int32: "int32_t", ctypes.c_size_t: "size_t"}
REALS: dict[Any, str] = {ctypes.c_double: "double", ctypes.c_float: "float"}


class Recorder:
    """The calls of one library."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.prototypes: list[list[str]] = []
        """[name, result, arguments…] in C, by index."""
        self.sizes: dict[int, int] = {}
        """Of the arrays that were pointed to since, by address."""

    def watch(self) -> None:
        """Before any kernel asks for the library or for `pointer`."""
        pointer, library, recorder = module.pointer, module.native_library(), self

        def remember(array: Any) -> ctypes.c_void_p:
            found = pointer(array)
            if found.value:
                size = array.numel() * array.element_size() if hasattr(array, "data_ptr") else array.nbytes
                self.sizes[found.value] = size
            return found

        class Watched(library._FuncPtr):  # type: ignore[misc,name-defined]
            _flags_, _restype_ = library._FuncPtr._flags_, library._FuncPtr._restype_  # type: ignore[attr-defined]

            def __call__(self, *arguments: Any) -> Any:
                recorder.write(self, arguments)
                return super().__call__(*arguments)

        plain = torch.Tensor.data_ptr

        def remember_storage(tensor: torch.Tensor) -> int:
            found = plain(tensor)
            begin = tensor.storage_offset() * tensor.element_size()
            self.sizes[found] = tensor.untyped_storage().nbytes() - begin
            return found

        vars(module)["pointer"] = remember
        torch.Tensor.data_ptr = remember_storage  # type: ignore[method-assign]
        vars(library)["_FuncPtr"] = Watched

    def write(self, function: Any, arguments: tuple[Any, ...]) -> None:
        kinds = list(function.argtypes or ())
        assert len(kinds) == len(arguments), f"{function.__name__}: argtypes are not set"
        named = {**INTEGERS, **REALS, ctypes.c_void_p: "void *"}
        result = "void" if function.restype is None else named[function.restype]
        prototype = [function.__name__, result, *(named[kind] for kind in kinds)]
        if prototype not in self.prototypes:
            self.prototypes.append(prototype)
        self.file.write(struct.pack("<q", self.prototypes.index(prototype)))
        places: dict[int, int] = {}
        for place, (kind, argument) in enumerate(zip(kinds, arguments, strict=True)):
            value = getattr(argument, "value", argument)
            if kind in INTEGERS:
                self.file.write(struct.pack("<q", value))
            elif kind in REALS:
                self.file.write(struct.pack("<d", value))
            elif not value:
                self.file.write(struct.pack("<q", -1))
            elif value in places:
                self.file.write(struct.pack("<q", -2 - places[value]))
            else:
                places[value] = place
                content = ctypes.string_at(value, self.sizes.get(value) or window_at(value))
                self.file.write(struct.pack("<q", len(content)) + content)
        self.sizes.clear()


def window_at(address: int) -> int:
    """Bytes that can be read from an address on, up to WINDOW_BYTES."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(text, 16) for text in line.split()[0].split("-"))
        if begin <= address < end:
            return min(end - address, WINDOW_BYTES)
    raise AssertionError(f"{address:#x} is not mapped")


def main(out: Path) -> None:
    with open(out / "calls", "wb") as file:
        recorder = Recorder(file)
        recorder.watch()
        for operation, rows in registry.OPERATIONS.items():
            for row in (row for row in rows if row.name == "native"):
                make = self_test.cases_of(operation)
                assert make is not None, f"{operation} has no cases"
                function = registry.load(row)
                for case in (case for seed in self_test.SEEDS for case in make(seed)):
                    self_test.results_of(function, case, "cpu")
    (out / "functions.json").write_text(json.dumps(recorder.prototypes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
