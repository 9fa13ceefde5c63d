"""AReaL's YAML: what is the same goes over, what moved is renamed, and every other key is named with a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from pekoe.launch.allocation import parse, place
from pekoe.pipeline.config.actor import NormConfig, RejectionConfig
from pekoe.pipeline.config.areal_import import import_areal
from pekoe.pipeline.config.areal_keys import DEFAULTS, KEYS, SECTION_DEFAULTS, Gone, Moved, rule_of
from pekoe.pipeline.config.companions import RefConfig
from pekoe.pipeline.config.load import from_yaml_text
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.schema import ConfigError, all_keys

CAP_ERA = """
experiment_name: math-small
trial_name: first
seed: 7
enable_offload: false
total_train_epochs: 3
tokenizer_path: ${actor.path}
async_training: true
allocation_mode: sglang:d4p1t1+d4p1t1
cluster:
  n_nodes: 2
  n_gpus_per_node: 4
  fileroot: /scratch/areal
  name_resolve: {type: nfs, nfs_record_root: /scratch/names}
scheduler: {type: null}
rollout:
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  max_concurrent_rollouts: 96
  queue_size: null
  consumer_batch_size: ${train_dataset.batch_size}
  max_head_offpolicyness: 3
  enable_rollout_tracing: true
  scheduling_spec: ${actor.scheduling_spec}
  fileroot: ${cluster.fileroot}
  tokenizer_path: ${tokenizer_path}
  dump_to_file: true
gconfig: {n_samples: 6, min_new_tokens: 0, max_new_tokens: 700, greedy: false, temperature: 0.9, top_k: 100000000}
actor:
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  path: org/some-model
  init_from_scratch: false
  disable_dropout: true
  gradient_checkpointing: true
  dtype: bfloat16
  mb_spec: {max_tokens_per_mb: 9000}
  optimizer:
    type: adam
    lr: 2.5e-6
    weight_decay: 0.02
    beta1: 0.9
    beta2: 0.99
    eps: 1e-8
    lr_scheduler_type: cosine
    gradient_clipping: 0.5
    warmup_steps_proportion: 0.01
  eps_clip: 0.3
  temperature: ${gconfig.temperature}
  reward_scaling: 5.0
  reward_bias: -0.5
  kl_ctl: 0.0
  ppo_n_minibatches: 2
  recompute_logprob: true
  use_decoupled_loss: true
  behav_imp_weight_cap: 4.0
  dynamic_sampling: false
  reward_norm: {mean_level: group, std_level: group, group_size: "${gconfig.n_samples}"}
  adv_norm: {mean_level: batch, std_level: batch}
  weight_update_mode: xccl
  max_new_tokens: ${gconfig.max_new_tokens}
  scheduling_spec:
    - {task_type: worker, port_count: 2, gpu: 1, cpu: 4, mem: 32, cmd: python3 -m server, env_vars: {}}
ref:
  path: ${actor.path}
  dtype: ${actor.dtype}
  optimizer: null
  mb_spec: {max_tokens_per_mb: 9000}
  scheduling_strategy: {type: colocation, target: actor}
sglang: {model_path: "${actor.path}", random_seed: "${seed}", max_running_requests: null, context_length: 32768}
vllm: {model: "${actor.path}", gpu_memory_utilization: 0.8}
train_dataset:
  batch_size: 32
  shuffle: true
  pin_memory: true
  num_workers: 4
  path: openai/gsm8k
  type: rl
  max_length: 900
