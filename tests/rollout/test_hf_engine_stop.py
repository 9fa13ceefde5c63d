"""When a completion ends: end tokens, stop tokens and strings, the least and the most tokens, the context limit."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

from pekoe.pipeline.records import Finish
from pekoe.pipeline.rollout.engines.stop_check import StopCheck

WORDS = ["ab", "END", "xENDy", "EN"]


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level: WORDS as tokens of their own, then every single byte."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids = {token: i for i, token in enumerate([*WORDS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core = Tokenizer(token_models.BPE(vocab=ids, merges=[]))
    core.pre_tokenizer = level
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def greedy(harness, engine, make_request, prompt, **fields):
    return harness.generate(engine, [make_request(prompt, greedy=True, **{"max_new_tokens": 30} | fields)])[0]


def test_end_tokens_of_the_model_and_stop_tokens_of_the_request(models, harness, make_request, prompts):
    free = greedy(harness, harness.engine(models.build()), make_request, prompts[1]).tokens.tolist()
    target = next(i for i in range(5, 30) if free[i] not in free[:i])
    model = models.build(eos_token_id=[95, free[target]])
    stopped = greedy(harness, harness.engine(model), make_request, prompts[1])
    assert stopped.tokens.tolist() == free[: target + 1]
    assert stopped.finish == Finish.STOP
    asked = greedy(harness, harness.engine(models.build()), make_request, prompts[1], stop_token_ids=(free[target],))
    assert asked.tokens.tolist() == free[: target + 1]
    assert asked.finish == Finish.STOP
    exact = greedy(harness, harness.engine(model), make_request, prompts[1], max_new_tokens=target + 1)
    assert exact.finish == Finish.STOP


def test_no_stop_token_before_the_least_number_and_logprobs_of_the_full_distribution(
    models, harness, make_request, prompts
):
    model = models.build()
    free = greedy(harness, harness.engine(model), make_request, prompts[1]).tokens.tolist()
    stops = tuple(set(free[:10]))
    response = greedy(harness, harness.engine(model), make_request, prompts[1], stop_token_ids=stops, min_new_tokens=6)
    assert not set(response.tokens[:6].tolist()) & set(stops)
    wanted = models.logprobs(model, [*prompts[1], *response.tokens])[len(prompts[1]) :]
    assert abs(response.logprobs - wanted).max() < 1e-5
    sampled = harness.generate(
        harness.engine(model),
        [
            make_request(prompts[1], seed=i, max_new_tokens=9, stop_token_ids=tuple(range(60)), min_new_tokens=4)
            for i in range(8)
        ],
    )  # fmt: skip
    for one in sampled:
        assert min(one.tokens[:4].tolist()) >= 60


@pytest.mark.parametrize("room", [1, 2])
def test_most_tokens_and_context_limit(models, harness, make_request, prompts, room):
    engine = harness.engine(models.build(), context_limit=40)
    by_count = greedy(harness, engine, make_request, prompts[1], max_new_tokens=room)
    by_context = greedy(harness, engine, make_request, [1] * (40 - room))
    assert len(by_count.tokens) == len(by_context.tokens) == room
    assert by_count.finish == by_context.finish == Finish.LENGTH


def test_no_room_gives_an_empty_answer(models, harness, make_request):
    engine = harness.engine(models.build(), context_limit=40)
    for length, most in ((40, 5), (41, 5), (90, 5), (3, 0)):
        response = greedy(harness, engine, make_request, [1] * length, max_new_tokens=most)
        assert len(response.tokens) == len(response.logprobs) == len(response.versions) == 0
        assert response.finish == Finish.LENGTH
    assert engine.gauges()["steps"] == 0


def test_stop_strings_on_the_engine(models, harness, make_request, prompts, tokenizer):
    model = models.build()
    engine = harness.engine(model, tokenizer=tokenizer)
    free = greedy(harness, engine, make_request, prompts[1]).tokens.tolist()
    text = tokenizer.decode(free, clean_up_tokenization_spaces=False)
    tried = 0
    for start in range(0, len(text) - 3, 2):
        string = text[start : start + 3]
        if "\ufffd" in string:
            continue
        tried += 1
        response = greedy(harness, engine, make_request, prompts[1], stop=("never there", string))
        kept = response.tokens.tolist()
        assert kept == free[: len(kept)]
        assert response.finish == Finish.STOP
        assert string in tokenizer.decode(kept, clean_up_tokenization_spaces=False)
        assert string not in tokenizer.decode(kept[:-1], clean_up_tokenization_spaces=False)
    assert tried >= 3


def check_with(tokenizer, strings, minimum=0):
    def decode(ids):
        return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

    return StopCheck(frozenset(), strings, minimum, 1000, decode)


def first_stop(check, ids):
    return next((i for i in range(1, len(ids) + 1) if check.finish(ids[:i]) is not None), None)


def test_stop_string_inside_and_across_tokens(tokenizer):
    token = {tokenizer.decode([i]): i for i in range(len(tokenizer))}
    a, b, end, inside, first, last = (token[w] for w in ("a", "b", "END", "xENDy", "EN", "D"))
    assert first_stop(check_with(tokenizer, ["END"]), [a, b, end, b]) == 3
    assert first_stop(check_with(tokenizer, ["END"]), [a, inside, b]) == 2
    assert first_stop(check_with(tokenizer, ["END"]), [a, first, last, b]) == 3
    assert first_stop(check_with(tokenizer, ["END"]), [a, first, b, last]) is None
    assert first_stop(check_with(tokenizer, ["ba", "END"]), [a, b, a, end]) == 3
    assert first_stop(check_with(tokenizer, ["aaaaaaaaaaaab"]), [a] * 40 + [b]) == 41


def test_stop_string_of_several_bytes_per_character(tokenizer):
    ids = tokenizer.encode("aé€b€")
    assert len(ids) == 1 + 2 + 3 + 1 + 3
    assert first_stop(check_with(tokenizer, ["é"]), ids) == 3
    assert first_stop(check_with(tokenizer, ["€"]), ids) == 6
    assert first_stop(check_with(tokenizer, ["b€"]), ids) == 10
    assert first_stop(check_with(tokenizer, ["€"], minimum=7), ids) == 10


def test_a_string_completed_before_the_least_number_does_not_count_later(tokenizer):
    token = {tokenizer.decode([i]): i for i in range(len(tokenizer))}
    a, end = token["a"], token["END"]
    assert first_stop(check_with(tokenizer, ["END"], minimum=3), [a, end, a, a, a, end, a]) == 6
    assert first_stop(check_with(tokenizer, ["END"], minimum=2), [a, end, a]) == 2


def test_empty_stop_string_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"gconfig.stop: an empty string"):
        check_with(tokenizer, ["a", ""])
