"""What an inference engine can do of what is asked: sampling, the keys of one engine, processes, weight updates."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from pekoe.pipeline.config.findings import Findings, PlacementFacts, RolloutFacts
from pekoe.pipeline.config.generation import GenerationConfig
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.schema import keys_of

GET_VLLM = (
    "pip install 'pekoe[vllm]' (NVIDIA), vllm-ascend (NPU) or scripts/setup_venv.sh vllm (CPU), or take "
    "rollout.backend: hf:…"
)
OWN_VLLM_ARGUMENTS = {
    "model": "rollout.path", "tokenizer": "tokenizer_path", "dtype": "rollout.dtype",
    "max_model_len": "gconfig.max_tokens", "max_num_seqs": "rollout.max_slots",
    "tensor_parallel_size": "allocation, e.g. vllm:d2t2", "pipeline_parallel_size": "nothing",
    "data_parallel_size": "allocation, e.g. vllm:d4", "distributed_executor_backend": "rollout.engine_process",
    "gpu_memory_utilization": "vllm.gpu_memory_utilization", "enforce_eager": "vllm.enforce_eager",
    "enable_prefix_caching": "vllm.enable_prefix_caching", "max_num_batched_tokens": "vllm.max_num_batched_tokens",
    "enable_lora": "vllm.max_loras", "max_loras": "vllm.max_loras", "max_lora_rank": "vllm.max_lora_rank",
    "enable_sleep_mode": "allocation, e.g. vllm:d2|fsdp:d2", "seed": "seed",
    "logprobs_mode": "nothing: log-probs have one meaning", "worker_extension_cls": "nothing",
    "weight_transfer_config": "actor.weight_update_mode",
}  # fmt: skip
"""Engine arguments that are set already, and the key that sets each."""
ACCELERATORS = ("cuda", "npu")
"""Devices of which that is known before a rank has looked (`auto` may be the cpu)."""
LARGE_SHARE = 0.7


def check_tokens(config: RunConfig, findings: Findings) -> None:
    """Token ids and their bias; `check_vocabulary` holds them against the vocabulary."""
    for name in ("gconfig", "eval_gconfig"):
        sampling: GenerationConfig | None = getattr(config, name)
        for token, bias in sampling.logit_bias.items() if sampling is not None else ():
            if token < 0 or not abs(bias) <= 100:
                allowed = "allowed: token ids >= 0 with numbers from -100 (forbidden) to 100"
                findings.wrong(f"{name}.logit_bias", {token: bias}, f"is not allowed; {allowed}")
        for token in sampling.stop_token_ids if sampling is not None else ():
            if token < 0:
                findings.wrong(f"{name}.stop_token_ids", token, "is not allowed; allowed: token ids >= 0")


def check_cut(config: RunConfig, findings: Findings) -> None:
    """What is drawn from is not what the log-probs are of: ratios stay those of the full distributions."""
    sampling, full = config.gconfig, GenerationConfig()
    for name in ("top_p", "top_k", "frequency_penalty", "logit_bias"):
        value = getattr(sampling, name)
        if value != getattr(full, name):
            findings.warn(
                f"gconfig.{name}", value, "samples from a changed distribution, but log-probs are those of the model's "
                "own one, on both sides: ratios are exact, the estimate is biased towards what is sampled",
            )  # fmt: skip
            return


def check_vocabulary(config: RunConfig, vocabulary: int | None, findings: Findings) -> None:
    """Token ids in the configuration are tokens of the model."""
    if vocabulary is None:
        return
    for name in ("gconfig", "eval_gconfig"):
        sampling: GenerationConfig | None = getattr(config, name)
        if sampling is None:
            continue
        for key, ids in (("logit_bias", list(sampling.logit_bias)), ("stop_token_ids", sampling.stop_token_ids)):
            outside = [token for token in ids if token >= vocabulary]
            if outside:
                allowed = f"allowed: 0 to {vocabulary - 1} (the model's vocabulary)"
                findings.wrong(f"{name}.{key}", outside[0], f"is no token of the model; {allowed}")


def check_heads(placement: PlacementFacts, heads: tuple[int, int] | None, findings: Findings) -> None:
    """The model can be cut into as many parts as an inference engine has ranks: each gets whole heads, and heads of
    keys and values that are fewer than ranks are on several."""
    if placement.rollout is None or heads is None:
        return
    size = max(len(ranks) for ranks in placement.rollout.instances)
    queries, keys = heads
    allowed = [n for n in range(1, queries + 1) if queries % n == 0 and (keys % n == 0 or n % keys == 0)]
    if size not in allowed:
        findings.wrong(
            "allocation", str(placement), f"has inference engines of {size} ranks for a model of {queries} attention "
            f"heads ({keys} of keys and values); allowed: t of {', '.join(map(str, allowed))}",
        )  # fmt: skip


def check_engine(config: RunConfig, placement: PlacementFacts, findings: Findings) -> None:
    """What the placement's inference engine makes of the keys that are meant for it."""
    rollout = placement.rollout
    if rollout is None:
        return
    if rollout.engine != "vllm":
        _check_unused(config, rollout.engine, findings)
    else:
        for look in (_check_installed, _check_vllm_numbers, _check_vllm_extra, _check_vllm_dtype):
            look(config, findings)
        if placement.colocated:
            _check_shared_device(config, findings)
    _check_process(config, placement, rollout, findings)
    _check_update_mode(config, placement, findings)


