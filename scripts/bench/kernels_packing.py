"""Plans: best fit against TRL's packer, Karmarkar-Karp against verl's, equal counts, the joint plan."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt
from in_turns import check, seconds_in_turns
from independent import find_independent

from pekoe.kernels.packing.packing import JointPlan, best_fit, equal_count, joint_plan, karmarkar_karp

Lengths = npt.NDArray[np.int64]


def lengths_of(count: int, mean: int, longest: int, seed: int = 0) -> Lengths:
    """Log-normal, with a long tail that is cut off."""
    spread = 0.6
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - spread**2 / 2, spread, count)
    return np.clip(drawn, 16, longest).astype(np.int64)


def packing_figures(quick: bool) -> dict[str, Any]:
    find_independent()
    rounds = 3 if quick else 9
    return best_fit_figures(rounds) | partition_figures(1 if quick else 3, rounds) | plan_figures(rounds)


def best_fit_figures(rounds: int) -> dict[str, Any]:
    """10,000 sequences into rows of 8,192 tokens. TRL's packer also moves the tokens: they are a byte each, a few
    thousandths of its time."""
    import pyarrow

    pack = importlib.import_module("trl.data_utils")._pack_bfd
    capacity, lengths = 8192, lengths_of(10_000, 1000, 8192)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = pyarrow.ListArray.from_arrays(ends, pyarrow.array(np.zeros(ends[-1], np.int8)))
    table = pyarrow.table({"input_ids": tokens})
    bins = best_fit(lengths, capacity)
    num_bins = int(bins.max()) + 1
    check(bool((np.bincount(bins, weights=lengths) <= capacity).all()), "best_fit: a bin is over its capacity")
    check(num_bins == len(pack(table, capacity)), "best_fit: not as many bins as TRL's packer makes")
    many = lengths_of(100_000, 1000, capacity, seed=1)
    seconds = seconds_in_turns(
        {
            "trl": lambda: pack(table, capacity),
            "ours": lambda: best_fit(lengths, capacity),
            "many": lambda: best_fit(many, capacity),
        },
        rounds,
    )
    return {
        "bfd_over_trl": seconds["trl"] / seconds["ours"],
        "bfd_ms": seconds["ours"] * 1e3,
        "bfd_100k_ms": seconds["many"] * 1e3,
        "bfd_bins_over_bound": num_bins / -(-int(lengths.sum()) // capacity),
    }


def partition_figures(verl_rounds: int, rounds: int) -> dict[str, Any]:
    """Karmarkar-Karp of 10,000 items in 64 parts, and 1,024 items in 64 parts of 16 each."""
    theirs = importlib.import_module("verl.utils.seqlen_balancing").karmarkar_karp
    items, few = lengths_of(10_000, 1000, 8192), lengths_of(1024, 1000, 16384)
    listed, loads = items.tolist(), np.sort(np.bincount(karmarkar_karp(items, 64), weights=items, minlength=64))
    found: list[list[int]] = []
    slow = seconds_in_turns({"verl": lambda: found.extend(theirs(listed, 64, False))}, verl_rounds)
    expected = np.sort([items[part].sum() for part in found[:64]])
    check(bool(np.array_equal(loads, expected)), "karmarkar_karp: other loads than verl's")
    seconds = seconds_in_turns(
        {"kk": lambda: karmarkar_karp(items, 64), "equal": lambda: equal_count(few, 64)}, max(rounds, 5)
    )
    parts = equal_count(few, 64)
    check(bool((np.bincount(parts, minlength=64) == 16).all()), "equal_count: the counts are not equal")
    verl_parts = theirs(few.tolist(), 64, True)
    return {
        "kk_over_verl": slow["verl"] / seconds["kk"],
        "kk_ms": seconds["kk"] * 1e3,
        "kk_spread": float(loads[-1] - loads[0]),
        "equal_count_imbalance": imbalance(np.bincount(parts, weights=few, minlength=64)),
        "equal_count_imbalance_verl": imbalance(np.array([few[part].sum() for part in verl_parts])),
        "equal_count_ms": seconds["equal"] * 1e3,
    }


def plan_figures(rounds: int) -> dict[str, Any]:
    """4,096 sequences on 64 ranks in micro-batches of 65,536 tokens; 100,000 of them."""
    ranks, budget, lengths = 64, 65_536, lengths_of(4096, 8000, 65_536)
    many = lengths_of(100_000, 8000, 65_536, seed=1)
    plan, by_step = joint_plan(lengths, ranks, budget), joint_plan(lengths, ranks, budget, barrier="step")
    large = joint_plan(many, ranks, budget)
    over = sum(
        int((loads_of(made, of, ranks) > budget).sum())
        for made, of in ((plan, lengths), (by_step, lengths), (large, many))
    )
    seconds = seconds_in_turns(
        {
            "plan": lambda: joint_plan(lengths, ranks, budget),
            "step": lambda: joint_plan(lengths, ranks, budget, barrier="step"),
            "many": lambda: joint_plan(many, ranks, budget),
        },
        rounds,
    )
    return {
        "plan_over_budget": over,
        "plan_barrier_loss": barrier_loss(plan, lengths, ranks),
        "plan_100k_barrier_loss": barrier_loss(large, many, ranks),
        "plan_step_loss": imbalance(loads_of(by_step, lengths, ranks).sum(axis=0)) - 1,
        "plan_micro_steps": plan.num_micro_steps,
        "plan_ms": seconds["plan"] * 1e3,
        "plan_step_ms": seconds["step"] * 1e3,
        "plan_100k_seconds": seconds["many"],
    }


def loads_of(plan: JointPlan, lengths: Lengths, ranks: int) -> npt.NDArray[np.float64]:
    """[micro-step, rank] tokens."""
    place = plan.micro_step * ranks + plan.rank
    return np.bincount(place, weights=lengths, minlength=plan.num_micro_steps * ranks).reshape(-1, ranks)


def barrier_loss(plan: JointPlan, lengths: Lengths, ranks: int) -> float:
    """What ranks wait for each other where each micro-step is a barrier, in shares of the work."""
    return float(loads_of(plan, lengths, ranks).max(axis=1).sum() / (lengths.sum() / ranks) - 1)


def imbalance(loads: npt.NDArray[Any]) -> float:
    return float(loads.max() / loads.mean())
