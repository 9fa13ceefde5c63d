"""Those parts of the vllm engine that need no vLLM: who enters the batch, which weights are a full set, its absence."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from pekoe.pipeline.registry import INFERENCE_ENGINES, resolve
from pekoe.pipeline.rollout.engine import EngineSettings, GenerationRequest, Instance, SamplingParameters
from pekoe.pipeline.rollout.engines.sequence_state import SequenceState
from pekoe.pipeline.rollout.engines.stop_check import StopCheck
from pekoe.pipeline.rollout.engines.vllm.batch_row import BatchRow
from pekoe.pipeline.rollout.engines.vllm.checkpoint_names import CheckpointNames
from pekoe.pipeline.rollout.engines.vllm.commands import Add, Remove
from pekoe.pipeline.rollout.engines.vllm.request_book import RequestBook


def sequence(outcomes: list, group: int = 0, sample: int = 0, min_version: int = 0) -> SequenceState:
    request = GenerationRequest((1, 2), group=group, sample=sample, min_version=min_version)
    return SequenceState(request, StopCheck(frozenset({9}), (), 0, 3, None), outcomes.append)


def entered(commands) -> list[tuple[int, int]]:
    adds = [command for command in commands if isinstance(command, Add)]
    return [(command.request.group, command.request.sample) for command in adds]


def test_places_go_in_order_of_arrival_to_those_whose_version_is_there():
    book = RequestBook(2, deterministic=False)
    outcomes: list = []
    book.waiting.extend([sequence(outcomes, 0, min_version=1), *(sequence(outcomes, i) for i in (1, 2, 3))])
    assert book.has_work(0)
    assert entered(book.changes(0)) == [(1, 0), (2, 0)]
    assert book.changes(0) == []
    ended = book.book([(1, 5, -0.5), (2, 9, -0.25)], lambda _: 0)
    assert [response.tokens.tolist() for _, response in ended] == [[9]]
    commands = book.changes(1)
    assert commands[0] == Remove((2,))
    assert entered(commands) == [(0, 0)]
    assert [s.request.group for s in book.waiting] == [3]
    assert outcomes == []


def test_nothing_enters_while_the_batch_drains_but_the_cancelled_leave():
    book = RequestBook(2, deterministic=False)
    book.waiting.extend(sequence([], i) for i in range(4))
    book.changes(0)
    book.active[1].cancelled = book.waiting[0].cancelled = book.any_cancelled = True
    assert book.changes(0, admit=False) == [Remove((1,))]
    assert [s.request.group for s in book.waiting] == [3]
    assert list(book.active) == [2]


def test_deterministic_means_one_at_a_time_and_the_lowest_first():
    book = RequestBook(8, deterministic=True)
    book.waiting.extend(sequence([], group, sample) for group, sample in ((2, 0), (1, 1), (1, 0)))
    assert entered(book.changes(0)) == [(1, 0)]
    assert book.changes(0) == []
    book.book([(1, 9, 0.0)], lambda _: 0)
    assert entered(book.changes(0)) == [(1, 1)]


def test_all_who_wait_are_told_when_the_engine_is_gone():
    book = RequestBook(1, deterministic=False)
    outcomes: list = []
    book.waiting.extend(sequence(outcomes, i) for i in range(3))
    book.changes(0)
    book.give_up(lambda: RuntimeError("gone"))
    assert len(outcomes) == 3
    assert not book.has_work(0)


def test_a_rows_number_does_not_change_until_its_token_is_there():
    request = GenerationRequest((1, 2), SamplingParameters(min_new_tokens=2), seed=5)
    row = BatchRow(Add(1, request, (8, 9), 10))
    first = row.uniform
    assert row.uniform == first
    assert row.forbidden == (8, 9)
    row.append(4)
    assert row.uniform != first
    row.append(5)
    assert row.forbidden == ()
    assert (row.tokens, row.room) == ([1, 2, 4, 5], 8)
    again = BatchRow(Add(7, request, (), 10))
    assert again.uniform == first


def test_a_full_set_of_weights_has_every_name_once(tiny_model):
    names = CheckpointNames(str(tiny_model), None)
    assert names.end_ids == {1}
    assert (names.vocabulary, names.positions) == (17, 128)
    weights = {name: torch.rand(shape) for name, shape in names.shapes.items()}
    with pytest.raises(ValueError, match=r"'lm_head\.weight' is tied to 'model\.embed_tokens\.weight'"):
        list(names.checked(weights.items()))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    assert [name for name, _ in names.checked(weights.items())] == list(weights)
    with pytest.raises(ValueError, match=r"1 of .* are missing: \['model.norm.weight'\]"):
        list(names.checked((k, v) for k, v in weights.items() if k != "model.norm.weight"))
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' was given twice"):
        list(names.checked([*weights.items(), ("model.norm.weight", weights["model.norm.weight"])]))
    with pytest.raises(ValueError, match="'other' is not in the model"):
        list(names.checked([("other", torch.zeros(1))]))


def test_without_vllm_a_build_says_how_to_get_it(tiny_model, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    engine = resolve(INFERENCE_ENGINES, "vllm", "rollout.backend")
    settings = EngineSettings(str(tiny_model), str(tiny_model), "float32", "cpu", 0, 4, 64)
    with pytest.raises(ValueError, match=r"needs vLLM, .* pip install 'pekoe\[vllm\]' .*setup_venv.sh vllm"):
        engine.build(settings, Instance(), None)
