"""The packaging: what is listed, what is built, and what a checkout on sys.path must not break."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMESPACES = ("pipeline", "launch", "kernels")


def setup_options() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def folders_with_python() -> set[str]:
    """Every folder below the mapped ones that holds a Python file, as a package name."""
    found = set()
    for top in NAMESPACES:
        for file in (ROOT / top).rglob("*.py"):
            found.add(".".join(["pekoe", *file.parent.relative_to(ROOT).parts]))
    return found


def test_package_list_equals_the_folders() -> None:
    listed = setup_options()["options"]["packages"].split()
    assert len(listed) == len(set(listed))
    assert set(listed) - {"pekoe.configs"} == folders_with_python()


def test_mapped_folders_are_namespaces_and_the_others_say_what_they_do() -> None:
    for top in NAMESPACES:
        assert not (ROOT / top / "__init__.py").exists(), f"{top}/__init__.py would shadow installed packages"
    for name in folders_with_python() - {f"pekoe.{top}" for top in NAMESPACES}:
        text = (ROOT / Path(*name.split(".")[1:]) / "__init__.py").read_text()
        assert text.startswith('"""'), f"{name}: __init__.py is a docstring"
        assert text.rstrip().endswith('"""'), f"{name}: __init__.py holds nothing but its docstring"


def test_every_folder_of_configs_is_package_data() -> None:
    patterns = [p.strip() for p in setup_options()["options.package_data"]["pekoe.configs"].split(",")]
    configs = ROOT / "configs"
    covered = {file for pattern in patterns for file in configs.glob(pattern)}
    assert covered == set(configs.rglob("*.yaml"))


def test_checkout_on_the_path_does_not_shadow_hugging_face_kernels() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import transformers.integrations.hub_kernels"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_wheel_holds_the_code_and_the_configs(built: Path, checkout: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for top in (*NAMESPACES, "configs"):
        for file in [*(checkout / top).rglob("*.py"), *(checkout / top).rglob("*.yaml")]:
            assert f"pekoe/{file.relative_to(checkout)}" in names
    assert not [name for name in names if name.startswith(("pekoe/tests", "tests", "scripts"))]


def test_wheel_and_sdist_install_and_run_elsewhere(built: Path, tmp_path: Path) -> None:
    """Without dependencies, over those of this interpreter: what is asked is whether Pekoe's own files are there."""
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    for archive in (wheel, sdist):
        place = tmp_path / archive.name
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", str(place)]
        done = subprocess.run([*command, str(archive)], capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        code = (
            "import pekoe.launch.cli, pekoe.pipeline.config.load as load, sys\n"
            f"assert load.__file__.startswith({str(place)!r}), load.__file__\n"
            "config = load.load(load.PRESETS.parent / 'quickstart.yaml')\n"
            "assert config.experiment_name == 'quickstart'\n"
            "sys.argv = ['pekoe', '--help']; pekoe.launch.cli.main()\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(place)}
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
        assert "run" in ran.stdout