def _check_unused(config: RunConfig, engine: str, findings: Findings) -> None:
    for key in keys_of(type(config.vllm), "vllm."):
        value = getattr(config.vllm, key.name.partition(".")[2])
        if value != key.default:
            findings.warn(key.name, value, f"has no effect: the inference engine is {engine}, not vllm")


def _check_installed(config: RunConfig, findings: Findings) -> None:
    """The ranks run this interpreter unless a container, an archive or the user's own launcher brings another."""
    if importlib.util.find_spec("vllm") is not None:
        return
    slurm = config.cluster.slurm
    elsewhere = slurm.container.kind != "none" or slurm.packed_environment is not None
    key, value = "allocation", config.allocation or config.rollout.backend
    if elsewhere or config.cluster.launcher == "none":
        findings.warn(
            key, value, f"needs vLLM, which is not installed here; the ranks' environment must have it: {GET_VLLM}"
        )
    else:
        findings.wrong(key, value, f"needs vLLM, which is not installed here: {GET_VLLM}")


def _check_vllm_numbers(config: RunConfig, findings: Findings) -> None:
    most, slots = config.vllm.max_num_batched_tokens, config.rollout.max_slots
    if most is not None and most < slots:
        findings.wrong(
            "vllm.max_num_batched_tokens", most, "is not allowed; allowed: >= rollout.max_slots "
            f"({slots}: each running sequence takes a token of a pass), or null",
        )  # fmt: skip


def _check_vllm_extra(config: RunConfig, findings: Findings) -> None:
    for name in config.vllm.extra:
        if name in OWN_VLLM_ARGUMENTS:
            findings.wrong("vllm.extra", name, f"is set already; allowed instead: {OWN_VLLM_ARGUMENTS[name]}")
        elif name in ("quantization", "kv_cache_dtype", "speculative_config"):
            findings.warn(
                "vllm.extra", name, "makes the engine compute otherwise than the trainer does: look at the gap "
                "(rollout.logprob_gap_limit)",
            )  # fmt: skip


def _check_vllm_dtype(config: RunConfig, findings: Findings) -> None:
    device, dtype = config.cluster.device, config.rollout.dtype
    if device == "npu" and dtype == "float32":
        findings.wrong("rollout.dtype", dtype, "has no attention in vllm on npu; allowed: bfloat16, float16")
    elif device in ACCELERATORS and dtype == "float32" and config.actor.dtype != "float32":
        findings.warn(
            "rollout.dtype", dtype, f"is slow in vllm on an accelerator, and no closer to a trainer in "
            f"{config.actor.dtype}: set rollout.dtype={config.actor.dtype}",
        )  # fmt: skip


def _check_shared_device(config: RunConfig, findings: Findings) -> None:
    share = config.vllm.gpu_memory_utilization
    if config.cluster.device in ACCELERATORS and config.vllm.kv_cache_gib is None and share > LARGE_SHARE:
        findings.warn(
            "vllm.gpu_memory_utilization", share, "leaves little of the device for the trainer on the same ranks while "
            "engines are awake; e.g. 0.5, or set vllm.kv_cache_gib",
        )  # fmt: skip


def _check_process(config: RunConfig, placement: PlacementFacts, rollout: RolloutFacts, findings: Findings) -> None:
    """A child has one device. On the trainer's ranks torch's default group is the trainer's, and vLLM wants its own."""
    where, colocated = config.rollout.engine_process, placement.colocated
    is_vllm = rollout.engine == "vllm"
    if is_vllm and colocated and where == "own":
        findings.wrong(
            "rollout.engine_process", where, "is not possible for a vllm engine on the trainer's ranks; allowed: auto, "
            "child, or ranks of its own (e.g. vllm:d1+fsdp:d1)",
        )  # fmt: skip
        return
    size = max(len(ranks) for ranks in rollout.instances)
    if size > 1 and (where == "child" or (is_vllm and colocated)):
        findings.wrong(
            "allocation", str(placement), f"has inference engines of {size} ranks in child processes, which have one "
            "device each; allowed: dimension d alone, or rollout.engine_process: auto with ranks of their own "
            "(e.g. vllm:d1t2+fsdp:d2)",
        )  # fmt: skip


def _check_update_mode(config: RunConfig, placement: PlacementFacts, findings: Findings) -> None:
    mode = config.weights.update_mode
    if mode == "interrupt":
        return
    nothing_runs = placement.colocated or config.rollout.max_head_offpolicyness == 0
    if mode == "overlap" and placement.colocated:
        findings.warn("weights.update_mode", mode, "has no effect on the trainer's ranks: engines sleep")
    elif nothing_runs and not placement.colocated:
        findings.warn(
            "weights.update_mode", mode, "has no effect with rollout.max_head_offpolicyness 0: no sequence is under "
            "way when weights come",
        )  # fmt: skip
    elif mode == "overlap":
        findings.warn(
            "weights.update_mode", mode, "keeps a second copy of the weights on every rollout rank, where they arrive: "
            "on the device (from disk: in host memory)",
        )  # fmt: skip
    if mode == "drain" and config.weights.drain_seconds >= config.cluster.progress_seconds:
        findings.wrong(
            "weights.drain_seconds", config.weights.drain_seconds, "is longer than a run may stand still; allowed: "
            f"< cluster.progress_seconds ({config.cluster.progress_seconds:g})",
        )  # fmt: skip


SAMPLING_CHECKS: tuple[Callable[[RunConfig, Findings], Any], ...] = (check_tokens, check_cut)