valid_dataset: {batch_size: 32, pin_memory: true, num_workers: 4, path: openai/gsm8k, type: rl}
saver: {experiment_name: "${experiment_name}", trial_name: "${trial_name}", freq_epochs: 1, freq_steps: null}
recover: {mode: disabled, freq_epochs: 1, freq_steps: 20, freq_secs: 3600, retries: 0}
evaluator: {fileroot: "${cluster.fileroot}", freq_epochs: null, freq_steps: 5, freq_secs: null, eval_before_train: true}
stats_logger: {fileroot: "${cluster.fileroot}", wandb: {mode: disabled}}
perf_tracer: {enabled: false, session_tracer: {enabled: false}}
launcher: {inference_server_cpus_per_gpu: 4, trainer_mem_per_gpu: 32768}
"""

BACKEND_ERA = """
experiment_name: moe
trial_name: t
total_train_steps: 100
tokenizer_path: ${actor.path}
cluster: {n_nodes: 8, n_gpus_per_node: 8, fileroot: "${oc.env:SCRATCH}"}
rollout:
  backend: vllm:d4t8
  max_head_offpolicyness: 4
  setup_timeout: 900
  request_timeout: 3600
  request_retries: 3
  use_lora: false
  agent: {agent_cls_path: my.agent.Agent}
gconfig: {n_samples: 8, max_new_tokens: 8192, max_tokens: 12288, top_p: 1.0, stop: null, frequency_penalty: 0.0}
eval_gconfig: {n_samples: 1, temperature: 0.6, top_k: -1, ignore_eos: true}
actor:
  backend: megatron:(attn:d2p2t2c4|ffn:d2p2t2e4)
  path: /models/moe
  dtype: bf16
  attn_impl: flash_attention_2
  grad_reduce_dtype: float32
  optimizer_dtype: bfloat16
  pad_to_maximum: true
  mb_spec: {max_tokens_per_mb: 16384, n_mbs: 1, n_mbs_divisor: 4, packing_algorithm: kk, granularity: 1}
  optimizer: {type: muon, lr: 1e-6, muon_momentum: 0.95}
  megatron: {virtual_pipeline_parallel_size: 2, ddp: {bucket_size: null}}
  fsdp: {offload_params: true, memory_efficient_load: true}
  use_lora: false
  lora_rank: 32
  eps_clip: 0.2
  eps_clip_higher: 0.28
  c_clip: 3.0
  overlong_reward_penalty: true
  overlong_tokens: 512
  mask_no_eos_with_zero: true
  use_decoupled_loss: true
  prox_logp_method: loglinear
  importance_sampling_level: sequence
  rejection_sampling: {level: sequence, action: mask, metric: kl_k2, agg: mean, upper: 0.5}
  kl_ctl: 0.001
  kl_estimator: k3
  adv_norm: {mean_level: batch}
  m2_threshold: null
  use_sapo_loss: false
  weight_update_mode: disk
