"""Parts of the trainer engines that need no process group: schedule, packed attention, folders, batch tensors."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pekoe.pipeline.config.optimizer import OptimizerConfig
from pekoe.pipeline.messages import TensorSpec
from pekoe.pipeline.train.engines.batch_tensors import batch_tensors
from pekoe.pipeline.train.engines.hf_folder import (
    HfFolderWriter,
    load_parameters,
    materialise,
    parameters_on_meta,
    plan_shards,
)
from pekoe.pipeline.train.engines.isolation import check_isolation, check_sharing, pack_tokens
from pekoe.pipeline.train.engines.learning_rate import learning_rate
from pekoe.pipeline.train.engines.packed_attention import SHORT, PackedSequences, choose_attention, sdpa_attention

CPU = torch.device("cpu")


def rates(total=10, **settings):
    config = OptimizerConfig(lr=2.0, **settings)
    return [learning_rate(config, step, total) for step in range(total)]


def test_constant_rate_after_warmup():
    np.testing.assert_allclose(rates(warmup_steps_proportion=0.4), [0.5, 1, 1.5] + [2.0] * 7)


def test_linear_rate_down_to_its_floor():
    got = rates(lr_scheduler_type="linear", min_lr_ratio=0.5)
    np.testing.assert_allclose(got, [2 - 0.1 * step for step in range(10)])


def test_cosine_rate():
    got = rates(lr_scheduler_type="cosine", warmup_steps_proportion=0.2)
    assert got[:3] == [1, 2, 2]
    np.testing.assert_allclose(got[6], 1.0)
    assert 0 < got[9] < 0.1
    assert learning_rate(OptimizerConfig(lr=2.0, lr_scheduler_type="cosine"), 10, 10) == 0


def attend(query, key, value, bounds, **options):
    packed = PackedSequences.of(bounds, CPU)
    return sdpa_attention(nn.Module(), query, key, value, None, packed_sequences=packed, **options)[0]


def reference(query, key, value, bounds, window=None):
    """Softmax over what may be seen, head by head."""
    heads, repeat = query.shape[1], query.shape[1] // key.shape[1]
    out = torch.zeros(1, query.shape[2], heads, query.shape[3], dtype=query.dtype)
    for start, end in itertools.pairwise(bounds):
        for head in range(heads):
            for t in range(start, end):
                first = start if window is None else max(start, t - window + 1)
                k, v = key[0, head // repeat, first : t + 1], value[0, head // repeat, first : t + 1]
                weight = torch.softmax(k @ query[0, head, t] / query.shape[3] ** 0.5, 0)
                out[0, t, head] = weight @ v
    return out


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("bounds", [(0, 1, 6, 13), (0, SHORT + 1, SHORT + 3)])
def test_packed_attention_equals_attention_written_out(window, bounds):
    torch.manual_seed(0)
    query = torch.randn(1, 4, bounds[-1], 8, dtype=torch.float64)
    key, value = (torch.randn(1, 2, bounds[-1], 8, dtype=torch.float64) for _ in range(2))
    out = attend(query, key, value, bounds, sliding_window=window)
    torch.testing.assert_close(out, reference(query, key, value, bounds, window))


def test_packed_attention_refuses_what_it_would_ignore():
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="without packed_sequences"):
        sdpa_attention(nn.Module(), x, x, x, None)
    with pytest.raises(ValueError, match="takes no attention_mask"):
        sdpa_attention(nn.Module(), x, x, x, torch.ones(4), packed_sequences=PackedSequences.of((0, 4), CPU))
    with pytest.raises(ValueError, match="does not hold 5 packed tokens"):
        attend(x, x, x, (0, 5))
    with pytest.raises(ValueError, match="caps attention scores"):
        attend(x, x, x, (0, 4), softcap=30.0)
    with pytest.raises(ValueError, match="sinks"):
        attend(x, x, x, (0, 4), s_aux=torch.zeros(1))
    with pytest.raises(ValueError, match="not causal"):
        attend(x, x, x, (0, 4), is_causal=False)


def test_attention_choice(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_attention("auto", "flash", torch.bfloat16) == "sdpa"
    with pytest.raises(ValueError, match="not installed"):
        choose_attention("flash", "flash", torch.bfloat16)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert choose_attention("auto", "flash", torch.bfloat16) == "flash"
    assert choose_attention("auto", "flash", torch.float32) == "sdpa"
    assert choose_attention("auto", "sdpa", torch.bfloat16) == "sdpa"
    with pytest.raises(ValueError, match=r"needs actor\.dtype bfloat16, not float32"):
        choose_attention("flash", "flash", torch.float32)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.head.weight = self.embed.weight


def test_parameters_on_meta_keep_ties_and_buffers():
    with parameters_on_meta():
        model = Tiny()
    assert model.embed.weight.is_meta
    assert model.head.weight is model.embed.weight
    plain = nn.Linear(2, 2)
    assert not plain.weight.is_meta
    materialise(model, CPU, CPU)
    torch.testing.assert_close(model.table, torch.arange(3.0))
    assert not model.embed.weight.is_meta


def test_loading_names_what_differs(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"neither model.safetensors nor"):
        load_parameters(model, tmp_path, ())
    state = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    save_file({**state, "c.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing \[\], unknown \['c.weight'\]"):
        load_parameters(model, tmp_path, ())
    save_file({**state, "a.weight": torch.ones(9, 9)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"a.weight has shape \[9, 9\], the model \(3, 2\)"):
        load_parameters(model, tmp_path, ())
    state["a.weight"] = torch.full((3, 2), 2.5).bfloat16()
    save_file(state, tmp_path / "model.safetensors")
    load_parameters(model, tmp_path, ())
    torch.testing.assert_close(model["a"].weight.data, torch.full((3, 2), 2.5))
    del state["b.bias"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing \['b.bias'\]"):
        load_parameters(model, tmp_path, ())


def test_shards_respect_their_limit():
    specs = [TensorSpec(name, (n,), "float32") for name, n in (("a", 2), ("b", 2), ("c", 9), ("d", 1), ("e", 3))]
    assert plan_shards(specs, limit=16) == [["a", "b"], ["c"], ["d", "e"]]
    assert plan_shards(specs, limit=1000) == [["a", "b", "c", "d", "e"]]


def test_writer_of_several_shards_replaces_an_older_folder(tmp_path, monkeypatch):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (target / "old.txt").write_text("old")
    (source / "config.json").write_text('{"model_type": "x", "torch_dtype": "float32"}')
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_text("never copied")
    monkeypatch.setattr("pekoe.pipeline.train.engines.hf_folder.SHARD_BYTES", 8)
    specs = [TensorSpec("a", (2,), "float32"), TensorSpec("b", (2,), "float32")]
    writer = HfFolderWriter(source, target, specs)
    writer.add("a", torch.ones(2))
    with pytest.raises(ValueError, match="1 of 2 weight files"):
        writer.finish("float32")
    assert (target / "old.txt").exists()
    writer.add("b", torch.zeros(2))
    writer.finish("bfloat16")
    names = sorted(path.name for path in target.iterdir())
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert names == ["config.json", *shards, "model.safetensors.index.json", "tokenizer.json"]
    assert json.loads((target / "config.json").read_text()) == {"model_type": "x", "dtype": "bfloat16"}
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"a": shards[0], "b": shards[1]}
    model = nn.ParameterDict({"a": torch.zeros(2), "b": torch.ones(2)})
    load_parameters(model, target, ())
    torch.testing.assert_close(model["a"].data, torch.ones(2))


def test_batch_tensors_carry_fields_and_extras():
    batch = pack_tokens([np.array([5, 6, 7], np.int32), np.array([8, 9], np.int32)])
    batch.extra["advantages"] = np.arange(5.0)
    tensors = batch_tensors(batch, CPU)
    assert tensors["position_ids"].tolist() == [0, 1, 2, 0, 1]
    assert tensors["tokens"].dtype == torch.int64
    assert tensors["loss_mask"].tolist() == [0, 1, 1, 0, 1]
    assert tensors["advantages"].tolist() == [0, 1, 2, 3, 4]
    batch.extra["tokens"] = np.zeros(5)
    with pytest.raises(ValueError, match=r"batch.extra: \['tokens'\]"):
        batch_tensors(batch, CPU)


def token_sums(batches, leak):
    """Stands for a model's forward: each token's log-prob is a sum over what it sees."""
    found = []
    for batch in batches:
        tokens, starts = batch.tokens.astype(float), np.repeat(batch.cu_seqlens[:-1], batch.lengths)
        seen = [tokens[0 if leak else starts[t] : t].sum() for t in range(len(tokens))]
        found.append(torch.tensor(np.array(seen) * batch.loss_mask) / 100)
    return found


def test_isolation_check_tells_leaks_from_isolation():
    check_isolation(lambda batches, _: token_sums(batches, leak=False), 50, torch.float32, seed=1)
    with pytest.raises(RuntimeError, match="see each other"):
        check_isolation(lambda batches, _: token_sums(batches, leak=True), 50, torch.float32, seed=1)
    with pytest.raises(RuntimeError, match="no effect"):
        check_isolation(lambda batches, _: [torch.zeros(b.num_tokens) for b in batches], 50, torch.float32, seed=1)


def shared_sums(fault, by):
    """A forward pass that is wrong by `by` where sequences share a prompt, at some of their tokens [M]."""

    def forward(batches, _):
        found = token_sums(batches, leak=False)
        for batch, sums in zip(batches, found, strict=True):
            if len(set(batch.groups.tolist())) == 1:
                sums += by * fault(batch)
        return found

    return forward


def one_token(batch):
    return torch.arange(batch.num_tokens) == 30


def responses(batch):
    return torch.from_numpy(batch.position_ids >= 20)


def last_rows_after_the_first(batch):
    return (torch.arange(batch.num_tokens) > 50) * int(batch.tokens[20])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharing_check_tells_faults_from_rounding(dtype):
    """In half precision a single token may be far off: real models have such."""
    rounding = 0.7 if dtype == torch.bfloat16 else 9e-4
    check_sharing(shared_sums(one_token, rounding), 50, dtype, seed=1)
    with pytest.raises(RuntimeError, match="share a prompt differ by"):
        check_sharing(shared_sums(responses, 1.5 * rounding), 50, dtype, seed=1)
    with pytest.raises(RuntimeError, match="share a prompt see each other"):
        check_sharing(shared_sums(last_rows_after_the_first, 1e-5), 50, dtype, seed=1)
    with pytest.raises(RuntimeError, match="differ by nan"):
        check_sharing(shared_sums(one_token, torch.nan), 50, dtype, seed=1)
