"""Real MPI worlds for tests: starts `world_program.py` under the local launcher and reads what its ranks said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "world_program.py"
LAUNCH = """
import sys
from pathlib import Path
from pekoe.launch.local import LocalWorld, run_local_world
from pekoe.pipeline.run_directory import RunDirectory
run, ranks, *program = sys.argv[1:]
sys.exit(run_local_world(LocalWorld(RunDirectory(Path(run)), 0, int(ranks), tuple(program))))
"""


@dataclass
class Ended:
    """How a world ended."""

    code: int
    seconds: float
    output: str
    said: list[dict[str, Any]]
    records: list[dict[str, Any]]


class StartedWorld:
    """A world under way; `finish` waits for its end."""

    def __init__(self, run: Path, what: str, num_ranks: int = 2, program: Path = PROGRAM) -> None:
        self.run = run
        self.started = time.monotonic()
        self.out = open(run.with_suffix(".out"), "w+")  # noqa: SIM115
        arguments = [sys.executable, "-c", LAUNCH, str(run), str(num_ranks), str(program), str(run), what]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI_"))}
        self.process = subprocess.Popen(arguments, stdout=self.out, stderr=subprocess.STDOUT, env=environ)

    def said(self) -> list[dict[str, Any]]:
        """JSON objects in the output; mpiexec may lay two ranks' lines end to end."""
        text, decoder, found = self._output(), json.JSONDecoder(), []
        position = text.find("{")
        while position >= 0:
            try:
                value, end = decoder.raw_decode(text, position)
                found.append(value)
            except json.JSONDecodeError:
                end = position + 1
            position = text.find("{", end)
        return found

    def wait_until_said(self, count: int, seconds: float = 90.0) -> list[dict[str, Any]]:
        deadline = time.monotonic() + seconds
        while len(self.said()) < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the world said {len(self.said())} of {count} things:\n{self._output()}")
            time.sleep(0.02)
        return self.said()

    def finish(self, seconds: float = 90.0) -> Ended:
        try:
            code = self.process.wait(seconds)
        finally:
            self.process.kill()
        records = [json.loads(path.read_text()) for path in sorted((self.run / "errors").glob("*.json"))]
        return Ended(code, time.monotonic() - self.started, self._output(), self.said(), records)

    def _output(self) -> str:
        return self.run.with_suffix(".out").read_text()
