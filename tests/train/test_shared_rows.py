"""Runs of rows that begin alike: nothing lost, nothing torn, and no better cut; what a step says that it saves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pekoe.pipeline.records import common_prefix
from pekoe.pipeline.train.engines.batch_tensors import batch_tensors
from pekoe.pipeline.train.engines.isolation import pack_tokens
from pekoe.pipeline.train.engines.shared_prefix import shared_layout
from pekoe.pipeline.train.shared_rows import SHORTEST, shared_rows
from pekoe.pipeline.train.sharing_figures import TokenWork, sharing_figures

CPU = torch.device("cpu")
ROWS = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=7)), max_size=7)


class OneRank:
    def sum(self, tensor):
        return tensor

    def max(self, tensor):
        return tensor


def laid_out(rows):
    """(tokens, cu_seqlens, groups) of (group, tokens), rows of a group next to each other."""
    rows = sorted(rows, key=lambda row: row[0])
    lengths = [len(tokens) for _, tokens in rows]
    flat = np.array([token for _, tokens in rows for token in tokens], dtype=np.int32)
    return flat, np.array([0, *itertools.accumulate(lengths)]), np.array([group for group, _ in rows], dtype=np.int64)


def most_saved(tokens, bounds, groups, shortest):
    """By trying every way to cut the rows."""
    rows = [tokens[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    best = 0
    for cuts in itertools.product([False, True], repeat=max(len(rows) - 1, 0)):
        saved, first = 0, 0
        for end in range(1, len(rows) + 1):
            if end < len(rows) and not cuts[end - 1]:
                continue
            part, first = rows[first:end], end
            if len({int(group) for group in groups[end - len(part) : end]}) > 1:
                saved = -1
                break
            length = 0
            while len({tuple(row[: length + 1]) for row in part}) == 1 and length + 1 < min(map(len, part)):
                length += 1
            saved += (len(part) - 1) * length if length >= shortest else 0
        best = max(best, saved)
    return best


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, shortest=st.integers(1, 3))
def test_runs_hold_every_row_in_order_and_save_most(rows, shortest):
    tokens, bounds, groups = laid_out(rows)
    runs = shared_rows(tokens, bounds, groups, shortest)
    assert [row for run in runs for row in range(run.first, run.end)] == list(range(len(rows)))
    for run in runs:
        begins = {tuple(tokens[bounds[row] :][: run.length].tolist()) for row in range(run.first, run.end)}
        assert len(begins) == 1
        assert len(set(groups[run.first : run.end].tolist())) == 1
        assert all(run.length < bounds[row + 1] - bounds[row] for row in range(run.first, run.end))
        assert (run.length == 0) == (run.end - run.first == 1)
    assert sum(run.saved for run in runs) == most_saved(tokens, bounds, groups, shortest)


def test_common_prefix_leaves_the_last_token():
    def of(*tokens):
        return np.array(tokens, dtype=np.int32)

    assert common_prefix(of(1, 2, 3), of(1, 2, 4)) == 2
    assert common_prefix(of(1, 2, 3), of(1, 2, 3)) == 2
    assert common_prefix(of(1, 2), of(1, 2, 3)) == 1
    assert common_prefix(of(1), of(1, 2)) == common_prefix(of(2, 2), of(1, 2)) == common_prefix(of(), of(1)) == 0


def batch_of(rows):
    """(group, tokens) of each row, in order."""
    batch = pack_tokens([np.array(tokens, dtype=np.int32) for _, tokens in rows])
    batch.groups[:] = [group for group, _ in rows]
    return batch


PROMPT = list(range(10, 10 + SHORTEST + 2))


def test_layout_places_every_token_where_an_equal_one_is_computed():
    rows = [(1, [*PROMPT, 1]), (1, [*PROMPT, 2, 3]), (2, [7, 8]), (3, [*PROMPT, 5]), (3, [*PROMPT, 5])]
    batch = batch_of(rows)
    tensors = batch_tensors(batch, CPU)
    layout = shared_layout(tensors)
    length = len(PROMPT)
    assert layout.tokens.tolist() == [*PROMPT, 1, 2, 3, 7, 8, *PROMPT, 5, 5]
    assert layout.packed.bounds == (
        0, length, length + 1, length + 3, length + 5, 2 * length + 5, 2 * length + 6, 2 * length + 7,
    )  # fmt: skip
    assert layout.packed.prompts == (0, 0, 0, 3, 4, 4, 4)
    assert torch.equal(layout.tokens[layout.slots], tensors["tokens"])
    assert torch.equal(layout.position_ids[layout.slots], tensors["position_ids"])
    assert layout.at(torch.tensor([length + 1, 0])).tolist() == [0, 0]
    assert layout.packed.max_keys == length + 2
    assert layout.packed.key_cu_seqlens.tolist()[:4] == [0, length, 2 * length + 1, 3 * length + 3]


def test_rows_without_anything_in_common_keep_the_plain_layout():
    tensors = batch_tensors(batch_of([(1, [*PROMPT, 1]), (2, [*PROMPT, 1]), (2, [9, *PROMPT])]), CPU)
    layout = shared_layout(tensors)
    assert layout.slots is None
    assert not layout.packed.shares
    assert torch.equal(layout.tokens, tensors["tokens"])


def test_figures_are_ratios_over_all_micro_batches():
    length = len(PROMPT)
    batches = [batch_of([(1, [*PROMPT, 1]), (1, [*PROMPT, 2])]), batch_of([(2, [1, 2, 3])]), batch_of([])]
    alone, tokens = length + 1, 2 * (length + 1) + 3
    by_tokens = sharing_figures(batches, TokenWork(per_token=2.0, per_pair=0.0, per_active=0.0), OneRank())
    assert by_tokens == {
        "train/tree_token_saving": pytest.approx(tokens / (tokens - length)),
        "train/tree_flop_saving": pytest.approx(tokens / (tokens - length)),
    }
    pairs = 2 * alone * (alone + 1) / 2 + 6
    by_pairs = sharing_figures(batches, TokenWork(0.0, 3.0, 0.0), OneRank())
    assert by_pairs["train/tree_flop_saving"] == pytest.approx(pairs / (pairs - length * (length + 1) / 2))
    only_last_layer = sharing_figures(batches, TokenWork(0.0, 0.0, 1.0), OneRank())
    assert only_last_layer["train/tree_flop_saving"] == 1.0
    assert sharing_figures([batch_of([])], TokenWork(1.0, 1.0, 1.0), OneRank()) == {}
