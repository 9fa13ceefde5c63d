"""A real Slurm cluster of virtual nodes (`scripts/slurm_cluster.sh`), as tests use it. Every wait has a limit."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from pekoe.launch.slurm_commands import without_identity

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "slurm_cluster.sh"
ENDED = frozenset(
    {
        "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "DEADLINE",
        "BOOT_FAIL", "REVOKED",
    }
)  # fmt: skip
"""States that a job does not leave."""
NODES = ("n1", "n2", "n3", "n4")
POLL_SECONDS = 0.2
UP_SECONDS = 280.0
"""The first start of a machine installs packages."""


class Cluster:
    """Four nodes n1…n4 of 4 CPUs each; partitions debug, low (preempted by requeue), high; gres gpu:h100 and
    npu:ascend910b."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.folder = folder
        """Of tests: scripts and output of jobs; all nodes see it."""
        self.home = Path(f"/tmp/pekoe-slurm-{number}")
        self.jobs: list[str] = []
        """Every job that `sbatch` has given, in order."""
        self._scripts = 0

    @property
    def environment(self) -> dict[str, str]:
        """For processes outside any job."""
        kept = without_identity(os.environ)
        return {**kept, "SLURM_CONF": str(self.home / "etc" / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def up(self) -> None:
        """AssertionError with the script's words when it does not come up, also not at a second try: the kernel takes
        the network of a cluster that was just put down away in its own time."""
        done = self._script("up", UP_SECONDS)
        if done.returncode:
            self.down()
            time.sleep(3.0)
            done = self._script("up", UP_SECONDS)
        logs = "\n".join(f"--- {path}\n{_tail(path, 5)}" for path in sorted((self.home / "log").glob("*")))
        assert done.returncode == 0, f"{done.stdout}\n{logs}"

    def down(self) -> str:
        return self._script("down", 90.0).stdout

    def run(
        self,
        arguments: Sequence[str | Path],
        seconds: float = 60.0,
        cwd: Path | None = None,
        variables: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """A command on the login node; its output and errors are both in `stdout`."""
        done = subprocess.run(
            [str(argument) for argument in arguments], env={**self.environment, **(variables or {})},
            cwd=cwd or self.folder, timeout=seconds, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}"
        return done

    def sbatch(
        self,
        script: str | Path,
        *flags: str,
        arguments: Sequence[str | Path] = (),
        cwd: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> str:
        """Submits a file, or a text that becomes one; returns the job's id. Its output is `self.output(job)`."""
        if isinstance(script, str):
            self._scripts += 1
            path = self.folder / f"script-{self._scripts}.sh"
            path.write_text(script if script.startswith("#!") else f"#!/bin/bash\n{script}\n")
        else:
            path = script
        own = ["--parsable", f"--output={self.folder}/job-%A-%a.out", "--open-mode=append"]
        said = self.run(["sbatch", *own, *flags, path, *arguments], cwd=cwd, variables=variables).stdout
        job = said.strip().splitlines()[-1].split(";")[0]
        self.jobs.append(job)
        return job

    def output(self, job: str) -> str:
        """What the job has written until now, all attempts and elements, with the number of an array's element."""
        return "".join(
            f"--- {path.name}\n{path.read_text(errors='replace')}"
            for path in sorted(self.folder.glob(f"job-{job}-*.out"))
        )

    def state(self, job: str) -> str:
        """As squeue or, when it has forgotten the job, sacct says: PENDING, RUNNING, COMPLETED, …; "" if neither
        knows it. Of an array all states of its elements, joined by commas."""
        asked = ["squeue", "--noheader", "--jobs", job, "--states=all", "--format=%T"]
        said = self.run(asked, check=False)
        words = said.stdout.split() if said.returncode == 0 else []
        if not words:
            asked = ["sacct", "--noheader", "--parsable2", "--allocations", "--jobs", job, "--format=State"]
            words = [line.split()[0] for line in self.run(asked, check=False).stdout.splitlines() if line.strip()]
        return ",".join(sorted(set(words)))

    def wait(self, job: str, states: Collection[str] = ENDED, seconds: float = 150.0) -> str:
        """Until the job (every element of an array) is in one of the states; returns it."""
        wanted = {states} if isinstance(states, str) else set(states)
        self.wait_for(lambda: self._is_in(job, wanted), seconds, f"job {job} in {', '.join(sorted(wanted))}")
        return self.state(job)

    def wait_for(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """AssertionError naming `what` when the condition is not true within the time."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}\n{self.logs()}"
            time.sleep(POLL_SECONDS)

    def scontrol(self, *arguments: str) -> str:
        return self.run(["scontrol", *arguments]).stdout

    def facts(self, job: str) -> dict[str, str]:
        """`scontrol show job`, name by name."""
        words = self.scontrol("--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def processes(self, job: str) -> list[psutil.Process]:
        """Every live process of the job, on any node: known by the SLURM_JOB_ID that it inherited."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                known = process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
                if known.get("SLURM_JOB_ID") == job and known.get("SLURM_CONF", "").startswith(str(self.home)):
                    found.append(process)
        return found

    def logs(self) -> str:
        """Last lines of the daemons and of the output of the last jobs, for a failed test."""
        paths = [self.home / "log" / "slurmctld.log", *sorted((self.home / "log").glob("slurmd-n*.log"))]
        jobs = sorted(self.folder.glob("job-*.out"), key=lambda path: path.stat().st_mtime)
        parts = [f"--- {path}\n{_tail(path, 15 if path in paths else 60)}" for path in [*paths, *jobs[-3:]]]
        return "\n".join(parts)

    def clear(self) -> None:
        """No job, all nodes idle: as a test finds the cluster."""
        if self.run(["squeue", "--noheader"], check=False).stdout.strip():
            self.run(["scancel", "--full", "--user=root"], check=False)
            self.run(["scancel", "--user=root"], check=False)
            self.wait_for(lambda: not self.run(["squeue", "--noheader"], check=False).stdout.strip(), 120, "no job")
        ill = self.run(["sinfo", "--noheader", "--Node", "--states=down,drain,fail", "--format=%N"]).stdout.split()
        for node in sorted(set(ill)):
            self.scontrol("update", f"nodename={node}", "state=resume")

    def _is_in(self, job: str, wanted: set[str]) -> bool:
        states = [state for state in self.state(job).split(",") if state]
        return bool(states) and set(states) <= wanted

    def _script(self, action: str, seconds: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(SCRIPT), action], env={**os.environ, "PEKOE_SLURM_ID": str(self.number)}, timeout=seconds,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip


@contextlib.contextmanager
def own_number() -> Iterator[int]:
    """A number that no other test session on this machine uses, from 40."""
    for number in range(40, 60):
        with open(f"/tmp/pekoe-slurm-test-{number}.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield number
            return
    raise AssertionError("numbers 40 to 59 are all taken: 20 test sessions with a cluster each")


def _tail(path: Path, lines: int) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    return "(not there)"
