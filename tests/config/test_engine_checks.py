"""What is asked of an inference engine, checked before anything starts: sampling, keys of vLLM, processes, updates."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from pekoe.launch.allocation import parse
from pekoe.pipeline.config import engine_checks
from pekoe.pipeline.config.check import check
from pekoe.pipeline.config.load import from_yaml_text, to_yaml
from pekoe.pipeline.config.schema import ConfigError
from pekoe.pipeline.config.show import show

BASE = ["actor.path=model", "train_dataset.path=train.jsonl", "gconfig.max_tokens=1024", "rollout.dtype=bfloat16"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 1024, "vocab_size": 500}))
    (model / "model.safetensors").write_bytes(b"")
    (model / "tokenizer.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM were installed; it is only looked for, never imported."""
    set_installed(monkeypatch, True)


def set_installed(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    real = importlib.util.find_spec
    found = real("json") if is_there else None
    monkeypatch.setattr(
        engine_checks.importlib.util, "find_spec", lambda name, *rest: found if name == "vllm" else real(name, *rest)
    )


def checked(allocation: str, *overrides: str) -> list[str]:
    config = from_yaml_text("", [*BASE, f"allocation={allocation}", *overrides])
    return check(config, parse(allocation))


def problems(allocation: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        checked(allocation, *overrides)
    return list(caught.value.problems)


def test_biases_are_typed_and_load_again() -> None:
    for override in ("gconfig.logit_bias={5: -100, 7: 2}", "gconfig.logit_bias={'5': -100, 7: '2'}"):
        config = from_yaml_text("", [override])
        assert config.gconfig.logit_bias == {5: -100.0, 7: 2.0}
        assert all(type(token) is int and type(bias) is float for token, bias in config.gconfig.logit_bias.items())
        assert from_yaml_text(to_yaml(config)) == from_yaml_text(show(config)) == config
    both = from_yaml_text("gconfig: {logit_bias: {5: 1, 6: 3}}", ["gconfig.logit_bias.5=-2"])
    assert both.gconfig.logit_bias == {5: -2.0, 6: 3.0}
    own = from_yaml_text("gconfig: {logit_bias: {5: 1}}\neval_gconfig: {logit_bias: {}}")
    assert own.eval_gconfig.logit_bias == {}
    for wrong, words in (
        ("{a: 1}", "is not a whole number"),
        ("{5: much}", "is not a number"),
        ("[5]", "is not a mapping"),
        ("null", "is not a value"),
    ):
        with pytest.raises(ConfigError, match=f"{words}; allowed: a mapping of whole numbers to numbers"):
            from_yaml_text("", [f"gconfig.logit_bias={wrong}"])


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("gconfig.logit_bias={-1: 2}", "gconfig.logit_bias: {-1: 2.0} is not allowed; allowed: token ids >= 0"),
        ("gconfig.logit_bias={1: 101}", "gconfig.logit_bias: {1: 101.0} is not allowed"),
        ("gconfig.logit_bias={1: .nan}", "gconfig.logit_bias: {1: nan} is not allowed"),
        ("gconfig.logit_bias={500: 1}", "gconfig.logit_bias: 500 is no token of the model; allowed: 0 to 499"),
        ("gconfig.stop_token_ids=[3,501]", "gconfig.stop_token_ids: 501 is no token of the model"),
        ("gconfig.stop_token_ids=[-3]", "gconfig.stop_token_ids: -3 is not allowed; allowed: token ids >= 0"),
        ("eval_gconfig.stop_token_ids=[501]", "eval_gconfig.stop_token_ids: 501 is no token of the model"),
        ("gconfig.frequency_penalty=2.1", "gconfig.frequency_penalty: 2.1 is not allowed; allowed: a number >= -2 and"),
    ],
)
def test_sampling_that_no_engine_can_do_is_refused(folder: Path, override: str, line: str) -> None:
    (found,) = problems("hf:d1+fsdp:d1", override)
    assert found.startswith(line)


def test_keys_of_vllm_have_no_effect_on_another_engine(folder: Path) -> None:
    assert checked("hf:d1+fsdp:d1") == []
    first, second = checked("hf:d1+fsdp:d1", "vllm.enforce_eager=true", "vllm.extra={block_size: 16}")
    assert first == "vllm.enforce_eager: true has no effect: the inference engine is hf, not vllm"
    assert second.startswith("vllm.extra: {'block_size': 16} has no effect")


def test_vllm_must_be_installed_where_the_ranks_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_installed(monkeypatch, False)
    (line,) = problems("vllm:d1+fsdp:d1")
    assert line.startswith(
        "allocation: 'vllm:d1+fsdp:d1' needs vLLM, which is not installed here: pip install 'pekoe[vllm]'"
    )
    elsewhere = ["cluster.launcher=none"]
    (warning,) = checked("vllm:d1+fsdp:d1", *elsewhere)
    assert "the ranks' environment must have it" in warning
    assert checked("hf:d1+fsdp:d1") == []
    set_installed(monkeypatch, True)
    assert checked("vllm:d1+fsdp:d1") == checked("vllm:d2t2+fsdp:d1") == []


