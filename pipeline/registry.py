"""Every pluggable name, one line each: "name": "module:Class". Nothing is imported until it is chosen."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

DATASETS = {
    "demonstrations": "pekoe.pipeline.data.demonstration_dataset:DemonstrationDataset",
    "gsm8k": "pekoe.pipeline.data.gsm8k_dataset:Gsm8kDataset",
    "jsonl": "pekoe.pipeline.data.jsonl_dataset:JsonlDataset",
    "preferences": "pekoe.pipeline.data.preference_dataset:PreferenceDataset",
    "reasoning_gym": "pekoe.pipeline.data.reasoning_gym_dataset:ReasoningGymDataset",
}
TASKS = {
    "rl": "pekoe.pipeline.runs.rl:run",
    "distill": "pekoe.pipeline.runs.rl:run",
    "sft": "pekoe.pipeline.runs.supervised:run",
    "dpo": "pekoe.pipeline.runs.supervised:run",
    "rw": "pekoe.pipeline.runs.supervised:run",
}
"""What a rank of a run's own world does; `prepare` stands beside `run`."""
WORKFLOWS = {
    "multi_turn": "pekoe.pipeline.rollout.workflows.multi_turn_workflow:MultiTurnWorkflow",
    "rlvr": "pekoe.pipeline.rollout.workflows.rlvr_workflow:RlvrWorkflow",
}
REWARDS = {
    "gsm8k": "pekoe.pipeline.reward.gsm8k_reward:gsm8k_reward",
    "math": "pekoe.pipeline.reward.math_reward:math_reward",
    "reasoning_gym": "pekoe.pipeline.reward.reasoning_gym_reward:reasoning_gym_reward",
    "zero": "pekoe.pipeline.reward.zero_reward:zero_reward",
}
INFERENCE_ENGINES = {
    "hf": "pekoe.pipeline.rollout.engines.hf_engine:HfEngine",
    "vllm": "pekoe.pipeline.rollout.engines.vllm.vllm_engine:VllmEngine",
}
TRAIN_ENGINES = {
    "fsdp": "pekoe.pipeline.train.engines.fsdp_engine:FsdpEngine",
}
OBJECTIVES = {
    "ppo": "pekoe.pipeline.algorithm.objectives.ppo:ppo",
    "sapo": "pekoe.pipeline.algorithm.objectives.sapo:sapo",
    "cispo": "pekoe.pipeline.algorithm.objectives.cispo:cispo",
}
ADVANTAGE_ESTIMATORS = {
    "gae": "pekoe.pipeline.algorithm.gae:gae",
}
DEVICES = {
    "cpu": "pekoe.pipeline.devices.cpu_device:CpuDevice",
    "cuda": "pekoe.pipeline.devices.cuda_device:CudaDevice",
    "npu": "pekoe.pipeline.devices.npu_device:NpuDevice",
}
WEIGHT_TRANSPORTS = {
    "collective": "pekoe.pipeline.weights.collective:CollectiveTransport",
    "disk": "pekoe.pipeline.weights.disk:DiskTransport",
    "local": "pekoe.pipeline.weights.local:LocalTransport",
}


def resolve(table: dict[str, str], name: str, key: str) -> Any:
    """The object behind a registered name or a user's `module:attribute`; `key` names the configuration key."""
    target = table.get(name, name)
    if ":" not in target:
        near = difflib.get_close_matches(name, table, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"{key}: {name!r} is not known{hint}; allowed: {', '.join(sorted(table))}, or module:attribute"
        )
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{key}: cannot load {target!r}: {error}") from error
