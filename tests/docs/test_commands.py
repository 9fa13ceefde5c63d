"""Every command in README and docs is run, in the order in which a reader meets it.

Runs are made small by overrides behind the documented ones; paths of examples point to what the test made. A command
that fits no rule of `reader.py` fails the test: a new command needs a way to be run. Run elsewhere: what needs a Slurm
cluster (tests/slurm/test_documented_commands.py) or vLLM (tests/vllm/test_vllm_documented_commands.py), the lines of
SmolLM2 (tests/scripts/test_smollm2_recipe.py, slow) and of CI_RUNS; `scripts/test.sh` only collects here. The runs of
algorithms.md are in the lane trainers; those of configuration.md are checked here and run in the lane slow.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from documented_commands import PAGES, commands, needs_cluster, needs_vllm, of_algorithms, of_overrides
from reader import Reader
from test_algorithms_page import undocumented

AREAL = """
experiment_name: gsm8k-grpo
trial_name: trial0
seed: 1
total_train_epochs: 2
allocation_mode: sglang:d4p1t1+fsdp:d4p1t1
gconfig: {n_samples: 4, max_new_tokens: 1024, temperature: 1.0}
rollout: {max_concurrent_rollouts: 256, max_head_offpolicyness: 2}
actor: {path: Qwen/Qwen2.5-1.5B-Instruct, group_size: 4, eps_clip: 0.4}
train_dataset: {batch_size: 256, path: openai/gsm8k, type: rl}
"""


HERE = [(page, line) for page, line in commands() if not needs_cluster(page, line) and not needs_vllm(line)]


def type_all(reader: Reader, lines: list[str]) -> None:
    began = time.monotonic()
    for line in lines:
        assert time.monotonic() - began < 800
        reader.type(line)


@pytest.mark.timeout(900)
def test_every_documented_command_runs(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    (tmp_path / "areal.yaml").write_text(AREAL)
    typed = [
        line.replace("pekoe run ", "pekoe config check ") if of_overrides(page, line) else line
        for page, line in HERE
        if not of_algorithms(line)
    ]
    assert len(typed) > 15
    type_all(Reader(tmp_path, tiny_model, sums), typed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_documented_override_runs(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    typed = [line for page, line in HERE if of_overrides(page, line)]
    assert len(typed) > 3
    type_all(Reader(tmp_path, tiny_model, sums), typed)


@pytest.mark.trainers
@pytest.mark.timeout(900)
def test_every_documented_run_of_an_algorithm_or_a_task_runs(tmp_path: Path, tiny_model: Path, sums: Path) -> None:
    typed = [line for _, line in HERE if of_algorithms(line)]
    assert len(typed) > 5
    type_all(Reader(tmp_path, tiny_model, sums), typed)
    written = list(tmp_path.rglob("metrics.jsonl"))
    assert len(written) == len(typed)
    reported = {name for path in written for line in path.read_text().splitlines() for name in json.loads(line)}
    assert undocumented(reported) == set()


def test_documented_files_exist() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
    assert shutil.which("bash")
