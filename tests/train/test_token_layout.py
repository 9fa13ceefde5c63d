"""Places that are read several times: computed once, and their gradients added up without loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from test_lm_head import LargestTensor

from pekoe.pipeline.algorithm.token_logprobs import token_logprobs
from pekoe.pipeline.train.engines import lm_head
from pekoe.pipeline.train.engines.batch_tensors import batch_tensors
from pekoe.pipeline.train.engines.isolation import pack_tokens
from pekoe.pipeline.train.engines.lm_head import LmHead
from pekoe.pipeline.train.engines.packed_attention import register
from pekoe.pipeline.train.engines.shared_prefix import shared_layout
from pekoe.pipeline.train.engines.token_layout import plain_layout, read


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradients_of_a_place_are_added_up_in_a_wide_type(dtype):
    torch.manual_seed(0)
    states, weights = torch.randn(3, 16, dtype=dtype, requires_grad=True), torch.randn(130, 16, dtype=dtype)
    places = torch.tensor([2] * 128 + [0, 2])
    found = read(states, places)
    assert torch.equal(found, states[places])
    (gradient,) = torch.autograd.grad(found, states, weights)
    expected = torch.zeros(3, 16, dtype=torch.float64).index_add_(0, places, weights.double())
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


def shared_batch(vocab_size, seconds):
    """Rows of one group: a prompt of 10 tokens, then two sampled ones of which the first is in `seconds`."""
    prompt = np.arange(10, dtype=np.int32)
    batch = pack_tokens([np.append(prompt, [token, vocab_size - 1]).astype(np.int32) for token in seconds])
    batch.groups[:] = 0
    batch.loss_mask[np.tile(np.arange(12) < 10, len(seconds))] = 0
    return batch_tensors(batch, torch.device("cpu"))


def build(vocab_size, layout, by_logits, dtype=torch.float64):
    """(head, model, numbers of tokens that its last layer was given)."""
    config = transformers.Qwen3Config(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, attn_implementation=register("sdpa"),
        initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    head = LmHead(token_logprobs, layout, by_logits=by_logits)
    torch.manual_seed(0)
    model, given = head.build(config, dtype=dtype), []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].shape[1]))
    return head, model, given


@pytest.mark.parametrize("by_logits", [False, True])
def test_the_last_layer_is_given_each_shared_place_once(by_logits):
    head, model, given = build(31, shared_layout, by_logits)
    logprobs, _, _ = head.logprobs(model, shared_batch(31, (1, 2, 4, 5)), 1.0, with_entropy=False)
    assert given == [1 + 4]
    logprobs.sum().backward()
    assert int((logprobs != 0).sum()) == 8


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("elements", [1, 3 * 31, 1 << 24])
def test_logits_of_shared_places_give_what_each_sequence_gives(elements, with_entropy, monkeypatch):
    """In pieces of a place, of a few, of all; two rows are alike to the last token."""
    monkeypatch.setattr(lm_head, "PIECE_ELEMENTS", elements)
    batch = shared_batch(31, (7, 1, 1, 4, 7, 2))
    results = []
    for layout in (plain_layout, shared_layout):
        head, model, _ = build(31, layout, by_logits=True)
        logprobs, entropy, _ = head.logprobs(model, batch, 0.7, with_entropy)
        weight = torch.arange(len(logprobs), dtype=torch.float64).cos()
        (logprobs * weight + entropy * weight.flip(0)).sum().backward()
        results.append((logprobs, entropy, *(parameter.grad for parameter in model.parameters())))
    assert results[0][0].abs().max() > 1
    assert bool(results[0][1].any()) == with_entropy
    for plain, shared in zip(*results, strict=True):
        torch.testing.assert_close(shared, plain, atol=1e-5, rtol=1e-5)  # this model's norms are in float32


def test_repeated_logits_are_never_there_all_at_once(monkeypatch):
    """A place that 40 rows ask for, and 40 that one asks for."""
    monkeypatch.setattr(lm_head, "PIECE_ELEMENTS", 10 * 997)
    batch = shared_batch(997, range(40))
    head, model, _ = build(997, shared_layout, by_logits=True)
    with LargestTensor() as seen:
        logprobs, entropy, _ = head.logprobs(model, batch, 1.0, with_entropy=True)
        (logprobs + entropy).sum().backward()
    assert seen.elements == 41 * 997
