"""Which rows a step trains on: a pure function of seed, epoch and step, the same on any number of ranks."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from pekoe.pipeline.config.actor import MicroBatchConfig
from pekoe.pipeline.config.dataset import DatasetConfig
from pekoe.pipeline.data.dataset import build
from pekoe.pipeline.data.encoder import Encoder
from pekoe.pipeline.records import epoch_and_position
from pekoe.pipeline.runs.supervised_rows import EpochOrder, RowPlanner, RowSource

LIMIT = 12


class ThreadRanks:
    """Ranks that are threads of this process and gather through a list."""

    def __init__(self, size):
        self.size = size
        self.parts = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def of(self, rank):
        outer = self

        class One:
            def gather(self, array):
                outer.parts[rank] = array
                outer.barrier.wait()
                found = np.concatenate(outer.parts)
                outer.barrier.wait()
                return found

        return One()


def planned(source_of, size, sides, examples, tokens=40, sequences=None):
    """RankRows of each of `size` ranks, which work at the same time."""
    ranks, found, failures = ThreadRanks(size), [None] * size, []

    def work(rank):
        try:
            budget = MicroBatchConfig(max_tokens_per_mb=tokens, max_sequences_per_mb=sequences)
            found[rank] = RowPlanner(ranks.of(rank), rank, size, sides, budget).rows(source_of(), examples)
        except BaseException as error:
            failures.append(error)
            ranks.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    if failures:
        raise failures[0]
    return found


@pytest.fixture
def sources(tmp_path, plain):
    """Functions that make a source of demonstrations, and one of pairs; every fifth example has no label left."""
    long = "x" * LIMIT
    texts = [(long if i % 5 == 4 else "x" * (1 + i % 4), "abcdefgh"[: 1 + i % 7]) for i in range(20)]
    files = {
        "demonstrations": [{"prompt": prompt, "completion": answer} for prompt, answer in texts],
        "preferences": [{"prompt": prompt, "chosen": answer, "rejected": f"{answer}z"} for prompt, answer in texts],
    }
    made = {}
    for kind, rows in files.items():
        path = tmp_path / f"{kind}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        dataset = build(DatasetConfig(type=kind, path=str(path)))
        made[kind] = lambda dataset=dataset, kind=kind: RowSource(
            dataset, Encoder(plain, LIMIT, kind == "preferences", {}), 7
        )
    return made


def keys(rows):
    """(example, side, tokens) of every sequence on one rank."""
    found = []
    for batch in rows.batches:
        for i, (group, side) in enumerate(zip(batch.groups.tolist(), batch.samples.tolist(), strict=True)):
            start, end = batch.cu_seqlens[i : i + 2]
            found.append((group, side, tuple(batch.tokens[start:end].tolist())))
    return found


@pytest.mark.parametrize(("kind", "sides"), [("demonstrations", 1), ("preferences", 2)])
@pytest.mark.parametrize("size", [1, 2, 3, 25])
def test_every_number_of_ranks_trains_on_the_same_rows(sources, kind, sides, size):
    examples = [(example, example) for example in range(20)]
    (one,) = planned(sources[kind], 1, sides, examples)
    found = planned(sources[kind], size, sides, examples)
    assert sorted(key for rows in found for key in keys(rows)) == sorted(keys(one))
    assert len({len(rows.batches) for rows in found}) == 1
    for rows in found:
        assert (rows.num_labels, rows.num_examples, rows.figures) == (one.num_labels, one.num_examples, one.figures)
        assert all(batch.num_tokens <= 40 for batch in rows.batches)
        for batch in rows.batches:
            assert batch.num_sequences % sides == 0
            assert batch.samples.tolist() == list(range(sides)) * (batch.num_sequences // sides)
            if sides == 2:
                assert (batch.groups[0::2] == batch.groups[1::2]).all()
    assert one.num_examples == 16
    assert one.figures["rows/dropped_no_label"] == 4
    labels = sum(int(batch.loss_mask.sum()) for rows in found for batch in rows.batches)
    assert labels == one.num_labels == sum(int(batch.loss_mask.sum()) for batch in one.batches)


def test_a_batch_without_a_row_that_trains_is_empty_on_every_rank(sources):
    found = planned(sources["preferences"], 2, 2, [(4, 4), (9, 9)])
    for rows in found:
        assert rows.batches == []
        assert (rows.num_labels, rows.num_examples) == (0, 0)
        assert rows.figures["rows/dropped_no_label"] == 2


def test_one_bad_row_beside_a_good_one_leaves_the_good_one(sources):
    (rows,) = planned(sources["demonstrations"], 1, 1, [(4, 4), (0, 0)])
    assert [key[0] for key in keys(rows)] == [0]
    assert rows.num_labels == 2


def test_pairs_count_in_sequences_against_the_limit_of_a_micro_batch(sources):
    found = planned(sources["preferences"], 2, 2, [(i, i) for i in range(8)], tokens=1000, sequences=3)
    assert all(batch.num_sequences <= 2 for rows in found for batch in rows.batches)


def test_steps_take_each_example_once_an_epoch_without_gaps():
    order = EpochOrder(10, 4, epochs=3, seed=7, shuffle=True)
    steps = [order.of_step(version) for version in range(9)]
    assert [len(step) for step in steps] == [4] * 7 + [2, 0]
    flat = [item for step in steps for item in step]
    assert [epoch_and_position(group) for group, _ in flat] == [(e, p) for e in range(3) for p in range(10)]
    per_epoch = [[example for _, example in flat[start : start + 10]] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in per_epoch)
    assert len({tuple(epoch) for epoch in per_epoch}) == 3
    fresh = EpochOrder(10, 4, epochs=3, seed=7, shuffle=True)
    assert [fresh.of_step(version) for version in reversed(range(9))] == steps[::-1]
    plain_order = EpochOrder(10, 4, epochs=1, seed=7, shuffle=False)
    assert [example for version in range(3) for _, example in plain_order.of_step(version)] == list(range(10))


def test_an_example_that_cannot_be_encoded_ends_the_step_with_its_name(sources):
    with pytest.raises(ValueError, match=r"demonstrations/3.*preferences"):
        planned(lambda: _as_pairs(sources["demonstrations"]()), 1, 2, [(3, 3)])


def _as_pairs(source):
    source._encoder._is_pair = True
    return source