critic: {path: /models/critic, ppo_n_minibatches: 4}
dynamic_bs: true
my_own_flag: 3
train_dataset: {path: /data/prompts.jsonl, type: rl, batch_size: 128, drop_last: true, dataset_kwargs: {prompt_key: q}}
stats_logger: {wandb: {mode: online, project: p}, tensorboard: {path: null}}
"""


def imported(text: str, folder: Path) -> tuple[RunConfig, list[str], str]:
    file = folder / "areal.yaml"
    file.write_text(text)
    ours, notes = import_areal(file)
    return from_yaml_text(ours), notes, ours


def leaves(tree, prefix: str = "") -> list[str]:
    names = []
    for key, value in tree.items():
        nested = isinstance(value, dict) and value
        names += leaves(value, f"{prefix}{key}.") if nested else [f"{prefix}{key}"]
    return names


def noted(notes: list[str]) -> set[str]:
    return {name for note in notes for name in re.split(r", ", note.partition(": ")[0])}


@pytest.mark.parametrize("text", [CAP_ERA, BACKEND_ERA])
def test_every_key_goes_over_or_is_named_with_a_reason(text: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch")
    config, notes, ours = imported(text, tmp_path)
    theirs = OmegaConf.to_container(OmegaConf.create(text))
    written = set(leaves(OmegaConf.to_container(OmegaConf.create(ours))))
    named = noted(notes)
    for name in leaves(theirs):
        section_named = any(name.startswith(f"{key}.") for key in named)
        assert name in written or name in named or section_named, name
    assert isinstance(config, RunConfig)
    for note in notes:
        assert len(note.partition(": ")[2]) > 10, note


def test_the_cap_era_maps_as_meant(tmp_path: Path) -> None:
    config, notes, _ = imported(CAP_ERA, tmp_path)
    assert (config.experiment_name, config.trial_name, config.seed) == ("math-small", "first", 7)
    assert config.tokenizer_path == config.actor.path == "org/some-model"
    assert str(parse(config.allocation)) == "fsdp:d4+sglang:d4"
    assert (config.cluster.n_nodes, config.cluster.n_gpus_per_node) == (2, 4)
    assert (config.rollout.max_concurrent_rollouts, config.rollout.max_head_offpolicyness) == (96, 3)
    assert (config.gconfig.n_samples, config.gconfig.temperature, config.gconfig.top_k) == (6, 0.9, 0)
    assert config.actor.optimizer.type == "adamw"
    assert (config.actor.optimizer.lr, config.actor.optimizer.lr_scheduler_type) == (2.5e-6, "cosine")
    assert config.actor.rejection_sampling == RejectionConfig("token", "mask", "ratio", "mean", 4.0, None)
    assert config.actor.reward_norm == NormConfig("group", "group")
    assert config.actor.adv_norm == NormConfig("batch", "batch")
    assert config.actor.weight_update_mode == "collective"
    assert config.train_dataset.type == config.valid_dataset.type == "gsm8k"
    assert (config.valid_dataset.split, config.valid_dataset.shuffle) == ("test", False)
    assert config.reward.name == "gsm8k"
    assert (config.evaluator.freq_steps, config.evaluator.at_start, config.recover.freq_steps) == (5, True, 20)
    text = "\n".join(notes)
    assert "sglang: not in this version; available: fsdp, hf, vllm" in text
    assert "ref.path, ref.dtype: changes nothing here (no KL term uses it: actor.kl_ctl is 0)" in text
    assert config.ref is None
    assert "saver.freq_epochs: no place here: intervals are in training steps" in text
    assert "rollout.enable_rollout_tracing: no place here" in text


def test_the_backend_era_maps_as_meant(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    config, notes, ours = imported(BACKEND_ERA, tmp_path)
    placement = place(config)
    assert str(placement) == "megatron:(attn:d2t2p2c4|ffn:d2t2p2e4)+vllm:d4t8"
    assert config.cluster.fileroot == "/scratch/me"
    assert "${oc.env:SCRATCH}" in ours
    assert config.cluster.setup_seconds == 900
    assert config.actor.dtype == "bfloat16"
    assert (config.actor.eps_clip, config.actor.eps_clip_higher, config.actor.c_clip) == (0.2, 0.28, 3.0)
    assert config.actor.rejection_sampling == RejectionConfig("sequence", "mask", "kl_k2", "mean", 0.5, None)
    assert config.actor.prox_logp_method == "loglinear"
    assert (config.actor.overlong_reward_penalty, config.actor.overlong_tokens) == (True, 512)
    assert (config.actor.kl_ctl, config.actor.kl_estimator, config.ref) == (0.0, "k3", None)
    assert (config.critic.path, config.critic.eps_clip) == ("/models/critic", 0.5)
    assert (config.rollout.dynamic_sampling, config.rollout.dynamic_batch_size) == (True, True)
    assert config.actor.mask_truncated
    assert config.actor.reward_norm is None
    assert config.actor.adv_norm == NormConfig("batch", "batch")
    assert config.actor.ppo_n_minibatches == 4
    assert config.actor.fsdp.offload_params
    assert config.actor.fsdp.attention == "auto"
    assert (config.eval_gconfig.temperature, config.eval_gconfig.top_k, config.eval_gconfig.max_tokens) == (
        0.6,
        0,
        12288,
    )
    assert config.eval_gconfig.ignore_eos
    assert not config.gconfig.ignore_eos
    assert config.train_dataset.args == {"prompt_key": "q"}
    assert config.train_dataset.type == "jsonl"
    text = "\n".join(notes)
    for words in (
        "actor.optimizer.type: 'muon' is not possible here; allowed: adamw",
        "actor.optimizer_dtype: no place here: master weights",
        "actor.kl_ctl: no place here: has no effect without a ref section",
        "my_own_flag: no place here: is no key of AReaL's that is known here",
        "critic.ppo_n_minibatches: no place here: minibatches are the actor's",
        "critic.optimizer.lr: not in the file; AReaL's default 0.001 is written out",
        "dynamic_bs: true is rollout.dynamic_sampling and rollout.dynamic_batch_size: true here",
        "actor.reward_norm: not in the file; AReaL's default null is written out",
        "megatron: not in this version; available: fsdp, hf, vllm",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("sglang.d4p1t1+d4p1t1", "sglang:d4p1t1+fsdp:d4p1t1"),
        ("vllm:d2t2+d4", "vllm:d2t2+fsdp:d4"),
        ("sglang:d4+d2p2", "sglang:d4+megatron:d2p2"),
        ("sglang:d4+d10p1", "sglang:d4+fsdp:d10p1"),
        ("sglang:d4+d2p12", "sglang:d4+megatron:d2p12"),
        ("sglang[rollout]:d8|megatron[actor]:d8", "sglang[rollout]:d8|megatron[actor]:d8"),
        ("sglang:d4+megatron:(attn:d2p2|ffn:d1p2e2)", "sglang:d4+megatron:(attn:d2p2|ffn:d1p2e2)"),
        ("vllm:d2+(attn:d2p2|ffn:d1p2e2)", "vllm:d2+megatron:(attn:d2p2|ffn:d1p2e2)"),
        ("vllm:d4+archon:d4", "vllm:d4+native:d4"),
        ("sglang:d4+fsdp:d4+eval", "sglang:d4+fsdp:d4"),
    ],
)
def test_older_and_newer_allocations_become_ours(theirs: str, ours: str, tmp_path: Path) -> None:
    config, notes, _ = imported(f"allocation_mode: '{theirs}'", tmp_path)
    assert config.allocation == ours
    parse(ours)
    assert any(note.startswith("allocation_mode: ") for note in notes)


@pytest.mark.parametrize(
    ("actor", "bounds"),
    [
        ("behave_imp_weight_cap: 2.0", RejectionConfig(upper=2.0)),
        ("behav_imp_weight_cap: null", None),
        (
            "behave_imp_weight_cap: 3.0, behave_imp_weight_mode: sequence_truncate",
            RejectionConfig("sequence", "clamp", upper=3.0),
        ),
        ("behave_imp_weight_cap: 3.0, behave_imp_weight_mode: disabled", None),
        ("behave_imp_weight_mode: token_truncate", RejectionConfig("token", "clamp", upper=5.0)),
        ("use_decoupled_loss: true", None),
        ("rejection_sampling: null", None),
        ("rejection_sampling: {upper: 2}", RejectionConfig(upper=2.0)),
    ],
)
def test_weight_caps_become_rejection(actor: str, bounds: RejectionConfig | None, tmp_path: Path) -> None:
    assert imported(f"actor: {{{actor}}}", tmp_path)[0].actor.rejection_sampling == bounds


def test_values_that_cannot_be_are_noted_and_left_out(tmp_path: Path) -> None:
    config, notes, _ = imported(
        "actor: {eps_clip: 0.0, dtype: float16, path: [1]}\nseed: many\nrollout: null", tmp_path
    )
    assert config.actor.eps_clip is None
    assert config.actor.dtype == "bfloat16"
    text = "\n".join(notes)
    assert "actor.dtype: 'float16' is not possible here; allowed: float32" in text
    assert "seed: 'many' is not a whole number here" in text
    assert "actor.path: [1] is not text here" in text
    assert "rollout: null" in text


def test_defaults_that_differ_are_written_out_and_truly_differ(tmp_path: Path) -> None:
    config, notes, _ = imported("experiment_name: e", tmp_path)
    ours = {key.name: key.default for key in all_keys()}
    for name, value in DEFAULTS.items():
        section: object = config
        for part in name.split("."):
            section = getattr(section, part)
        assert section == value, name
        assert ours[name] != value, name
        assert any(note.startswith(f"{name}: not in the file") for note in notes)
    for section_name, keys in SECTION_DEFAULTS.items():
        for key in keys:
            assert f"{section_name}.{key}" in ours


def test_the_tables_name_keys_that_exist() -> None:
    ours = {key.name for key in all_keys()}
    for name, rule in KEYS.items():
        if isinstance(rule, Moved):
            assert rule.to in ours, name
        else:
            assert name not in ours, f"{name} exists here: it needs no reason"


def test_keys_of_a_critic_are_the_actors_where_both_have_them() -> None:
    ours = {key.name for key in all_keys()}
    theirs = ["dtype", "attn_impl", "pad_to_maximum", "optimizer.type", "optimizer.hysteresis", "offload", "use_lora"]
    for name in theirs:
        rule = rule_of(f"critic.{name}")
        assert rule is not None, name
        assert isinstance(rule, Gone) or rule.to in ours, name
    assert rule_of("critic.attn_impl") == Moved("critic.fsdp.attention", KEYS["actor.attn_impl"].values)
    assert isinstance(rule_of("critic.mb_spec.max_tokens_per_mb"), Gone)


ALGORITHMS = """
actor:
  path: /models/small
  eps_clip: 1.0
  eps_clip_higher: 4.0
  use_cispo_loss: true
  use_sapo_loss: false
  kl_ctl: 0.02
  kl_estimator: k2
  m2_threshold: 0.04
  overlong_reward_penalty: true
  overlong_tokens: null
  overlong_penalty_factor: null
  discount: 0.9
  gae_lambda: areal.lambdas.vapo
  gae_timestep_unit: turn
  dynamic_sampling: true
  prox_logp_method: reuse_train_logp
