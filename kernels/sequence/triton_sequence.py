"""The sequence room in Triton: each sequence is one program, which goes over it block by block with a carry.

Inside a block scans are associative: of affine maps `x -> b + a x` for discounted sums, and of "the nearest one that
counts" for what a token needs to know of its active neighbours. What a sequence gets depends on nothing else in the
buffer, to the bit. Sums are carried in float64 where the device has it. Kernels keep to the API of Triton 3.2 (NVIDIA
and Ascend); each load is one run of memory, of which only an upper end is masked.

With G = A + V (the lambda-return), generalised advantages are one recurrence over tokens, in which only the last token
of a timestep discounts and the others add their reward:

    G_i = r_i + [i ends a timestep] discount ((1 - lam) V_next + lam G_next), else r_i + G_{i+1}        A = G - V

Legend: M tokens laid end to end, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends import backends

from pekoe.kernels.sequence.reference import SINGLE_ONLY

BLOCK = 512
"""Tokens that a program works on at a time."""
MAX_PROGRAMS = 32768
"""Sequences of a launch; Ascend takes 65535 programs."""
IS_ASCEND = "ascend" in backends
"""Whether this Triton is Ascend's, which has no float64, in its interpreter neither."""


@triton.jit
def _affine(a, b, next_a, next_b):
    """`x -> next_b + next_a (b + a x)`."""
    return next_a * a, next_b + next_a * b


@triton.jit
def _nearest(counts, one, other, next_counts, next_one, next_other):
    """The later of two that counts, with what belongs to it."""
    takes = next_counts != 0
    return counts | next_counts, tl.where(takes, next_one, one), tl.where(takes, next_other, other)


@triton.jit
def scan_gae(
    rewards, values, mask, turns, cu_seqlens, decays, gains, bootstrap, advantages, returns,
    has_values: tl.constexpr, has_turns: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Right to left. Token unit: advantages and returns. Turn unit: G at every token into `returns`, which at the first
    active one of a turn is the turn's."""
    sequence = tl.program_id(0)
    begin = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1)
    decay = tl.load(decays + sequence)
    kind = decay.dtype
    gain = tl.load(gains + sequence)
    carry = tl.load(bootstrap + sequence)
    value_after = carry
    turn_after = 0
    is_after = 0
    place = tl.arange(0, block)
    num_blocks = tl.cdiv(end - begin, block)
    for number in range(0, num_blocks):
        token = begin + (num_blocks - 1 - number) * block + place
        inside = token < end
        active = (tl.load(mask + token, mask=inside, other=0) != 0).to(tl.int32)
        reward = tl.load(rewards + token, mask=inside, other=0.0).to(kind)
        # What stands one further: the scan finds the next active token of each, if it lies in the block.
        follows = token + 1 < end
        value = tl.zeros([block], kind)
        turn = tl.zeros([block], tl.int32)
        if has_values:
            value = tl.load(values + token + 1, mask=follows, other=0.0).to(kind)
        if has_turns:
            turn = tl.load(turns + token + 1, mask=follows, other=0)
        is_next = (tl.load(mask + token + 1, mask=follows, other=0) != 0).to(tl.int32)
        is_next, value, turn = tl.associative_scan((is_next, value, turn), 0, _nearest, reverse=True)
        value = tl.where(is_next != 0, value, value_after)
        ends = active
        if has_turns:
            turn = tl.where(is_next != 0, turn, turn_after)
            is_next = is_next | is_after
            own_turn = tl.load(turns + token, mask=inside, other=0)
            ends = tl.where((is_next != 0) & (turn == own_turn), 0, active)
            turn_after = tl.sum(tl.where(place == 0, turn, 0), 0)
            is_after = tl.sum(tl.where(place == 0, is_next, 0), 0)
        factor = tl.where(ends != 0, decay, 1.0)
        earned = tl.where(active != 0, reward, 0.0) + tl.where(ends != 0, gain * value, 0.0)
        factor, total = tl.associative_scan((factor, earned), 0, _affine, reverse=True)
        total += factor * carry
        if has_turns:
            tl.store(returns + token, total.to(returns.dtype.element_ty), mask=inside)
        else:
            own = tl.zeros([block], kind)
            if has_values:
                own = tl.load(values + token, mask=inside, other=0.0).to(kind)
            back = tl.where(active != 0, total, own)
            tl.store(returns + token, back.to(returns.dtype.element_ty), mask=inside)
            gap = tl.where(active != 0, total - own, 0.0)
            tl.store(advantages + token, gap.to(advantages.dtype.element_ty), mask=inside)
        carry = tl.sum(tl.where(place == 0, total, 0.0), 0)
        value_after = tl.sum(tl.where(place == 0, value, 0.0), 0)


