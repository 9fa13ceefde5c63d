"""Attention of responses that share a prompt, against each sequence by itself, written with plain softmaxes."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from pekoe.pipeline.train.engines import packed_attention, shared_attention
from pekoe.pipeline.train.engines.packed_attention import PackedSequences, flash_attention, sdpa_attention

CPU = torch.device("cpu")
HEADS, GROUPS, SIZE = 4, 2, 8
RUNS = {
    "uneven": [(5, [1, 3, 30]), (9, []), (66, [20, 70, 3])],
    "one response": [(7, [4])],
    "one token each": [(1, [1, 1])],
    "no run but the last": [(3, []), (1, []), (17, [2, 2])],
}
"""Prompts, and responses to each."""


def layout(runs):
    """(packed, pieces of each whole sequence as spans)."""
    bounds, prompts, whole = [0], [], []
    for prompt, responses in runs:
        number, start = len(prompts), bounds[-1]
        bounds.append(start + prompt)
        prompts.append(number)
        if not responses:
            whole.append([(start, start + prompt)])
        for length in responses:
            bounds.append(bounds[-1] + length)
            prompts.append(number)
            whole.append([(start, start + prompt), (bounds[-2], bounds[-1])])
    return PackedSequences.of(bounds, CPU, prompts), whole


def plain_attention(query, key, value, window):
    """[H, T, D] of one sequence, float64."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=0) for x in (key, value))
    scores = query @ key.transpose(1, 2) / SIZE**0.5
    place = torch.arange(query.shape[1])
    distance = place[:, None] - place[None]
    hidden = (distance < 0) | (distance >= (window or len(place)))
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1) @ value


def wanted(query, key, value, whole, window):
    """[1, T, H, D]: each sequence by itself; prompts are the same in all of theirs."""
    out = torch.zeros(1, query.shape[2], HEADS, SIZE, dtype=torch.float64)
    for spans in whole:
        at = torch.cat([torch.arange(*span) for span in spans])
        found = plain_attention(*(x[0, :, at].double() for x in (query, key, value)), window)
        out = out.index_copy(1, at, found.transpose(0, 1)[None])
    return out


def wanted_gradients(query, key, value, whole, window, weight):
    """Of the sum over tokens, a prompt's counted once."""
    inputs = [x.detach().double().requires_grad_() for x in (query, key, value)]
    found = wanted(*inputs, whole, window)
    # index_copy keeps the last copy of a prompt, whose queries alone have gradients; equal ones of the others are left.
    return torch.autograd.grad((found * weight).sum(), inputs)