ref: {path: /models/ref, dtype: bf16, fsdp: {offload_params: true}, optimizer: null, mb_spec: {n_mbs: 1}}
critic:
  path: /models/critic
  is_critic: true
  attn_impl: flash_attention_2
  eps_clip: 0.2
  optimizer: {type: adam, lr: 2e-6, hysteresis: 2}
  mb_spec: {max_tokens_per_mb: 4096}
teacher: {path: /models/teacher, rl_loss_weight: 0.5}
"""


def test_the_keys_of_algorithms_go_over(tmp_path: Path) -> None:
    config, notes, _ = imported(ALGORITHMS, tmp_path)
    actor = config.actor
    assert (actor.objective, actor.eps_clip, actor.eps_clip_higher) == ("cispo", 1.0, 4.0)
    assert (actor.kl_ctl, actor.kl_estimator, actor.m2_threshold) == (0.02, "k2", 0.04)
    assert (actor.gae_unit, actor.discount, actor.gae_lambda) == ("turn", 0.9, 1.0)
    assert actor.prox_logp_method == "reuse"
    assert actor.overlong_reward_penalty
    assert (config.rollout.dynamic_sampling, config.rollout.dynamic_batch_size) == (True, True)
    assert config.ref == RefConfig("/models/ref", "bfloat16", True)
    assert (config.critic.path, config.critic.eps_clip, config.critic.optimizer.lr) == ("/models/critic", 0.2, 2e-6)
    assert (config.critic.optimizer.warmup_steps_proportion, config.critic.disable_dropout) == (0.001, False)
    assert (config.teacher.path, config.teacher.rl_loss_weight) == ("/models/teacher", 0.5)
    assert (config.teacher.distill_loss_weight, config.task) == (0.005, "distill")
    text = "\n".join(notes)
    for words in (
        "actor.use_cispo_loss: true is actor.objective: cispo here",
        "actor.use_sapo_loss: changes nothing here",
        "actor.gae_lambda: no place here: a function of length is actor.gae_lambda_by_length here",
        "actor.gae_timestep_unit: 'turn' is actor.gae_unit: 'turn' here",
        "critic.mb_spec.max_tokens_per_mb: no place here: micro-batches are cut by actor.mb_spec",
        "ref.fsdp.offload_params: true is ref.offload_params: true here",
        "task: not a key of AReaL's; distill is written",
    ):
        assert words in text, words


def test_a_reference_model_has_areals_weight_where_the_file_names_none(tmp_path: Path) -> None:
    config, notes, _ = imported("ref: {path: /models/ref}", tmp_path)
    assert (config.actor.kl_ctl, config.ref.path) == (0.1, "/models/ref")
    assert any(note.startswith("actor.kl_ctl: not in the file; AReaL's default 0.1") for note in notes)
    sapo = imported("actor: {use_sapo_loss: true, sapo_tau_neg: 1.2}", tmp_path)[0].actor
    assert (sapo.objective, sapo.sapo_tau_pos, sapo.sapo_tau_neg) == ("sapo", 1.0, 1.2)


def test_loading_an_areal_file_names_the_replacement() -> None:
    with pytest.raises(ConfigError) as caught:
        from_yaml_text(CAP_ERA)
    text = str(caught.value)
    assert "allocation_mode: unknown key in configuration; AReaL's key is allocation here" in text
    assert (
        "actor.behav_imp_weight_cap: unknown key in configuration; AReaL's key is actor.rejection_sampling here" in text
    )
    assert "ref.optimizer: unknown key in configuration; AReaL's key has no place here: a frozen model has path" in text
    assert "rollout.queue_size: unknown key in configuration; AReaL's key has no place here: queues are bounded" in text


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the file"):
        import_areal(tmp_path / "absent.yaml")
    file = tmp_path / "list.yaml"
    file.write_text("- 1")
    with pytest.raises(ConfigError, match="is not a mapping"):
        import_areal(file)


def test_the_engine_keys_of_vllm_go_to_every_engine_or_to_ours(tmp_path: Path) -> None:
    text = """
