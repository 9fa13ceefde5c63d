"""A node without a network: what a rank loads at its start is found under local paths, or named within seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, socket, sys

def refuse(self, address):
    if self.family != socket.AF_UNIX:
        print("CONNECT", address, flush=True)
        raise OSError(101, "Network is unreachable")

def look_up(host, *rest, **named):
    print("LOOKUP", host, flush=True)
    raise socket.gaierror(-3, "Temporary failure in name resolution")

socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = look_up

from pekoe.launch import rank_environment
from pekoe.launch.allocation import parse
from pekoe.pipeline.config.load import load
from pekoe.pipeline.config.paths import resolve_paths

config = resolve_paths(load(sys.argv[1]))
rank_environment.enter(rank_environment.plan(os.environ, parse("hf:d1|fsdp:d1"), config))

from transformers import AutoModelForCausalLM, AutoTokenizer
from pekoe.pipeline.data import dataset

tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path or config.actor.path)
model = AutoModelForCausalLM.from_pretrained(config.actor.path)
rows = dataset.build(config.train_dataset)
print("loaded", len(tokenizer) > 0, model.num_parameters() > 0, len(rows))
"""


def start(tmp_path: Path, model: str, data: Path) -> subprocess.CompletedProcess[str]:
    config = tmp_path / "run.yaml"
    config.write_text(
        "experiment_name: e\ntrial_name: t\nallocation: hf:d1|fsdp:d1\n"
        f"actor: {{path: {model}}}\ntrain_dataset: {{type: jsonl, path: {data}}}\n"
        f"cluster: {{fileroot: {tmp_path}, n_gpus_per_node: 1, device: cpu}}\n"
    )
    environ = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), "HF_HOME": str(tmp_path / "hub")}
    environ |= {name: os.environ[name] for name in ("HOME",) if name in os.environ}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(config)], env=environ, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


@pytest.mark.timeout(240)
def test_a_start_without_network_succeeds(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    done = start(tmp_path, str(tiny_model), sums)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "loaded True True 40", "nothing was even tried over the network"


def test_or_names_what_is_missing_soon(tmp_path: Path, sums: Path) -> None:
    began = time.monotonic()
    done = start(tmp_path, "org/Model-7B", sums)
    assert time.monotonic() - began < 60
    assert done.returncode != 0
    assert "actor.path: 'org/Model-7B' is no local path and not in the local Hugging Face cache" in done.stderr
    assert "CONNECT" not in done.stdout