@triton.jit
def spread_turns(
    values, mask, turns, mask_before, turns_before, cu_seqlens, advantages, returns,
    has_values: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Left to right, after `scan_gae`: each active token gets G and G - V of the first token of its turn. `mask_before`
    and `turns_before` are moved on by one token."""
    sequence = tl.program_id(0)
    begin = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1)
    kind: tl.constexpr = returns.dtype.element_ty
    total_carry = tl.zeros([], kind)
    value_carry = tl.zeros([], kind)
    turn_carry = 0
    is_carry = 0
    place = tl.arange(0, block)
    for start in range(begin, end, block):
        token = start + place
        inside = token < end
        active = (tl.load(mask + token, mask=inside, other=0) != 0).to(tl.int32)
        is_before = (tl.load(mask_before + token, mask=inside, other=0) != 0).to(tl.int32)
        is_before = tl.where(token == begin, 0, is_before)
        turn = tl.load(turns_before + token, mask=inside, other=0)
        is_before, turn, _ = tl.associative_scan((is_before, turn, turn), 0, _nearest)
        turn = tl.where(is_before != 0, turn, turn_carry)
        is_before = is_before | is_carry
        own_turn = tl.load(turns + token, mask=inside, other=0)
        begins = tl.where((is_before != 0) & (turn == own_turn), 0, active)
        own = tl.zeros([block], kind)
        if has_values:
            own = tl.load(values + token, mask=inside, other=0.0)
        total = tl.load(returns + token, mask=inside, other=0.0)
        begun, total, value = tl.associative_scan((begins, total, own), 0, _nearest)
        total = tl.where(begun != 0, total, total_carry)
        value = tl.where(begun != 0, value, value_carry)
        tl.store(returns + token, tl.where(active != 0, total, own), mask=inside)
        tl.store(advantages + token, tl.where(active != 0, total - value, 0.0), mask=inside)
        is_end = place == block - 1
        total_carry = tl.sum(tl.where(is_end, total, 0.0), 0)
        value_carry = tl.sum(tl.where(is_end, value, 0.0), 0)
        turn_carry = tl.sum(tl.where(is_end, turn, 0), 0)
        is_carry = tl.sum(tl.where(is_end, is_before, 0), 0)


@triton.jit
def scan_sums(values, decays, cu_seqlens, out, from_left: tl.constexpr, block: tl.constexpr):
    """`x_i = v_i + decay x_{i+1}`, or `+ decay x_{i-1}` from the left."""
    sequence = tl.program_id(0)
    begin = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1)
    decay = tl.load(decays + sequence)
    carry = tl.zeros([], decay.dtype)
    place = tl.arange(0, block)
    num_blocks = tl.cdiv(end - begin, block)
    for number in range(0, num_blocks):
        if from_left:
            token = begin + number * block + place
            is_edge = place == block - 1
        else:
            token = begin + (num_blocks - 1 - number) * block + place
            is_edge = place == 0
        inside = token < end
        value = tl.load(values + token, mask=inside, other=0.0).to(decay.dtype)
        factor = tl.where(inside, decay, 1.0)
        factor, total = tl.associative_scan((factor, value), 0, _affine, reverse=not from_left)
        total += factor * carry
        tl.store(out + token, total.to(out.dtype.element_ty), mask=inside)
        carry = tl.sum(tl.where(is_edge, total, 0.0), 0)


@triton.jit
def sum_segments(
    values, mask, cu_seqlens, out,
    has_mask: tl.constexpr, is_mean: tl.constexpr, is_double: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Sum or mean of a sequence's tokens where the mask is not 0."""
    sequence = tl.program_id(0)
    begin = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1)
    kind: tl.constexpr = tl.float64 if is_double else tl.float32
    place = tl.arange(0, block)
    totals = tl.zeros([block], kind)
    counts = tl.zeros([block], tl.int32)
    for start in range(begin, end, block):
        inside = start + place < end
        value = tl.load(values + start + place, mask=inside, other=0.0).to(kind)
        counted = inside.to(tl.int32)
        if has_mask:
            counted = (tl.load(mask + start + place, mask=inside, other=0) != 0).to(tl.int32)
            value = tl.where(counted != 0, value, 0.0)
        totals += value
        counts += counted
    total = tl.sum(totals, 0)
    if is_mean:
        total = total / tl.maximum(tl.sum(counts, 0), 1).to(kind)
    tl.store(out + sequence, total.to(out.dtype.element_ty))


