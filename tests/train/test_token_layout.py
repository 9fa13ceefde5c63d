"""Places that are read several times: computed once, and their gradients added up without loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from pekoe.pipeline.algorithm.token_logprobs import token_logprobs
from pekoe.pipeline.train.engines.batch_tensors import batch_tensors
from pekoe.pipeline.train.engines.isolation import pack_tokens
from pekoe.pipeline.train.engines.lm_head import LmHead
from pekoe.pipeline.train.engines.packed_attention import register
from pekoe.pipeline.train.engines.shared_prefix import shared_layout
from pekoe.pipeline.train.engines.token_layout import read


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


def test_the_last_layer_is_given_each_shared_place_once():
    config = transformers.Qwen3Config(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, attn_implementation=register("sdpa"),
    )  # fmt: skip
    head = LmHead(token_logprobs, shared_layout, by_logits=False)
    model = head.build(config)
    given = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].shape[1]))
    prompt = np.arange(10, dtype=np.int32)
    batch = pack_tokens([np.append(prompt, [token, 3]).astype(np.int32) for token in (1, 2, 4, 5)])
    batch.groups[:] = 0
    batch.loss_mask[np.tile(np.arange(12) < 10, 4)] = 0
    logprobs, _, _ = head.logprobs(model, batch_tensors(batch, torch.device("cpu")), 1.0, with_entropy=False)
    assert given == [1 + 4]
    logprobs.sum().backward()
    assert int((logprobs != 0).sum()) == 8
