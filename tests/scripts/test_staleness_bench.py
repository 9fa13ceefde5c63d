"""The runs with an exact lag are what the benchmarks say of them."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "bench")]

import make_quickstart_model as material  # noqa: E402
import presets  # noqa: E402
import staleness  # noqa: E402
from staleness_trainer import RESAMPLED, LaggedRun, Task, one_rank  # noqa: E402

from pekoe.pipeline.config.load import preset_names  # noqa: E402

SMALL = ["train_dataset.batch_size=3", "gconfig.n_samples=2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model and problems before any training."""
    folder = tmp_path_factory.mktemp("quickstart")
    tokenizer = material.make_tokenizer()
    material.make_model(tokenizer, 1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    problems = [(a, b) for a in range(10, 20) for b in range(10, 20)]
    random.Random(1).shuffle(problems)
    material.write_problems(folder / "train.jsonl", problems[:80])
    material.write_problems(folder / "valid.jsonl", problems[80:])
    return folder


@pytest.fixture(scope="module", autouse=True)
def alone():
    """One rank and one thread, as in the benchmarks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with one_rank():
        yield
    torch.set_num_threads(threads)


def lagged(model: Path, eta: float, *settings: str) -> LaggedRun:
    config = staleness.run_config(model, 1, 1e-2, [*SMALL, *settings])
    return LaggedRun(config, eta, Task(model), 4)


@pytest.mark.parametrize("eta", [0.0, 2.0, float("inf")])
def test_the_weights_of_eta_versions_ago_sample(model: Path, eta: float) -> None:
    run = lagged(model, eta, "actor.entropy_coef=1.0", "actor.use_decoupled_loss=false")
    by_version = []
    for version in range(4):
        by_version.append({name: tensor.clone() for name, tensor in run.engine.weights()})
        figures = run.step()
        sampled_by = int(max(0, version - eta))
        held = dict(run.sampler.state_dict())
        assert all(torch.equal(held[name], tensor) for name, tensor in by_version[sampled_by].items() if name in held)
        assert figures["train/staleness"] == version - sampled_by
        assert (figures["train/kl_behaviour"] > 1e-6) == (version > sampled_by)
    run.close()
    assert not all(torch.equal(by_version[0][name], by_version[3][name]) for name in by_version[0])


def test_a_group_whose_rewards_are_equal_is_replaced_within_bounds(model: Path) -> None:
    run = lagged(model, 0.0, "algorithm=dapo")
    groups = run._sample()
    run.close()
    assert len(groups) == 3
    num_asked = len(run.task.train) - len(run.order)
    assert num_asked == 3 * (1 + RESAMPLED), "an untrained model gets nothing right"


@pytest.mark.trainers
@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_makes_steps(model: Path, preset: str) -> None:
    run = lagged(model, 1.0, *presets.settings_of(preset))
    for _ in range(2):
        figures = run.step()
    run.close()
    assert figures["train/staleness"] == 1
