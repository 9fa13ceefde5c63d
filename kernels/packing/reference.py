"""What the packing plans mean, in plain Python and numpy.

The arguments are checked arrays: lengths and counts int64, costs float64, all at least 0. Loads are added up in float64
in the order of assignment, so that every implementation gives the same plan.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Plan = tuple[Int64, Int64, int]
"""Rank and micro-step of each item, and the number of micro-steps."""

SWAP_TRIES = 64
"""Pairs of parts that `equal_count` looks at, for each part."""
TOLERANCE = 1e-5
"""`equal_count` is content with a heaviest part this close to the mean."""
SHARES = (0, 1, 2, 4, 6, 7, 8)
"""Eighths of the items, the longest, that `joint_plan` tries to place by best fit."""
CONTENT = 2e-3
"""`joint_plan` tries no further share when ranks wait for each other for at most this part of the work."""
LARGE_ITEMS = 4
"""`joint_plan` knows that a bin holds at most k items that are longer than 1 / (k + 1) of it, for k up to this."""


def best_fit(lengths: Int64, capacity: int, max_items: int) -> Int64:
    """Bin of each item: the longest first, into the fullest bin that has room, else into a new one."""
    bins = np.zeros(len(lengths), np.int64)
    num_items: list[int] = []
    open_bins: list[tuple[int, int]] = []  # (room, bin), sorted
    for item in np.argsort(-lengths, kind="stable"):
        place = bisect_left(open_bins, (int(lengths[item]), -1))
        if place == len(open_bins):
            room, number = capacity, len(num_items)
            num_items.append(0)
        else:
            room, number = open_bins.pop(place)
        bins[item] = number
        num_items[number] += 1
        if num_items[number] < max_items:
            insort(open_bins, (room - int(lengths[item]), number))
    return bins


def karmarkar_karp(costs: Float64, num_parts: int) -> Int64:
    """Part of each item by the largest differencing method.

    A state is `num_parts` sets, sorted by falling sum. It begins as one item and empty sets. The two states with the
    largest difference between their first and last set (equal: the heaviest first set, then the lower first item)
    become one: the heaviest set joins the other's lightest, and so on. Items that cost nothing come last, each to the
    part with the fewest items.
    """
    parts = np.zeros(len(costs), np.int64)
    states: list[tuple[float, float, int, list[tuple[float, list[int]]]]] = []
    for item in np.flatnonzero(costs):
        sets = [(float(costs[item]), [int(item)])] + [(0.0, [])] * (num_parts - 1)
        states.append((sets[-1][0] - sets[0][0], -sets[0][0], int(item), sets))
    heapq.heapify(states)
    while len(states) > 1:
        _, _, number, one = heapq.heappop(states)
        _, _, _, other = heapq.heappop(states)
        joined = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda pair: -pair[0])
        heapq.heappush(states, (joined[-1][0] - joined[0][0], -joined[0][0], number, joined))
    for *_, sets in states:
        for part, (_, items) in enumerate(sets):
            parts[items] = part
    num_items = np.bincount(parts[costs > 0], minlength=num_parts)
    for item in np.flatnonzero(costs == 0):
        parts[item] = np.argmin(num_items)
        num_items[parts[item]] += 1
    return parts


def equal_count(costs: Float64, num_parts: int) -> Int64:
    """Part of each item, with numbers of items that differ by at most 1.

    The costliest item goes to the lightest part that may take one more (equal: the one with fewer items). Then the
    heaviest part exchanges an item with the lightest part that lowers it, until none does.
    """
    members, load = _dealt(costs, num_parts)
    mean = float(np.cumsum(load)[-1]) / num_parts  # one after the other; sum() adds in another order
    tries = 0
    while len(costs) > num_parts and tries < SWAP_TRIES * num_parts:
        heavy = int(np.argmax(load))
        if load[heavy] <= mean * (1 + TOLERANCE):
            break
        for light in np.argsort(load, kind="stable"):
            tries += 1
            found = load[light] < load[heavy] and _exchange(costs, members, load, heavy, int(light))
            if found or load[light] >= load[heavy] or tries >= SWAP_TRIES * num_parts:
                break
        if not found:
            break
    parts = np.zeros(len(costs), np.int64)
    for part, items in enumerate(members):
        parts[items] = part
    return parts


def _dealt(costs: Float64, num_parts: int) -> tuple[list[list[int]], Float64]:
    """Items of each part, by falling cost, and its load."""
    members: list[list[int]] = [[] for _ in range(num_parts)]
    load, count = np.zeros(num_parts), np.zeros(num_parts, np.int64)
    largest = -(-len(costs) // num_parts)
    num_full = len(costs) - num_parts * (largest - 1)
    for item in np.argsort(-costs, kind="stable"):
        limit = largest if int((count == largest).sum()) < num_full else largest - 1
        key = np.where(count < limit, load, np.inf)
        part = int(np.lexsort((count, key))[0])
        members[part].append(int(item))
        load[part] += costs[item]
        count[part] += 1
    return members, load


def _exchange(costs: Float64, members: list[list[int]], load: Float64, heavy: int, light: int) -> bool:
    """Swaps the two items whose difference in cost is nearest to half the difference between the parts; to give one
    away counts as a swap with nothing where the heavy part has one item more. False when none lowers the heavy part."""
    give, take = members[heavy], members[light]
    taken = costs[take]
    if len(give) > len(take):
        taken = np.append(taken, 0.0)
    half = (load[heavy] - load[light]) / 2
    best: tuple[float, int, int] | None = None
    for i in range(len(give)):
        difference = costs[give[i]] - taken
        nearest = int((difference - half < 0).sum())
        for j in (nearest, nearest - 1):
            if not 0 <= j < len(taken):
                continue
            lower = load[heavy] - difference[j] < load[heavy] and load[light] + difference[j] < load[heavy]
            score = abs(float(difference[j] - half))
            if lower and (best is None or score < best[0]):
                best = (score, i, j)
    if best is None:
        return False
    _, i, j = best
    moved = costs[give[i]] - taken[j]
    load[heavy] -= moved
    load[light] += moved
    given = give.pop(i)
    if j < len(take):
        _insert(costs, give, take.pop(j))
    _insert(costs, take, given)
    return True


def _insert(costs: Float64, items: list[int], item: int) -> None:
    """Behind all that cost as much."""
    items.insert(sum(bool(costs[other] >= costs[item]) for other in items), item)


def joint_plan(
    lengths: Int64,
    costs: Float64,
    counts: Int64 | None,
    num_ranks: int,
    max_tokens: int,
    max_sequences: int,
    every_step: bool,
) -> Plan:
    """Rank and micro-step of each item (`counts`: the sequences that it is, 1 where None).

    As few micro-steps of one bin on every rank as `_longest_first` or best fit need. Some of the longest items are
    placed by best fit, the others go to the bin of the lowest cost; the share of the former is the one with which ranks
    wait least for each other.
    """
    if not len(lengths):
        return np.zeros(0, np.int64), np.zeros(0, np.int64), 0
    fitted = best_fit(lengths, max_tokens, max_sequences) if counts is None else None

    def attempt(num_steps: int, num_fitted: int = 0) -> Int64 | None:
        num_bins = num_ranks * num_steps
        return _longest_first(lengths, costs, counts, num_bins, max_tokens, max_sequences, fitted, num_fitted)

    least = _least_steps(lengths, counts, num_ranks, max_tokens, max_sequences)
    num_steps = _fewest_steps(attempt, least, None if fitted is None else _ceil(int(fitted.max()) + 1, num_ranks))
    plans: list[tuple[float, Int64, Int64]] = []
    mean = float(np.cumsum(costs)[-1]) / num_ranks
    for share in SHARES if fitted is not None and fitted.max() < num_ranks * num_steps else (0,):
        bins = attempt(num_steps, share * len(lengths) // 8)
        if bins is None:
            continue
        bin_costs: Float64 = np.bincount(bins, costs, num_ranks * num_steps).astype(np.float64)
        rank, step, waited = _placed(bin_costs, num_ranks, every_step)
        plans.append((waited, rank[bins], step[bins]))
        if waited <= mean * (1 + CONTENT):
            break
    _, rank, step = min(plans, key=lambda plan: plan[0])
    return rank, step, num_steps


def _least_steps(lengths: Int64, counts: Int64 | None, num_ranks: int, max_tokens: int, max_sequences: int) -> int:
    """No plan has fewer: by all tokens, all sequences, and the items of which at most k fit into one bin."""
    sequences = len(lengths) if counts is None else int(counts.sum())
    least_bins = [_ceil(int(lengths.sum()), max_tokens), _ceil(sequences, max_sequences)]
    for most in range(1, LARGE_ITEMS + 1):
        least_bins.append(_ceil(int((lengths > max_tokens // (most + 1)).sum()), most))
    return max(1, _ceil(max(least_bins), num_ranks))


def _fewest_steps(attempt: Callable[[int], Int64 | None], least: int, by_best_fit: int | None) -> int:
    """By bisection, up to what best fit needs, or, where that is not known, to the double, fourfold, ... of the least
    that fits."""
    if attempt(least) is not None:
        return least
    high = by_best_fit if by_best_fit is not None else 2 * least
    while by_best_fit is None and attempt(high) is None:
        high *= 2
    low = least + 1
    while low < high:
        middle = (low + high) // 2
        if attempt(middle) is None:
            low = middle + 1
        else:
            high = middle
    return high


def _ceil(count: int, size: int) -> int:
    return -(-count // max(size, 1))


def _longest_first(
    lengths: Int64,
    costs: Float64,
    counts: Int64 | None,
    num_bins: int,
    max_tokens: int,
    max_sequences: int,
    fitted: Int64 | None,
    num_fitted: int,
) -> Int64 | None:
    """Bin of each item: the longest first (equal: the costliest); `num_fitted` into the bin that `fitted` names, the
    others into the bin with the lowest cost that has room (equal: with fewer items). None when an item finds none."""
    bins = np.zeros(len(lengths), np.int64)
    load, num_items = np.zeros(num_bins), np.zeros(num_bins, np.int64)
    room, seats = np.full(num_bins, max_tokens), np.full(num_bins, max_sequences)
    for position, item in enumerate(np.lexsort((-costs, -lengths))):
        count = 1 if counts is None else counts[item]
        if fitted is not None and position < num_fitted:
            best = int(fitted[item])
        else:
            key = np.where((room >= lengths[item]) & (seats >= count), load, np.inf)
            best = int(np.lexsort((num_items, key))[0])
            if np.isinf(key[best]):
                return None
        bins[item] = best
        load[best] += costs[item]
        room[best] -= lengths[item]
        seats[best] -= count
        num_items[best] += 1
    return bins


def _placed(costs: Float64, num_ranks: int, every_step: bool) -> tuple[Int64, Int64, float]:
    """Rank and micro-step of each bin, and the cost that the step waits for.

    Bins are sorted by falling cost. If ranks meet in every micro-step, `num_ranks` of them in a row are one, the
    heaviest on the rank that has least; else bins go to ranks by `equal_count`.
    """
    order = np.argsort(-costs, kind="stable")
    rank, step, load = np.zeros(len(order), np.int64), np.zeros(len(order), np.int64), np.zeros(num_ranks)
    if every_step:
        for number, row in enumerate(order.reshape(-1, num_ranks)):
            step[row] = number
            rank[row] = np.argsort(load, kind="stable")
            load[rank[row]] += costs[row]
        return rank, step, float(np.cumsum(costs[order[::num_ranks]])[-1])
    rank = equal_count(costs, num_ranks)
    for part in range(num_ranks):
        own = order[rank[order] == part]
        step[own] = np.arange(len(own))
    return rank, step, float(np.bincount(rank, weights=costs, minlength=num_ranks).max())
