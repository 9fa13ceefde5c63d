"""The architecture as a test: which part may import what."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pekoe.pipeline import registry

ROOT = Path(__file__).resolve().parents[2]
STAGES = (
    "data", "rollout", "reward", "trajectory", "control", "batch", "algorithm", "train", "weights", "evaluate",
    "leases",
)  # fmt: skip
HEAVY = ("torch", "mpi4py", "vllm", "transformers")

# Library -> the files (or folders) that may import it, below the root.
OWNERS = {
    "aiohttp": ("pipeline/agents/",),
    "mpi4py": ("launch/world.py", "launch/postoffice.py", "launch/exchange.py"),
    "submitit": ("launch/slurm.py", "launch/arrays.py"),
    "h5py": ("pipeline/trajectory/",),
    "torch_npu": ("pipeline/devices/",),
    "vllm": ("pipeline/rollout/engines/vllm",),
    "megatron": ("pipeline/train/engines/megatron",),
    "deepspeed": ("pipeline/train/engines/deepspeed",),
}


def source_files() -> list[Path]:
    return [file for top in ("pipeline", "launch", "kernels") for file in sorted((ROOT / top).rglob("*.py"))]


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Every module named by an import at any depth; `from a import b` gives a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of(file: Path) -> set[str]:
    return set(imported_modules(ast.parse(file.read_text(), str(file))))


def test_there_is_something_to_judge() -> None:
    assert len(source_files()) > 50
    assert "pekoe.pipeline.records" in imports_of(ROOT / "pipeline/batch/plan.py") | imports_of(
        ROOT / "pipeline/rollout/executor.py"
    )


@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_imports_another(stage: str) -> None:
    others = [f"pekoe.pipeline.{other}" for other in (*STAGES, "runs") if other != stage]
    offences = [
        f"{file.relative_to(ROOT)}: {module}"
        for file in sorted((ROOT / "pipeline" / stage).rglob("*.py"))
        for module in sorted(imports_of(file))
        if any(module == other or module.startswith(f"{other}.") for other in others)
    ]
    assert offences == []


def test_agents_stand_in_front_of_an_engine() -> None:
    """Of the stages the folder imports the engine protocol alone, and only the wiring imports it."""
    allowed = {"pekoe.pipeline.rollout.engine"}
    stages = tuple(f"pekoe.pipeline.{stage}" for stage in (*STAGES, "runs"))
    own = [
        f"{file.relative_to(ROOT)}: {module}"
        for file in sorted((ROOT / "pipeline" / "agents").rglob("*.py"))
        for module in sorted(imports_of(file))
        if module.startswith(stages) and not any(module == name or module.startswith(f"{name}.") for name in allowed)
    ]
    users = [
        str(file.relative_to(ROOT))
        for stage in STAGES
        for file in sorted((ROOT / "pipeline" / stage).rglob("*.py"))
        if any(module.startswith("pekoe.pipeline.agents") for module in imports_of(file))
    ]
    assert own + users == []


def test_pipeline_does_not_import_launch() -> None:
    offences = [
        f"{file.relative_to(ROOT)}: {module}"
        for file in sorted((ROOT / "pipeline").rglob("*.py"))
        for module in sorted(imports_of(file))
        if module.startswith("pekoe.launch")
    ]
    assert offences == []


def test_kernels_import_neither_the_pipeline_nor_launch() -> None:
    offences = [
        f"{file.relative_to(ROOT)}: {module}"
        for file in sorted((ROOT / "kernels").rglob("*.py"))
        for module in sorted(imports_of(file))
        if module.startswith(("pekoe.pipeline", "pekoe.launch"))
    ]
    assert offences == []


def importers(library: str) -> set[str]:
    """Files of `kernels/` that import a library."""
    return {
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "kernels").rglob("*.py"))
        if any(module == library or module.startswith(f"{library}.") for module in imports_of(file))
    }


def test_triton_and_ctypes_are_known_to_the_files_that_are_named_so() -> None:
    triton, native = importers("triton"), importers("ctypes")
    assert [file for file in triton if not Path(file).name.startswith("triton_")] == []
    assert [file for file in native if not Path(file).name.startswith("native")] == []
    assert "kernels/native/native_library.py" in native
    assert [str(f) for f in source_files() if f.name.startswith("triton_") and "kernels" not in f.parts] == []


@pytest.mark.parametrize("library", sorted(OWNERS))
def test_library_is_imported_by_its_owner_only(library: str) -> None:
    offences = [
        str(file.relative_to(ROOT))
        for file in source_files()
        if any(module == library or module.startswith(f"{library}.") for module in imports_of(file))
        and not str(file.relative_to(ROOT)).startswith(OWNERS[library])
    ]
    assert offences == []


def test_vendors_are_named_in_devices_only() -> None:
    """`torch.cuda` and `torch.npu`, as an attribute or an import."""
    offences = []
    for file in source_files():
        if file.is_relative_to(ROOT / "pipeline" / "devices"):
            continue
        tree = ast.parse(file.read_text(), str(file))
        named = {
            f"torch.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
        }
        found = (named | set(imported_modules(tree))) & {"torch.cuda", "torch.npu"}
        offences += [f"{file.relative_to(ROOT)}: {name}" for name in sorted(found)]
    assert offences == []


def loaded_heavy_modules(code: str) -> list[str]:
    """Runs code in a fresh interpreter and gives the heavy libraries that it loaded."""
    report = f"import sys; print('loaded', *[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1].split()[1:]


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, pekoe.launch.cli as cli\n"
        "sys.argv = ['pekoe', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
    )
    assert loaded_heavy_modules(code) == []


def test_loading_a_config_loads_nothing_heavy() -> None:
    code = "from pekoe.pipeline.config.load import load; load('configs/quickstart.yaml', ['seed=2'])"
    assert loaded_heavy_modules(code) == []


def test_planning_by_kernels_loads_nothing_heavy() -> None:
    code = (
        "from pekoe.kernels.packing import packing\n"
        "packing.best_fit([3, 4, 5], 8); packing.karmarkar_karp([1.0, 2.0], 2); packing.joint_plan([3, 4, 5], 2, 8)\n"
    )
    assert loaded_heavy_modules(code) == []


def test_the_heavy_check_would_see_torch() -> None:
    assert "torch" in loaded_heavy_modules("import torch")


TABLES = {
    name: table
    for name, table in vars(registry).items()
    if name.isupper() and isinstance(table, dict)
}  # fmt: skip


@pytest.mark.parametrize(
    ("table", "name"), [(table, name) for table, rows in TABLES.items() for name in rows]
)  # fmt: skip
def test_every_registry_line_loads(table: str, name: str) -> None:
    module, _, attribute = TABLES[table][name].partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))
