"""A node without a network: an engine is built from local files alone, and never looks for more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

PROGRAM = """
import asyncio, socket, sys

def refuse(self, address):
    if self.family != socket.AF_UNIX:
        if self.type == socket.SOCK_STREAM:
            print("CONNECT", address, flush=True)
        raise OSError(101, "Network is unreachable")

def look_up(host, *rest, **named):
    print("LOOKUP", host, flush=True)
    raise socket.gaierror(-3, "Temporary failure in name resolution")

socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = look_up

from pekoe.pipeline.config.vllm_section import VllmConfig
from pekoe.pipeline.rollout.engine import EngineSettings, GenerationRequest, Instance, SamplingParameters
from pekoe.pipeline.rollout.engines.vllm.vllm_engine import VllmEngine

settings = EngineSettings(sys.argv[1], sys.argv[1], "float32", "cpu", 0, 4, 128, options=VllmConfig())
engine = VllmEngine.build(settings, Instance())
request = GenerationRequest((4, 5, 6), SamplingParameters(max_new_tokens=3, ignore_eos=True))
print("sampled", len(asyncio.run(engine.generate(request)).tokens))
engine.close()
"""


def start(model: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    environ = {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(tmp_path),
        "HOME": str(tmp_path),
        "HF_HOME": str(tmp_path / "hub"),
    }
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, model], env=environ, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.timeout(240)
def test_an_engine_is_built_without_a_network(tmp_path: Path, vllm_models: Any) -> None:
    done = start(str(vllm_models.folder()), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "sampled 3"
    tried = [line for line in done.stdout.splitlines() if line.startswith(("CONNECT", "LOOKUP"))]
    assert tried == [], "nothing was even looked for"