def gae(
    rewards: Tensor,
    values: Tensor | None,
    mask: Tensor,
    cu_seqlens: Tensor,
    discount: float,
    lambdas: Tensor,
    turns: Tensor | None,
    bootstrap: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [M]; turn numbers count as int32."""
    kind = _kind(rewards)
    earned, own = _ready(rewards), None if values is None else _ready(values)
    flags, bounds = _flags(mask), cu_seqlens.to(torch.int32)
    numbers = None if turns is None else turns.to(torch.int32).contiguous()
    decays = discount * lambdas.to(kind)
    gains = discount * (1 - lambdas.to(kind))
    after = torch.zeros_like(decays) if bootstrap is None else bootstrap.to(kind).contiguous()
    # From one kernel to the other G goes in the precision of sums.
    advantages, returns = (torch.empty_like(earned, dtype=kind if turns is not None else None) for _ in range(2))
    for some in _launches(len(bounds) - 1):
        scan_gae[(some.stop - some.start,)](
            earned, own, flags, numbers, bounds[some.start :], decays[some], gains[some], after[some],
            advantages, returns, has_values=own is not None, has_turns=numbers is not None, block=BLOCK,
        )  # fmt: skip
    if numbers is not None:
        own = None if own is None else own.to(kind)
        for some in _launches(len(bounds) - 1):
            spread_turns[(some.stop - some.start,)](
                own, flags, numbers, flags.roll(1), numbers.roll(1), bounds[some.start :], advantages, returns,
                has_values=own is not None, block=BLOCK,
            )  # fmt: skip
    return advantages.to(rewards.dtype), returns.to(rewards.dtype)


def discounted_sums(values: Tensor, decay: Tensor, cu_seqlens: Tensor, from_left: bool) -> Tensor:
    """[M] from the right, or from the left."""
    added, bounds, decays = _ready(values), cu_seqlens.to(torch.int32), decay.to(_kind(values)).contiguous()
    out = torch.empty_like(added)
    for some in _launches(len(bounds) - 1):
        scan_sums[(some.stop - some.start,)](
            added, decays[some], bounds[some.start :], out, from_left=from_left, block=BLOCK
        )  # fmt: skip
    return out.to(values.dtype)


def segment_sum(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """[S]"""
    return _segments(values, mask, cu_seqlens, is_mean=False)


def segment_mean(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """[S]"""
    return _segments(values, mask, cu_seqlens, is_mean=True)


def _segments(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor, is_mean: bool) -> Tensor:
    added, bounds, flags = _ready(values), cu_seqlens.to(torch.int32), None if mask is None else _flags(mask)
    out = torch.empty(len(bounds) - 1, dtype=added.dtype, device=added.device)
    for some in _launches(len(out)):
        sum_segments[(some.stop - some.start,)](
            added, flags, bounds[some.start :], out[some],
            has_mask=mask is not None, is_mean=is_mean, is_double=_kind(values) == torch.float64, block=BLOCK,
        )  # fmt: skip
    return out.to(values.dtype)


def _kind(values: Tensor) -> torch.dtype:
    """What sums are carried in."""
    return torch.float32 if values.device.type in SINGLE_ONLY or IS_ASCEND else torch.float64


def _ready(values: Tensor) -> Tensor:
    """In no more precision than sums have."""
    return (values.to(torch.float32) if _kind(values) == torch.float32 else values).contiguous()


def _flags(mask: Tensor) -> Tensor:
    """Bytes that are 0 or not."""
    return mask.contiguous().view(torch.uint8) if mask.dtype == torch.bool else mask.contiguous()


def _launches(num_sequences: int) -> Iterator[slice]:
    for start in range(0, num_sequences, MAX_PROGRAMS):
        yield slice(start, min(start + MAX_PROGRAMS, num_sequences))
