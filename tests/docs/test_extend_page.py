"""The examples of docs/extend.md work as they stand: by their interface, and in a real run that names them in YAML."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_algorithms_page import undocumented

from pekoe.pipeline.algorithm.estimator_terms import EstimatorTerms
from pekoe.pipeline.algorithm.policy_terms import PolicyTerms
from pekoe.pipeline.algorithm.reduction import OneRank
from pekoe.pipeline.config.actor import ActorConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extend.md").read_text()


def example(name: str) -> str:
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.S) if text.startswith(f"# {name}\n")]
    return str(block)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("extend")
    for name in ("my_rewards.py", "my_algorithms.py"):
        (path / name).write_text(example(name))
    return path


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_objective_has_its_optimum_on_the_bound(folder: Path) -> None:
    objective = load(folder / "my_algorithms.py").simple_policy_loss
    config = ActorConfig(eps_clip=0.2)
    prox = torch.tensor([-1.0, -1.0, -2.0, 0.0], dtype=torch.float64)
    ratio = torch.tensor([1.0, 1.2, 0.8, 1.0], dtype=torch.float64)
    logprobs = (prox + ratio.log()).requires_grad_()
    advantages = torch.tensor([1.0, 2.0, -1.0, 0.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    terms = PolicyTerms(logprobs, prox, prox, advantages, mask, torch.zeros(4, dtype=torch.int64), 1, config, {})
    loss = objective(terms)
    torch.testing.assert_close(
        loss.values.detach(), torch.tensor([-1.0, 2 * 0.1 - 2.4, 0.1 + 0.8, 0.0], dtype=torch.float64)
    )
    (gradient,) = torch.autograd.grad(loss.values.sum(), logprobs)
    torch.testing.assert_close(gradient, torch.tensor([-1.0, 0.0, 0.0, 0.0], dtype=torch.float64), atol=1e-12, rtol=0)
    assert loss.stats["outside"].tolist() == [False, False, False, False]
    far = PolicyTerms(prox + 1, prox, prox, advantages, mask, terms.index, 1, config, {})
    assert objective(far).stats["outside"].tolist() == [True] * 4


def test_the_estimator_weighs_rewards_by_length(folder: Path) -> None:
    estimator = load(folder / "my_algorithms.py").length_weighted
    terms = EstimatorTerms(
        rewards=torch.tensor([0, 0, 1.0, 0, 0, 0.0, 0, 5.0], dtype=torch.float64),
        mask=torch.tensor([0, 1, 1, 0, 1, 1, 0, 1]).bool(),
        turns=torch.tensor([-1, 0, 0, -1, 0, 0, -1, 0]),
        cu_seqlens=torch.tensor([0, 3, 6, 8]),
        values=None,
        bootstrap=None,
        groups=torch.tensor([0, 0, 1]),
        num_groups=2,
        samples=torch.tensor([0, 1, 0]),
        config=ActorConfig(),
        over=OneRank(),
    )
    advantages, returns = estimator(terms)
    assert advantages.tolist() == [0, 0.5, 0.5, 0, -0.5, -0.5, 0, 0]
    assert returns.tolist() == [0, 1, 1, 0, 0, 0, 0, 5]


def test_the_reward_counts_tokens(folder: Path) -> None:
    assert load(folder / "my_rewards.py").length_reward("", "", [], [1] * 25, answer="") == -0.25


def test_a_run_takes_objective_estimator_and_reward_from_files_named_in_yaml(
    folder: Path, tiny_model: Path, sums: Path
) -> None:
    (named,) = [text for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.S) if "my_algorithms" in text]
    own = "  path: {model}\n  dtype: float32\n  mb_spec: {{max_tokens_per_mb: 512}}\n  ppo_n_minibatches: 2\n"
    (folder / "run.yaml").write_text(named.replace("actor:\n", "actor:\n" + own.format(model=tiny_model)))
    overrides = [
        "experiment_name=extend", "trial_name=mine", "allocation=hf:d1+fsdp:d1", f"cluster.fileroot={folder}",
        "cluster.device=cpu", "cluster.threads_per_rank=1", "train_dataset.type=jsonl", f"train_dataset.path={sums}",
        "train_dataset.batch_size=2", "gconfig.n_samples=4", "gconfig.max_new_tokens=8", "gconfig.max_tokens=128",
        "total_train_steps=2", "reward.name=my_rewards:length_reward", "actor.optimizer.lr=1e-2",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pekoe.launch.cli", "run", "run.yaml", *overrides],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    lines = (folder / "extend" / "mine" / "metrics" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["train/updates"] for step in steps] == [2, 2]
    assert all(0 <= step["train/outside"] <= 1 for step in steps)
    assert steps[0]["advantage/abs"] > 0
    assert undocumented({name for step in steps for name in step}) == {"train/outside"}
