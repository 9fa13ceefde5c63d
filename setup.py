"""The native library; everything else about the package is in pyproject.toml and setup.cfg.

Without a C compiler Pekoe installs all the same, and the references run in the place of the native kernels. With
PEKOE_NATIVE=required in the environment that is an error.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
NATIVE = ROOT / "kernels" / "native"
# Never -ffast-math: with -shared, gcc sets flush-to-zero for the whole process when the library is loaded.
FLAGS = [
    "-O3",
    "-g0",
    "-std=c11",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fopenmp-simd",
    "-fvisibility=hidden",
]
DIGEST = runpy.run_path(str(NATIVE / "native_library.py"))["source_digest"](NATIVE)


class BuildLibrary(build_ext):
    """Compiles always: times of files say little after a change of branch."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True


def is_required() -> bool:
    wanted = os.environ.get("PEKOE_NATIVE", "")
    if wanted not in ("", "optional", "required"):
        raise SystemExit(f"PEKOE_NATIVE: {wanted!r} is not allowed; allowed: optional, required")
    return wanted == "required"


setup(
    ext_modules=[
        Extension(
            "pekoe.kernels.native._pekoe_native",
            sources=sorted(str(path.relative_to(ROOT)) for path in NATIVE.glob("*.c")),
            depends=sorted(str(path.relative_to(ROOT)) for path in NATIVE.glob("*.h")),
            define_macros=[("PEKOE_SOURCES", f'"{DIGEST}"')],
            extra_compile_args=FLAGS,
            libraries=["m"],
            py_limited_api=True,
            optional=not is_required(),
        )
    ],
    cmdclass={"build_ext": BuildLibrary},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
