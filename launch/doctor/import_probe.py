"""A child process that loads the heavy libraries and says how long it took and what they found; `pekoe doctor` starts
it with a time limit, since a broken library may hang or end the process.

    python -m pekoe.launch.doctor.import_probe DEVICE

Neither MPI_Init is called nor a device context kept.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time

import msgspec

from pekoe.launch.doctor.rank_pair import attempt

IMPORT_SECONDS = 40.0


class ImportFacts(msgspec.Struct):
    """What loading showed."""

    torch_seconds: float | None = None
    device: str = ""
    """The kind that was chosen."""
    num_devices: int = 0
    error: str = ""


def main(kind: str) -> None:
    """Prints the facts as one line of JSON."""
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    facts = ImportFacts()
    began = time.monotonic()
    loaded = attempt(lambda: importlib.import_module("torch") and None)
    facts.torch_seconds = round(time.monotonic() - began, 3)
    facts.error = loaded.error
    if not loaded.error:
        found = attempt(lambda: _devices(kind))
        facts.error = found.error
        facts.device, facts.num_devices = found.value or (kind, 0)
    print(msgspec.json.encode(facts).decode(), flush=True)


def _devices(kind: str) -> tuple[str, int]:
    from pekoe.pipeline.devices.device import choose

    device = choose(kind)
    return device.kind, device.count() if device.is_available() else 0


class Imports:
    """The child, under way."""

    def __init__(self, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pekoe.launch.doctor.import_probe", kind],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._began = time.monotonic()

    def result(self, seconds: float = IMPORT_SECONDS) -> ImportFacts:
        """Waits until so many seconds after the start at most; then the child is killed."""
        try:
            out, err = self._process.communicate(timeout=max(0.1, self._began + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.end()
            return ImportFacts(error=f"not loaded within {seconds:.0f} s")
        lines = out.strip().splitlines()
        if self._process.returncode or not lines:
            words = err.strip().splitlines()[-1:] or [f"ended with {self._process.returncode}"]
            return ImportFacts(error=words[0])
        return msgspec.convert(json.loads(lines[-1]), ImportFacts)

    def end(self) -> None:
        """Whatever it does."""
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    main(sys.argv[1])