@pytest.mark.parametrize(
    ("allocation", "overrides", "line"),
    [
        ("vllm:d1+fsdp:d1", ["vllm.max_num_batched_tokens=63"], "vllm.max_num_batched_tokens: 63 is not allowed"),
        ("vllm:d1+fsdp:d1", ["vllm.extra={max_num_seqs: 8}"], "vllm.extra: 'max_num_seqs' is set already"),
        ("vllm:d1+fsdp:d1", ["vllm.extra={logprobs_mode: raw_logits}"], "vllm.extra: 'logprobs_mode' is set already"),
        (
            "vllm:d1+fsdp:d1",
            ["cluster.device=npu", "rollout.dtype=float32"],
            "rollout.dtype: 'float32' has no attention",
        ),
        (
            "vllm:d1|fsdp:d1",
            ["rollout.engine_process=own", "cluster.device=cpu"],
            "rollout.engine_process: 'own' is not",
        ),
        (
            "vllm:d1t2+fsdp:d1",
            ["rollout.engine_process=child"],
            "allocation: 'fsdp:d1+vllm:d1t2' has inference engines",
        ),
        ("vllm:d1t2|fsdp:d2", ["cluster.device=cpu"], "allocation: 'fsdp:d2|vllm:d1t2' has inference engines"),
        (
            "hf:d1+fsdp:d1",
            ["weights.update_mode=drain", "weights.drain_seconds=1800", "rollout.max_head_offpolicyness=1"],
            "weights.drain_seconds: 1800.0 is longer than a run may stand still",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused(
    folder: Path, with_vllm: None, allocation: str, overrides: list[str], line: str
) -> None:
    (found,) = problems(allocation, *overrides)
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("allocation", "overrides", "line"),
    [
        (
            "vllm:d1+fsdp:d1",
            ["cluster.device=cuda", "rollout.dtype=float32"],
            "rollout.dtype: 'float32' is slow in vllm on an accelerator",
        ),
        (
            "vllm:d1|fsdp:d1",
            ["cluster.device=cuda"],
            "vllm.gpu_memory_utilization: 0.9 leaves little of the device",
        ),
        ("vllm:d1+fsdp:d1", ["vllm.extra={quantization: fp8}"], "vllm.extra: 'quantization' makes the engine compute"),
        (
            "hf:d1+fsdp:d1",
            ["weights.update_mode=overlap"],
            "weights.update_mode: 'overlap' has no effect with rollout.max",
        ),
        (
            "hf:d1|fsdp:d1",
            ["weights.update_mode=overlap"],
            "weights.update_mode: 'overlap' has no effect on the trainer's",
        ),
        (
            "hf:d1+fsdp:d1",
            ["weights.update_mode=overlap", "rollout.max_head_offpolicyness=2"],
            "weights.update_mode: 'overlap' keeps a second copy",
        ),
        ("hf:d1+fsdp:d1", ["weights.update_mode=drain"], "weights.update_mode: 'drain' has no effect with rollout.max"),
    ],
)
def test_what_is_rarely_meant_of_an_engine_is_warned_about(
    folder: Path, with_vllm: None, allocation: str, overrides: list[str], line: str
) -> None:
    (found,) = checked(allocation, *overrides)
    assert found.startswith(line)


def test_an_engine_that_fits_is_let_through(folder: Path, with_vllm: None) -> None:
    assert checked("vllm:d1|fsdp:d1", "cluster.device=cpu") == []
    assert checked("vllm:d1|fsdp:d1", "cluster.device=auto") == []
    assert checked("vllm:d1|fsdp:d1", "cluster.device=cuda", "vllm.gpu_memory_utilization=0.5") == []
    assert checked("hf:d1|fsdp:d1", "rollout.engine_process=child") == []
    assert checked("vllm:d2t2+fsdp:d1", "rollout.engine_process=own") == []


@pytest.mark.parametrize(("heads", "keys", "fits"), [(4, 2, {1, 2, 4}), (12, 4, {1, 2, 4, 12}), (14, 2, {1, 2, 14})])
def test_an_engine_over_ranks_needs_a_model_that_can_be_cut(
    heads: int, keys: int, fits: set[int], folder: Path, with_vllm: None
) -> None:
    """Whole heads for each rank; ranks beyond the heads of keys and values have copies of them."""
    text = {"max_position_embeddings": 1024, "vocab_size": 500, "num_attention_heads": heads}
    (folder / "model" / "config.json").write_text(json.dumps({**text, "num_key_value_heads": keys}))
    for size in range(1, heads + 1):
        allocation = f"vllm:d1t{size}+fsdp:d1"
        if size in fits:
            checked(allocation, "cluster.n_gpus_per_node=16")
        else:
            (problem,) = problems(allocation, "cluster.n_gpus_per_node=16")
            assert f"engines of {size} ranks for a model of {heads} attention heads ({keys} of keys" in problem
