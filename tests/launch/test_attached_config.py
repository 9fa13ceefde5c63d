"""What a world that attaches may be told, and that its engines are checked as those of a run are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pekoe.launch.allocation import place_attached
from pekoe.launch.attach import attached_config
from pekoe.launch.attempts import prepare_run
from pekoe.launch.checked_config import load_checked
from pekoe.pipeline.config import engine_checks
from pekoe.pipeline.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path, sums: Path) -> RunDirectory:
    """A trainer's run directory, as it is before the first rank starts."""
    (tmp_path / "empty.yaml").write_text("{}\n")
    overrides = {
        "trial_name": "served", "allocation": "fsdp:d1", "rollout_array.enabled": "true", "actor.path": tiny_model,
        "train_dataset.type": "jsonl", "train_dataset.path": sums, "cluster.fileroot": tmp_path,
        "cluster.n_gpus_per_node": 4, "gconfig.n_samples": 4, "gconfig.max_new_tokens": 8, "reward.name": "gsm8k",
    }  # fmt: skip
    config, _ = load_checked(tmp_path / "empty.yaml", [f"{key}={value}" for key, value in overrides.items()])
    return prepare_run(config)


@pytest.fixture(params=[True, False], ids=["vllm", "no-vllm"])
def vllm_is_there(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """It is looked for, never imported."""
    real = importlib.util.find_spec
    found = real("json") if request.param else None
    monkeypatch.setattr(
        engine_checks.importlib.util, "find_spec", lambda name, *rest: found if name == "vllm" else real(name, *rest)
    )
    return bool(request.param)


def test_a_world_has_an_engine_of_its_own(run: RunDirectory, vllm_is_there: bool) -> None:
    asked = ["allocation=vllm:d1t2", "vllm.kv_cache_gib=0.5", "rollout.engine_process=own", "rollout.max_slots=8"]
    if not vllm_is_there:
        with pytest.raises(ValueError, match="allocation: 'vllm:d1t2' needs vLLM, which is not installed here: pip"):
            attached_config(run, asked)
        return
    config, placement = attached_config(run, asked)
    assert (str(placement), config.vllm.kv_cache_gib, config.rollout.engine_process) == ("vllm:d1t2", 0.5, "own")
    assert placement.rollout_leaders == (0,)


@pytest.mark.parametrize("vllm_is_there", [True], indirect=True)
@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (["allocation=vllm:d1t3"], "allocation: 'vllm:d1t3' has inference engines of 3 ranks for a model of 4"),
        (["allocation=vllm:d1t2", "rollout.engine_process=child"], "in child processes, which have one device each"),
        (["allocation=vllm:d1", "vllm.extra.seed=3"], "vllm.extra: 'seed' is set already; allowed instead: seed"),
        (["allocation=hf:d9", "cluster.n_nodes=2"], "allocation: 'hf:d9' has 9 ranks; allowed: <= cluster.n_nodes"),
        (["allocation=hf:d1", "rollout.dtype=bfloat16"], "samples as its run does; allowed here: .*, vllm$"),
    ],
)
@pytest.mark.usefixtures("vllm_is_there")
def test_an_engine_that_cannot_serve_is_refused(run: RunDirectory, asked: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        attached_config(run, asked)


def test_an_attached_placement_shares_no_rank_with_a_trainer(run: RunDirectory) -> None:
    config, placement = attached_config(run, ["allocation=hf:d2"])
    assert place_attached(config) == placement
    assert (placement.colocated, placement.trainer_ranks) == (False, ())
