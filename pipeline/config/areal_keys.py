"""What becomes of each key of an AReaL configuration (RL runs): another key here, or no place and why.

A key that is not in the tables and that exists here under the same name is taken as it is. Names ending in `.*` stand
for whole sections. Facts from AReaL's `areal/api/cli_args.py` and the YAML files in its `examples/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gone:
    """A key with no place here."""

    reason: str
    neutral: tuple[Any, ...] = ()
    """Values with which nothing is lost."""


@dataclass(frozen=True)
class Moved:
    """A key that is another one here."""

    to: str
    values: tuple[tuple[Any, Any], ...] = ()
    """(theirs, ours) where a value has another name."""


_NAMES = Gone("the run's names and root are given once: experiment_name, trial_name, cluster.fileroot")
_SCHEDULING = Gone("the world is one MPI job: allocation and cluster.* say what it needs")
_HTTP = Gone("nothing travels by HTTP here")
_LORA = Gone("training of LoRA adapters is not in this version", (False, None, ""))
_FROM_GCONFIG = Gone("taken from gconfig here")
_GROUPS = Gone("groups are the samples of one prompt here; their size is gconfig.n_samples")
_EPOCHS = Gone("intervals are in training steps here: set the section's freq_steps", (None,))
_SECONDS = Gone("intervals are in training steps here: set the section's freq_steps", (None,))
_ASKED = Gone("a frozen model has path, dtype and offload_params; the rest is the actor's")
_LOADER = Gone("the cursor reads examples by index; there is no loader process")

_DTYPES = (("bf16", "bfloat16"), ("fp32", "float32"))

SECTIONS: dict[str, Gone] = {
    "ref.*": _ASKED,
    "teacher.*": _ASKED,
    "critic.mb_spec.*": Gone("micro-batches are cut by actor.mb_spec"),
    "critic.scheduling_spec.*": _SCHEDULING,
    "critic.scheduling_strategy.*": _SCHEDULING,
    "critic.megatron.*": Gone("the megatron engine is not in this version"),
    "critic.archon.*": Gone("AReaL's archon engine is `native` here, which is not in this version"),
    "critic.fsdp.wrap_policy.*": Gone("every transformer layer is wrapped"),
    "sglang.*": Gone("the sglang engine is not in this version; the model comes from actor.path or rollout.path"),
    "launcher.*": _SCHEDULING,
    "scheduler.*": _SCHEDULING,
    "perf_tracer.*": Gone("a tracer is not in this version"),
    "memory_profiler.*": Gone("a memory profiler is not in this version"),
    "cluster.name_resolve.*": Gone("ranks find each other by MPI: there is no name service"),
    "actor.scheduling_spec.*": _SCHEDULING,
    "actor.scheduling_strategy.*": _SCHEDULING,
    "rollout.scheduling_spec.*": _SCHEDULING,
    "rollout.scheduling_strategy.*": _SCHEDULING,
    "train_dataset.scheduling_spec.*": _LOADER,
    "valid_dataset.scheduling_spec.*": _LOADER,
    "rollout.agent.*": Gone("an agent is a workflow here: set workflow.name and workflow.args"),
    "rollout.openai.*": Gone("an OpenAI-compatible endpoint is not in this version"),
    "actor.megatron.*": Gone("the megatron engine is not in this version"),
    "actor.archon.*": Gone("AReaL's archon engine is `native` here, which is not in this version"),
    "actor.fsdp.wrap_policy.*": Gone("every transformer layer is wrapped"),
    "stats_logger.wandb.*": Gone("metrics go to TensorBoard and JSON lines in the run directory"),
    "stats_logger.swanlab.*": Gone("metrics go to TensorBoard and JSON lines in the run directory"),
    "stats_logger.trackio.*": Gone("metrics go to TensorBoard and JSON lines in the run directory"),
}

KEYS: dict[str, Gone | Moved] = {
    "allocation_mode": Moved("allocation"),
    "async_training": Gone("set rollout.max_head_offpolicyness: 0 for a synchronous run", (True,)),
    "enable_offload": Gone("set actor.fsdp.offload_params", (False,)),
    "total_train_n_seqs": Gone("set total_train_steps", (None,)),
    "processor_path": Gone("images are not in this version", (None, "")),
    "workflow_kwargs": Moved("workflow.args"),
    "cluster.cluster_name": Gone("nothing depends on the cluster's name"),
    # gconfig, eval_gconfig (the same keys)
    "gconfig.skip_special_tokens": Gone("trajectories hold tokens, not text"),
    "gconfig.lora_name": _LORA,
    "gconfig.use_beam_search": Gone("beam search does not sample from the policy", (False,)),
    "gconfig.top_k": Moved("gconfig.top_k", ((100000000, 0), (-1, 0))),
    "gconfig.stop": Moved("gconfig.stop", ((None, []),)),
    # rollout
    "rollout.queue_size": Gone("queues are bounded by admission", (None,)),
    "rollout.consumer_batch_size": Gone("is train_dataset.batch_size here"),
    "rollout.enable_rollout_tracing": Gone("a tracer is not in this version", (False,)),
    "rollout.check_trajectory_format": Gone("trajectories are always checked"),
    "rollout.tokenizer_path": Gone("is tokenizer_path here"),
    "rollout.dump_to_file": Gone("trajectories are always on disk; `pekoe shards show RUN` prints them"),
    "rollout.setup_timeout": Moved("cluster.setup_seconds"),
    "rollout.request_timeout": _HTTP,
    "rollout.request_retries": _HTTP,
    "rollout.pause_grace_period": Gone("engines stop at a token"),
    "rollout.schedule_policy": Gone("the head assigns groups to rollout ranks"),
    "rollout.use_lora": _LORA,
    "rollout.return_routed_experts": Gone("routing replay is not in this version", (False,)),
    "rollout.experiment_name": _NAMES,
    "rollout.trial_name": _NAMES,
    "rollout.fileroot": _NAMES,
    "rollout.max_concurrent_rollouts": Moved("rollout.max_concurrent_rollouts"),
    "rollout._version": _HTTP,
    "rollout.model": _HTTP,
    "rollout.routing_strategy": _HTTP,
    "rollout.poll_interval": _HTTP,
    "rollout.admin_api_key": _HTTP,
    "rollout.api_url": _HTTP,
    "rollout.provider_api_key": _HTTP,
    # vllm: what every engine has is in rollout and gconfig; keys that are nowhere here go into vllm.extra
    "vllm.model": Gone("the model comes from actor.path or rollout.path", ("",)),
    "vllm.seed": Gone("is seed here"),
    "vllm.dtype": Moved("rollout.dtype", (("auto", "bfloat16"), ("half", "float16"), ("float", "float32"))),
    "vllm.max_num_seqs": Moved("rollout.max_slots"),
    "vllm.no_enable_prefix_caching": Moved("vllm.enable_prefix_caching", ((True, False), (False, True))),
    "vllm.enable_lora": Gone("set vllm.max_loras", (False,)),
    "vllm.lora_modules": _LORA,
    "vllm.enable_sleep_mode": Gone("engines on the trainer's ranks sleep while it trains"),
    "vllm.swap_space": Gone("sequences that do not fit are computed again", (0, None)),
    "vllm.skip_tokenizer_init": Gone("the engine decides"),
    "vllm.distributed_executor_backend": Gone("allocation says which ranks make an engine"),
    "vllm.worker_extension_cls": Gone("weights reach the engine by actor.weight_update_mode"),
    "vllm.uvicorn_log_level": _HTTP,
    # actor
    "actor.experiment_name": _NAMES,
    "actor.trial_name": _NAMES,
    "actor.init_from_scratch": Gone("training starts from the model's weights", (False,)),
    "actor.is_critic": Gone("the critic section is the critic", (False,)),
    "actor.temperature": _FROM_GCONFIG,
    "actor.max_new_tokens": _FROM_GCONFIG,
    "actor.group_size": _GROUPS,
    "actor.reward_norm.group_size": _GROUPS,
    "actor.adv_norm.group_size": _GROUPS,
    "actor.group_adv_norm": Gone("set actor.adv_norm.mean_level and std_level: group", (False,)),
    "actor.group_reward_norm": Gone("set actor.reward_norm.mean_level and std_level: group", (False,)),
    "actor.attn_impl": Moved("actor.fsdp.attention", (("flash_attention_2", "auto"), ("eager", "sdpa"))),
    "actor.use_kernels": Gone("kernels are chosen by device", (False,)),
    "actor.pad_to_maximum": Gone("batches are packed, never padded", (False,)),
    "actor.grad_reduce_dtype": Gone("gradients are always reduced in float32", ("float32",)),
    "actor.optimizer_dtype": Gone("master weights and optimiser states are always float32", ("float32", "fp32")),
    "actor.offload": Moved("actor.fsdp.offload_params"),
    "actor.fsdp.memory_efficient_load": Gone("the engine decides how weights are loaded"),
    "actor.fsdp.per_layer_optim_step": Gone("set actor.fsdp.offload_params", (False,)),
    "actor.fsdp.optim_step_prefetch_layers": Gone("has no meaning without per_layer_optim_step"),
    "actor.fsdp.shard_vision_across_sp": Gone("images are not in this version", (False,)),
    "actor.mb_spec.n_mbs": Gone("max_tokens_per_mb alone decides the number of micro-batches", (None, 1)),
    "actor.mb_spec.n_mbs_divisor": Gone("max_tokens_per_mb alone decides the number of micro-batches", (None, 1)),
    "actor.mb_spec.packing_algorithm": Gone("sequences are always balanced over ranks and micro-batches"),
    "actor.dtype": Moved("actor.dtype", _DTYPES),
    "actor.optimizer.type": Moved("actor.optimizer.type", (("adam", "adamw"),)),
    "actor.optimizer.offload": Gone("set actor.fsdp.offload_params", (False,)),
    "actor.optimizer.initial_loss_scale": Gone("there is no float16 training, so no loss scale"),
    "actor.optimizer.min_loss_scale": Gone("there is no float16 training, so no loss scale"),
    "actor.optimizer.loss_scale_window": Gone("there is no float16 training, so no loss scale"),
    "actor.optimizer.hysteresis": Gone("there is no float16 training, so no loss scale"),
    "actor.weight_update_mode": Moved("actor.weight_update_mode", (("xccl", "collective"), ("nccl", "collective"))),
    "actor.use_lora": _LORA,
    "actor.lora_rank": _LORA,
    "actor.lora_alpha": _LORA,
    "actor.target_modules": _LORA,
    "actor.peft_type": _LORA,
    "actor.eps_clip": Moved("actor.eps_clip", ((0, None), (0.0, None))),
    "actor.mask_no_eos_with_zero": Moved("actor.mask_truncated"),
    "actor.prox_logp_method": Moved("actor.prox_logp_method", (("reuse_train_logp", "reuse"),)),
    "actor.gae_timestep_unit": Moved("actor.gae_unit"),
    "actor.gae_lambda_kwargs": Gone("set actor.gae_lambda_alpha or gae_lambda_q", (None, {})),
    "actor.min_usable_group_size": Gone("uneven groups are normal: any size is used", (None,)),
    "actor.token_rewards_as_adv": Gone("process rewards are rewards: they go through actor.advantage_estimator"),
    "actor.log_agent_stats": Gone("statistics of trajectories are always metrics"),
    "actor.log_agent_stats_keys": Gone("statistics of trajectories are always metrics"),
    "actor._version": _HTTP,
    "actor.admin_api_key": _HTTP,
    "actor.log_level": _HTTP,
    "actor.request_timeout": _HTTP,
    "actor.setup_timeout": Gone("set cluster.setup_seconds"),
    "actor.enable_mtp_training": Gone("multi-token prediction is not in this version", (False,)),
    "actor.mtp_num_layers": Gone("multi-token prediction is not in this version"),
    "actor.mtp_loss_scaling_factor": Gone("multi-token prediction is not in this version"),
    # models beside the actor; keys of the critic that are not here are as the actor's
    "critic.eps_clip": Moved("critic.eps_clip"),
    "critic.ppo_n_minibatches": Gone("minibatches are the actor's: actor.ppo_n_minibatches"),
    "critic.mask_no_eos_with_zero": Gone("actor.mask_truncated decides it for both", (False,)),
    "critic.enable_tree_training": Gone("actor.enable_tree_training decides it for both", (False,)),
    "critic.is_critic": Gone("the critic section is the critic", (True,)),
    "critic.backend": Gone("the critic lives on the trainer ranks", (None, "")),
    "critic.weight_update_mode": Gone("no engine needs the critic's weights"),
    **{
        f"{section}.{key}": Moved(f"{section}.{to}", _DTYPES if key == "dtype" else ())
        for section in ("ref", "teacher")
        for key, to in {"path": "path", "dtype": "dtype", "fsdp.offload_params": "offload_params"}.items()
    },
    "teacher.rl_loss_weight": Moved("teacher.rl_loss_weight"),
    "teacher.distill_loss_weight": Moved("teacher.distill_loss_weight"),
    # data sets (valid_dataset: the same keys)
    "train_dataset.pin_memory": _LOADER,
    "train_dataset.num_workers": _LOADER,
    "train_dataset.num_dataset_workers": _LOADER,
    "train_dataset.setup_timeout": _LOADER,
    "train_dataset.drop_last": Gone("no example is dropped: a batch goes on in the next epoch"),
    "train_dataset.dataset_kwargs": Moved("train_dataset.args"),
    # what happens at intervals
    "saver.mode": Gone("exports are written by the trainer ranks between steps"),
    "recover.mode": Gone("a run is resumed by `pekoe run --resume RUN`; recover.freq_steps makes checkpoints"),
    "recover.retries": Gone("continuing after a failure is not in this version"),
    "recover.no_save_optim": Gone("checkpoints are always complete", (False,)),
    "recover.no_load_optim": Gone("checkpoints are always complete", (False,)),
    "evaluator.eval_before_train": Moved("evaluator.at_start"),
    "stats_logger.tensorboard.path": Gone("metrics lie in the run directory", (None,)),
    **{
        f"{section}.{key}": reason
        for section in ("saver", "recover", "evaluator", "stats_logger")
        for key, reason in {
            "experiment_name": _NAMES,
            "trial_name": _NAMES,
            "fileroot": _NAMES,
            "freq_epochs": _EPOCHS,
            "freq_secs": _SECONDS,
        }.items()
    },
}

DEFAULTS: dict[str, Any] = {
    "gconfig.n_samples": 1,
    "gconfig.max_new_tokens": 16384,
    "actor.ppo_n_minibatches": 4,
    "actor.use_decoupled_loss": False,
    "actor.disable_dropout": False,
    "actor.reward_norm": None,
    "actor.optimizer.lr": 1e-3,
    "actor.optimizer.warmup_steps_proportion": 0.001,
    "train_dataset.batch_size": 1,
}
"""AReaL's defaults where ours differ: they are written out for keys that the file leaves out."""

