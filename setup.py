"""The native library; everything else about the package is in pyproject.toml and setup.cfg."""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
# Never -ffast-math: with -shared, gcc sets flush-to-zero for the whole process when the library is loaded.
FLAGS = [
    "-O3",
    "-std=c11",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fopenmp-simd",
    "-fvisibility=hidden",
]

setup(
    ext_modules=[
        Extension(
            "pekoe.kernels.native._pekoe_native",
            sources=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "kernels" / "native").glob("*.c")),
            depends=[str(path.relative_to(ROOT)) for path in (ROOT / "kernels" / "native").glob("*.h")],
            extra_compile_args=FLAGS,
            libraries=["m"],
            py_limited_api=True,
            # Without a compiler Pekoe installs all the same: the references run in its place.
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