def flash_stand_in(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    """flash-attn's variable-length function as it is documented: causal at the bottom right."""
    window = options["window_size"][0] + 1 or None
    assert options["causal"]
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    assert max_seqlen_k == cu_seqlens_k.diff().max()
    out = []
    for one in range(len(cu_seqlens_q) - 1):
        part_q, part_k = slice(*cu_seqlens_q[one : one + 2]), slice(*cu_seqlens_k[one : one + 2])
        own, before = q[part_q].transpose(0, 1), cu_seqlens_k[one + 1] - cu_seqlens_k[one] - q[part_q].shape[0]
        padded = torch.cat([own.new_zeros(HEADS, before, SIZE), own], dim=1)
        found = plain_attention(padded, k[part_k].transpose(0, 1), v[part_k].transpose(0, 1), window)
        out.append(found[:, before:].transpose(0, 1))
    return torch.cat(out)


def attend(path, packed, query, key, value, window, monkeypatch):
    if path == "flash":
        module = types.ModuleType("flash_attn")
        module.flash_attn_varlen_func = flash_stand_in
        monkeypatch.setitem(sys.modules, "flash_attn", module)
        return flash_attention(nn.Module(), query, key, value, None, sliding_window=window, packed_sequences=packed)[0]
    if path == "expanded":
        monkeypatch.setattr(shared_attention, "takes_mask_and_groups", lambda device_type: False)
    if path in {"masked", "expanded"}:
        monkeypatch.setattr(
            packed_attention,
            "attend_merged",
            lambda runs, query, key, value, scaling: packed_attention.attend_masked(
                runs, query, key, value, 0.0, scaling, None
            ),
        )
    return sdpa_attention(nn.Module(), query, key, value, None, sliding_window=window, packed_sequences=packed)[0]


@pytest.mark.parametrize("path", ["merged", "masked", "expanded", "flash"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS.keys())
def test_each_sequence_is_as_by_itself(path, window, runs, monkeypatch):
    packed, whole = layout(runs)
    torch.manual_seed(0)
    query = torch.randn(1, HEADS, packed.bounds[-1], SIZE, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(1, GROUPS, packed.bounds[-1], SIZE, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    out = attend(path, packed, query, key, value, window, monkeypatch)
    torch.testing.assert_close(out, wanted(query, key, value, whole, window), atol=1e-12, rtol=1e-12)
    weight = torch.randn(out.shape, dtype=torch.float64)
    found = torch.autograd.grad((out * weight).sum(), (query, key, value))
    expected = wanted_gradients(query, key, value, whole, window, weight)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("device", "heads"), [("meta", HEADS), ("cpu", GROUPS)])
@pytest.mark.parametrize("shares", [True, False])
def test_on_accelerators_a_mask_comes_with_a_key_head_for_each_query_head(device, heads, shares, monkeypatch):
    """No kernel of theirs that holds few scores takes a mask with fewer; on a CPU one does, in less memory."""
    calls, real = [], shared_attention.scaled_dot_product_attention

    def note(query, key, value, **options):
        if options["attn_mask"] is not None:
            calls.append((key.shape[1], value.shape[1], options["enable_gqa"]))
        return real(query, key, value, **options)

    monkeypatch.setattr(shared_attention, "scaled_dot_product_attention", note)
    packed = PackedSequences.of((0, 9, 15), torch.device(device), (0, 0) if shares else ())
    query, key, value = (torch.empty(1, number, 15, SIZE, device=device) for number in (HEADS, GROUPS, GROUPS))
    sdpa_attention(nn.Module(), query, key, value, None, sliding_window=4, packed_sequences=packed)
    assert calls == [(heads, heads, heads != HEADS)] * 2


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_smaller_types_round(dtype, atol):
    packed, whole = layout(RUNS["uneven"])
    torch.manual_seed(1)
    query = torch.randn(1, HEADS, packed.bounds[-1], SIZE, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(1, GROUPS, packed.bounds[-1], SIZE, dtype=dtype, requires_grad=True) for _ in range(2))
    out = sdpa_attention(nn.Module(), query, key, value, None, packed_sequences=packed)[0]
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), wanted(query, key, value, whole, None), atol=atol, rtol=0)
    weight = torch.ones(out.shape, dtype=torch.float64)
    found = torch.autograd.grad((out * weight).sum(), (query, key, value))
    for one, other in zip(found, wanted_gradients(query, key, value, whole, None, weight), strict=True):
        torch.testing.assert_close(one.double(), other, atol=8 * atol, rtol=8 * atol)


def test_strided_inputs_and_gradients_are_taken_as_models_give_them():
    """Projections come as [1, T, H, D], transposed."""
    packed, _ = layout(RUNS["uneven"])
    torch.manual_seed(2)
    flat = [torch.randn(1, packed.bounds[-1], heads, SIZE, dtype=torch.float64) for heads in (HEADS, GROUPS, GROUPS)]
    found = []
    for contiguous in (False, True):
        inputs = [x.clone().requires_grad_() for x in flat]
        views = [x.transpose(1, 2).contiguous() if contiguous else x.transpose(1, 2) for x in inputs]
        out = sdpa_attention(nn.Module(), *views, None, packed_sequences=packed)[0]
        found.append((out, *torch.autograd.grad(out.flatten()[::3].square().sum(), inputs)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-13, rtol=1e-13)


def test_values_may_be_of_another_size_than_keys():
    packed, whole = layout(RUNS["uneven"])
    torch.manual_seed(3)
    query, key, value = (
        torch.randn(1, heads, packed.bounds[-1], size, dtype=torch.float64, requires_grad=True)
        for heads, size in ((HEADS, SIZE), (GROUPS, SIZE), (GROUPS, SIZE // 2))
    )
    out = sdpa_attention(nn.Module(), query, key, value, None, packed_sequences=packed)[0]
    padded = torch.cat([value, torch.zeros_like(value)], dim=-1)
    torch.testing.assert_close(out, wanted(query, key, padded, whole, None)[..., : SIZE // 2], atol=1e-12, rtol=1e-12)
    assert all(grad.abs().max() > 0 for grad in torch.autograd.grad(out.square().sum(), (query, key, value)))
