"""Versions of what a run is made of, read without loading it, and what is wrong with them."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata, util
from pathlib import Path

import msgspec

from pekoe.pipeline.runs.finding import Finding, ok, problem

AREA = "versions"
PACKAGES = ("torch", "transformers", "h5py", "mpi4py", "mpich", "openmpi", "numpy", "submitit", "vllm", "torch_npu")
NEEDED = ("torch", "transformers", "h5py", "mpi4py")
OLDEST_HDF5 = (1, 10, 7)
"""The first whose file locking can be turned off for one file."""
PYTHON = (3, 11)


class VersionFacts(msgspec.Struct):
    """Of one process on one host."""

    host: str
    python: str
    executable: str
    platform: str
    """Kernel and machine."""
    pekoe: str
    """Version, and the folder that it is loaded from."""
    packages: dict[str, str]
    """Those that are installed."""
    torch_build: str
    """`cpu`, `cuda 12.8`, `rocm 6.4`, or `npu` where torch_npu is beside it."""
    hdf5: str
    """Library under h5py, or why it cannot be loaded."""


def measure(host: str) -> VersionFacts:
    """Loads h5py and nothing heavier."""
    found = {name: version for name in PACKAGES if (version := _version(name))}
    return VersionFacts(
        host=host,
        python=platform.python_version(),
        executable=sys.executable,
        platform=f"{platform.release()} {platform.machine()}",
        pekoe=f"{_version('pekoe')} in {Path(__file__).resolve().parents[2]}",
        packages=found,
        torch_build=torch_build(found),
        hdf5=_hdf5(),
    )


def torch_build(packages: Mapping[str, str]) -> str:
    """For which devices torch was built, from its own file of versions."""
    if "torch" not in packages:
        return ""
    spec = util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    builds = re.findall(r"^(cuda|hip)\b[^=\n]*= '([^']+)'", text, re.M)
    names = [f"{'rocm' if kind == 'hip' else kind} {version}" for kind, version in builds] or ["cpu"]
    return " + ".join([*names, *(["npu"] if "torch_npu" in packages else [])])


def judge_one(facts: VersionFacts, device: str) -> list[Finding]:
    """Of this process. `device` is what the configuration wants: auto, cpu, cuda or npu."""
    names = ", ".join(f"{name} {version}" for name, version in facts.packages.items())
    found = [ok(AREA, f"python {facts.python} ({facts.executable}), pekoe {facts.pekoe}"), ok(AREA, names)]
    missing = [name for name in NEEDED if name not in facts.packages]
    if missing:
        text = f"{', '.join(missing)}: not installed in this environment"
        found.append(problem(AREA, text, f"{facts.executable} -m pip install pekoe (it depends on them)"))
    if tuple(int(part) for part in facts.python.split(".")[:2]) < PYTHON:
        found.append(problem(AREA, f"python {facts.python} is too old", "use Python 3.11 or newer"))
    numbers = re.fullmatch(r"(\d+)\.(\d+)\.(\d+).*", facts.hdf5)
    if numbers is None:
        found.append(problem(AREA, f"HDF5: {facts.hdf5}", f"{facts.executable} -m pip install --force-reinstall h5py"))
    elif tuple(map(int, numbers.groups())) < OLDEST_HDF5:
        text = f"HDF5 {facts.hdf5} under h5py cannot leave file locks alone"
        found.append(problem(AREA, text, "h5py with HDF5 1.10.7 or newer, e.g. its wheel from PyPI"))
    else:
        found.append(ok(AREA, f"HDF5 {facts.hdf5}; shards are opened with file locking off"))
    wanted = {"cuda": ("cuda", "rocm"), "npu": ("npu",)}.get(device, ())
    if facts.torch_build and wanted and not any(name in facts.torch_build for name in wanted):
        text = f"torch is a build for {facts.torch_build}, but cluster.device is {device}"
        step = "install torch_npu beside torch" if device == "npu" else "install the CUDA (or ROCm) build of torch"
        found.append(problem(AREA, text, f"{step}, or set cluster.device"))
    elif facts.torch_build:
        found.append(ok(AREA, f"torch is built for {facts.torch_build}"))
    return found


def judge_same(all_facts: Sequence[VersionFacts]) -> list[Finding]:
    """Nodes must run the same things."""
    if len(all_facts) < 2:
        return []
    found = []
    for name in sorted({name for facts in all_facts for name in _compared(facts)}):
        values: dict[str, list[str]] = {}
        for facts in all_facts:
            values.setdefault(_compared(facts).get(name, "none"), []).append(facts.host)
        if len(values) > 1:
            text = f"{name} differs: " + "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in values.items())
            step = "put the environment on the shared filesystem, or pack it (cluster.slurm.packed_environment)"
            found.append(problem(AREA, text, step))
    hosts = ", ".join(facts.host for facts in all_facts)
    return found or [ok(AREA, f"the same on {hosts}")]


def _compared(facts: VersionFacts) -> dict[str, str]:
    own = {"python": facts.python, "pekoe": facts.pekoe, "HDF5": facts.hdf5, "torch's build": facts.torch_build}
    return {**own, **facts.packages}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _hdf5() -> str:
    os.environ.setdefault("HDF5_USE_FILE_LOCKING", "FALSE")
    try:
        from pekoe.pipeline.trajectory.hdf5_layout import h5py
    except (ImportError, OSError) as error:
        return f"h5py cannot be loaded: {error}"
    return str(h5py.version.hdf5_version)