vllm:
  model: /models/m
  seed: 1
  dtype: half
  max_num_seqs: 48
  max_model_len: 2048
  gpu_memory_utilization: 0.7
  enforce_eager: true
  no_enable_prefix_caching: true
  swap_space: 4
  enable_sleep_mode: true
  block_size: 32
  kv_cache_dtype: auto
  max_lora_rank: 16
  disable_sliding_window: null
gconfig: {frequency_penalty: 0.3, ignore_eos: true, lora_name: ""}
"""
    config, notes, _ = imported(text, tmp_path)
    assert (config.rollout.dtype, config.rollout.max_slots, config.gconfig.max_tokens) == ("float16", 48, 2048)
    assert (config.vllm.gpu_memory_utilization, config.vllm.enforce_eager) == (0.7, True)
    assert (config.vllm.enable_prefix_caching, config.vllm.max_lora_rank) == (False, 16)
    assert config.vllm.extra == {"block_size": 32, "kv_cache_dtype": "auto"}
    assert (config.gconfig.frequency_penalty, config.gconfig.ignore_eos) == (0.3, True)
    said = "\n".join(notes)
    assert "vllm.swap_space: no place here: sequences that do not fit are computed again" in said
    assert "gconfig.lora_name: changes nothing here" in said
    assert "vllm.disable_sliding_window: changes nothing here" in said
    both, notes, _ = imported("vllm: {max_model_len: 900}\ngconfig: {max_tokens: 700}", tmp_path)
    assert both.gconfig.max_tokens == 700
    assert any(note.startswith("vllm.max_model_len: changes nothing here") for note in notes)