SECTION_DEFAULTS: dict[str, dict[str, Any]] = {
    "actor.reward_norm": {"mean_level": "batch", "std_level": "batch"},
    "actor.adv_norm": {"mean_level": "batch", "std_level": "batch"},
    "valid_dataset": {"shuffle": False, "split": "test"},
    "critic": {"optimizer.lr": 1e-3, "optimizer.warmup_steps_proportion": 0.001, "disable_dropout": False},
    "teacher": {"rl_loss_weight": 1.0, "distill_loss_weight": 0.005},
}
"""The same, for sections that may be absent: only when the file has the section."""


def rule_of(name: str) -> Gone | Moved | None:
    """What the tables say of a dotted AReaL key; None when they say nothing."""
    for theirs, ours in (("eval_gconfig.", "gconfig."), ("valid_dataset.", "train_dataset.")):
        if name.startswith(theirs):
            return _for_twin(rule_of(ours + name[len(theirs) :]), ours, theirs)
    if name in KEYS:
        return KEYS[name]
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        section = SECTIONS.get(".".join(parts[:count]) + ".*")
        if section is not None:
            return section
    if name.startswith("critic."):
        return _for_twin(rule_of("actor." + name[len("critic.") :]), "actor.", "critic.")
    return None


def _for_twin(rule: Gone | Moved | None, ours: str, theirs: str) -> Gone | Moved | None:
    if isinstance(rule, Moved):
        return Moved(rule.to.replace(ours, theirs, 1), rule.values)
    return rule


def replacement(name: str) -> str:
    """What to say of an AReaL key that does not exist here; "" when it is none."""
    if name in ("actor.behav_imp_weight_cap", "actor.behave_imp_weight_cap", "actor.behave_imp_weight_mode"):
        return "AReaL's key is actor.rejection_sampling here (`pekoe config import FILE` converts a file)"
    if name == "actor.recompute_logprob":
        return "AReaL's key is actor.use_decoupled_loss here (`pekoe config import FILE` converts a file)"
    rule = rule_of(name)
    if rule is None and name.startswith("vllm."):
        return f"an argument of vLLM that is no key here is set as vllm.extra.{name.partition('.')[2]}"
    if isinstance(rule, Moved):
        return f"AReaL's key is {rule.to} here (`pekoe config import FILE` converts a file)"
    if isinstance(rule, Gone):
        return f"AReaL's key has no place here: {rule.reason}"
    return ""
