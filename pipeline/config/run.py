"""The root of the configuration tree."""

from __future__ import annotations

from dataclasses import dataclass

from pekoe.pipeline.config.actor import ActorConfig
from pekoe.pipeline.config.cluster import ClusterConfig
from pekoe.pipeline.config.companions import CriticConfig, DpoConfig, RefConfig, RewardModelConfig, TeacherConfig
from pekoe.pipeline.config.dataset import DatasetConfig
from pekoe.pipeline.config.fields import setting
from pekoe.pipeline.config.generation import GenerationConfig
from pekoe.pipeline.config.rollout import RewardConfig, RolloutConfig, WorkflowConfig
from pekoe.pipeline.config.rollout_array import RolloutArrayConfig
from pekoe.pipeline.config.schedule import (
    EvaluatorConfig,
    RecoverConfig,
    SaverConfig,
    StatsLoggerConfig,
    WeightsConfig,
)
from pekoe.pipeline.config.vllm_section import VllmConfig


@dataclass
class RunConfig:
    """One run. Every key may be set in YAML or as key=value on the command line."""

    experiment_name: str = setting("experiment", "first part of the run directory")
    trial_name: str = setting("trial", "second part of the run directory")
    algorithm: str | None = setting(
        None,
        "preset in configs/algorithm: under the keys of the YAML that names it, over them when given as algorithm=NAME",
    )
    task: str = setting("rl", "kind of run", choices=("rl", "sft", "dpo", "rw", "distill"))
    seed: int = setting(1, "seed of the run: order of data, sampling, initialisation", minimum=0)
    allocation: str = setting("", "ranks of each role, e.g. hf:d1+fsdp:d1 (split) or hf:d2|fsdp:d2 (colocated)")
    tokenizer_path: str | None = setting(None, "tokenizer folder; null = actor.path")
    total_train_epochs: int = setting(1, "passes over train_dataset", minimum=1)
    total_train_steps: int | None = setting(None, "training steps; null = as the epochs give", minimum=1)
    cluster: ClusterConfig = setting(ClusterConfig, "where and on what the run lives")
    train_dataset: DatasetConfig = setting(DatasetConfig, "prompts to train on")
    valid_dataset: DatasetConfig | None = setting(None, "prompts to evaluate on")
    gconfig: GenerationConfig = setting(GenerationConfig, "sampling for training")
    eval_gconfig: GenerationConfig | None = setting(None, "sampling for evaluation; null = as gconfig")
    rollout: RolloutConfig = setting(RolloutConfig, "rollout side")
    vllm: VllmConfig = setting(VllmConfig, "the vLLM engine")
    rollout_array: RolloutArrayConfig = setting(RolloutArrayConfig, "worlds that attach to the run")
    workflow: WorkflowConfig = setting(WorkflowConfig, "what an episode does")
    reward: RewardConfig = setting(RewardConfig, "how completions are judged")
    actor: ActorConfig = setting(ActorConfig, "the trained model")
    critic: CriticConfig | None = setting(None, "value model; null = none")
    ref: RefConfig | None = setting(None, "reference policy; null = none")
    teacher: TeacherConfig | None = setting(None, "teacher of distillation; null = none")
    reward_model: RewardModelConfig | None = setting(None, "model that judges trajectories; null = none")
    dpo: DpoConfig = setting(DpoConfig, "preference loss of task dpo")
    weights: WeightsConfig = setting(WeightsConfig, "weight transfer")
    saver: SaverConfig = setting(SaverConfig, "Hugging Face exports")
    recover: RecoverConfig = setting(RecoverConfig, "checkpoints")
    evaluator: EvaluatorConfig = setting(EvaluatorConfig, "evaluation beside training")
    stats_logger: StatsLoggerConfig = setting(StatsLoggerConfig, "metrics and display")
