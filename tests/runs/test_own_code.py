"""A user's own objective, estimator and workflow: what is wrong with them is said before anything is sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoTokenizer

from pekoe.pipeline.config.rollout import WorkflowConfig
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.rollout.engine import SamplingParameters
from pekoe.pipeline.rollout.workflow import WorkflowContext
from pekoe.pipeline.runs.rl_rollout import build_workflow
from pekoe.pipeline.runs.step_setup import build_step
from pekoe.pipeline.train.companions import Companions


@pytest.mark.parametrize("key", ["objective", "advantage_estimator"])
@pytest.mark.parametrize("name", ["no_such_module:loss", "math:no_such_function"])
def test_a_step_is_not_built_of_what_cannot_be_imported(key: str, name: str) -> None:
    config = RunConfig()
    setattr(config.actor, key, name)
    with pytest.raises(ValueError, match=f"^actor.{key}: cannot load '{name}'"):
        build_step(config, cast("Any", None), Companions(), 1, torch.device("cpu"))


def test_a_workflow_says_which_arguments_it_has(tiny_model: Path) -> None:
    async def judge(*_: Any) -> float:
        return 0.0

    about = WorkflowContext(AutoTokenizer.from_pretrained(tiny_model), SamplingParameters(4), cast("Any", judge), 64)
    with pytest.raises(ValueError, match=r"^workflow.args: \{'max_turn': 3\} .* multi_turn: .*allowed: max_turns, .*"):
        build_workflow(WorkflowConfig(name="multi_turn", args={"max_turn": 3}), about)
    with pytest.raises(ValueError, match=r"^workflow.args.max_turns: 0 is not allowed; allowed: >= 1"):
        build_workflow(WorkflowConfig(name="multi_turn", args={"max_turns": 0}), about)
    build_workflow(WorkflowConfig(name="multi_turn", args={"max_turns": 3}), about)
