"""From examples to labelled tokens: what is trained on, what is cut, what is dropped and why."""

from __future__ import annotations

import re

import numpy as np
import pytest
from chat_tokenizers import make_tokenizer

from pekoe.pipeline.data.encoder import EQUAL_SIDES, NO_LABEL, Encoder
from pekoe.pipeline.records import Example

END = "<|im_end|>"
CHAT = (
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi assistant"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hello, 日é"},
)
"""Contents repeat, in turns of both: a search for the text would find the wrong place."""


def example(messages=(), **data):
    return Example(0, "data/0", tuple(messages), data)


def encoder(tokenizer, limit=10_000, is_pair=False, **arguments):
    return Encoder(tokenizer, limit, is_pair, arguments)


def labelled_text(tokenizer, encoded, side=0):
    """The texts of consecutive labelled tokens."""
    tokens, labels = encoded.sequences[side]
    assert labels[0] == 0
    assert len(tokens) == len(labels)
    runs, open_run = [], []
    for token, label in [*zip(tokens.tolist(), labels.tolist(), strict=True), (0, 0)]:
        if label:
            open_run.append(token)
        elif open_run:
            runs.append(tokenizer.decode(open_run))
            open_run = []
    return runs


def test_every_turn_of_the_assistant_is_labelled_with_the_end_of_its_turn(templated):
    found = encoder(templated).encode(example(CHAT))
    first, last = labelled_text(templated, found)
    assert first.removeprefix(" ") == "hello" + END
    assert last.removeprefix("<think>\n\n</think>\n\n").removeprefix(" ") == "hello, 日é" + END
    tokens, labels = found.sequences[0]
    rendered = templated.apply_chat_template([dict(m) for m in CHAT], tokenize=True, return_dict=True)["input_ids"]
    assert tokens.tolist() == rendered[: len(tokens)]
    assert labels[-1] == 1
    assert templated.decode(rendered[len(tokens) :]).strip() == ""


def test_only_the_last_turn_is_labelled_when_asked_for(templated):
    (only,) = labelled_text(templated, encoder(templated, loss_on="last").encode(example(CHAT)))
    assert only.endswith("hello, 日é" + END)
    with pytest.raises(ValueError, match=r"loss_on.*all, last"):
        encoder(templated, loss_on="first")


def test_labels_begin_where_sampling_would(chatml):
    """The tokens before the answer are those that a prompt for it has."""
    from pekoe.pipeline.prompts import prompt_ids

    tokens, labels = encoder(chatml, loss_on="last").encode(example(CHAT)).sequences[0]
    assert tokens[: int(np.argmax(labels))].tolist() == prompt_ids(chatml, CHAT[:-1])


def test_template_arguments_reach_the_template(plain):
    tokenizer = make_tokenizer("{% for m in messages %}{{ mark }}{{ m['content'] }}<|im_end|>{% endfor %}")
    found = encoder(tokenizer, template_args={"mark": "#"}).encode(example(CHAT[-2:]))
    assert tokenizer.decode(found.sequences[0][0]) == "#hello<|im_end|>#hello, 日é<|im_end|>"
    assert labelled_text(tokenizer, found) == ["#hello, 日é" + END]


def test_a_template_that_hides_where_a_turn_lies_is_refused():
    tokenizer = make_tokenizer("{% for m in messages | reverse %}{{ m['content'] | upper }}{% endfor %}")
    with pytest.raises(ValueError, match=r"data/0.*chat template.*message 2"):
        encoder(tokenizer).encode(example(CHAT))


STRICT = (
    "{% if messages | length == 1 and messages[0]['role'] == 'system' %}"
    "{{ raise_exception('no user query') }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('tool is not a role') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}"
    "{% if messages[-1]['role'] != 'user' %}{{ raise_exception('the user comes first') }}{% endif %}"
    "<|im_start|>assistant\n{% endif %}"
)


def test_what_the_template_refuses_is_an_error_that_names_the_example():
    with pytest.raises(ValueError, match=r"example data/0: chat template: it refuses.*tool is not a role"):
        encoder(make_tokenizer(STRICT)).encode(example([*CHAT, {"role": "tool", "content": "4"}]))


def test_a_legal_chat_whose_beginnings_the_template_refuses_is_labelled():
    """The assistant speaks right after the system message, and twice in a row."""
    tokenizer = make_tokenizer(STRICT)
    chat = (CHAT[0], CHAT[2], CHAT[1], CHAT[2], CHAT[4])
    found = labelled_text(tokenizer, encoder(tokenizer).encode(example(chat)))
    assert found == ["hello" + END, "hello" + END, "hello, 日é" + END]


def joined(template, pattern):
    """A tokenizer with what the pattern matches as one token."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    tokenizer = make_tokenizer(template)
    tokenizer.backend_tokenizer.pre_tokenizer = Split(Regex(pattern + r"|[\s\S]"), "isolated")
    return tokenizer


TEAM = (
    "{% for m in messages %}{{ m['role'] }}:{{ gap }}{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{{ gap }}{% endif %}"
)
"""No mark ends a turn, no special token stands around it."""
TALK = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "so."}, {"role": "user", "content": "hi"})


@pytest.mark.parametrize(("pattern", "labelled"), [(" so", [" so", ".", "\n"]), (r"\.\n", ["s", "o", ".\n"])])
def test_a_token_with_white_space_around_a_turn_is_labelled(pattern, labelled):
    tokenizer = joined(TEAM, pattern)
    _, labels = encoder(tokenizer, template_args={"gap": " "}).encode(example(TALK)).sequences[0]
    opening = len("user: hi\nassistant:") + (pattern != " so")
    assert labels.tolist() == [0] * opening + [1] * len(labelled)


@pytest.mark.parametrize(
    ("pattern", "token"), [(":so", ":so"), (r"\.\nuser", r".\nuser")], ids=["at its beginning", "at its end"]
)
def test_a_token_that_is_partly_a_turn_and_partly_the_template_is_refused(pattern, token):
    with pytest.raises(ValueError, match=re.escape(f"example data/0: the token '{token}' is partly the assistant's")):
        encoder(joined(TEAM, pattern), template_args={"gap": ""}).encode(example(TALK))


def test_spaces_keep_their_labels_where_the_tokenizer_trims_offsets():
    from tokenizers.processors import ByteLevel

    tokenizer = make_tokenizer(TEAM.replace("\n", "<|im_end|>"))
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    chat = (CHAT[1], {"role": "assistant", "content": "a  b "})
    found = encoder(tokenizer, template_args={"gap": " "}).encode(example(chat))
    assert labelled_text(tokenizer, found) == ["a  b " + END]


def test_without_a_chat_template_a_chat_has_one_answer(plain):
    found = encoder(plain).encode(example(CHAT[1:3]))
    assert plain.decode(found.sequences[0][0]) == "hi assistanthello" + END
    assert labelled_text(plain, found) == ["hello" + END]
    with pytest.raises(ValueError, match="chat template"):
        encoder(plain).encode(example(CHAT))


def test_text_is_taken_as_it_is(chatml):
    found = encoder(chatml).encode(example(prompt="1+1=", completion="2\n\nHuman: no"))
    assert chatml.decode(found.sequences[0][0]) == "1+1=2\n\nHuman: no" + END
    assert labelled_text(chatml, found) == ["2\n\nHuman: no" + END]


def test_prompt_and_completion_may_be_messages(chatml):
    found = encoder(chatml).encode(example(CHAT[:4], completion=CHAT[4:]))
    assert labelled_text(chatml, found) == ["hello, 日é" + END]


def test_prompt_20_answer_5_limit_16_is_dropped_and_counted(plain):
    """An answer that the limit takes away whole leaves nothing to learn; half an answer is still one."""
    long = encoder(plain, limit=16).encode(example(prompt="x" * 20, completion="abcde"))
    assert (long.sequences, long.dropped, long.num_truncated) == ((), NO_LABEL, 1)
    half = encoder(plain, limit=16).encode(example(prompt="x" * 13, completion="abcde"))
    assert (half.dropped, half.num_truncated) == ("", 1)
    assert labelled_text(plain, half) == ["abc"]
    fits = encoder(plain, limit=26).encode(example(prompt="x" * 20, completion="abcde"))
    assert (fits.dropped, fits.num_truncated) == ("", 0)


def test_the_first_token_is_never_labelled(plain):
    found = encoder(plain).encode(example(prompt="", completion="ab"))
    assert found.sequences[0][1].tolist() == [0, 1, 1]
    endless = make_tokenizer(None)
    endless.eos_token = None
    assert encoder(endless).encode(example(prompt="", completion="a")).dropped == NO_LABEL


def test_both_sides_of_a_pair_share_their_prompt(chatml):
    pair = example(CHAT[:2], chosen=CHAT[2:3], rejected=({"role": "assistant", "content": "go away"},))
    found = encoder(chatml, is_pair=True).encode(pair)
    assert labelled_text(chatml, found, 0) == ["hello" + END]
    assert labelled_text(chatml, found, 1) == ["go away" + END]
    prompts = [tokens[: int(np.argmax(labels))].tolist() for tokens, labels in found.sequences]
    assert prompts[0] == prompts[1]
    assert all(labels[-1] == 1 for _, labels in found.sequences)


def test_the_last_token_of_a_side_is_what_its_answer_ends_with(templated):
    """A reward model scores there: the same token that sampling ends with, not what the template puts behind."""
    pair = example(CHAT[:2], chosen=CHAT[2:3], rejected=({"role": "assistant", "content": "no"},))
    for tokens, _ in encoder(templated, is_pair=True).encode(pair).sequences:
        assert tokens[-1] == templated.convert_tokens_to_ids(END)


def test_a_pair_is_dropped_whole_when_one_side_is(plain):
    pair = example(prompt="x" * 5, chosen="y" * 5, rejected="z")
    assert encoder(plain, limit=6, is_pair=True).encode(pair).dropped == ""
    assert encoder(plain, limit=5, is_pair=True).encode(pair).dropped == NO_LABEL
    torn = example(prompt="", chosen="", rejected="zz")
    assert encoder(plain, is_pair=True).encode(torn).dropped == NO_LABEL


def test_a_pair_that_the_limit_makes_equal_is_dropped(plain):
    pair = example(prompt="x", chosen="same, then good", rejected="same, then bad")
    found = encoder(plain, limit=6, is_pair=True).encode(pair)
    assert (found.dropped, found.num_truncated) == (EQUAL_SIDES, 2)
    assert encoder(plain, is_pair=True).encode(pair).dropped == ""


def test_people_in_a_side_are_not_labelled(plain):
    side = " first\n\nHuman: and?\n\nAssistant: second"
    pair = example(prompt="\n\nHuman: q\n\nAssistant:", chosen=side, rejected=" no")
    found = encoder(plain, is_pair=True).encode(pair)
    assert labelled_text(plain, found, 0) == [" first", " second" + END]
    assert plain.decode(found.sequences[0][0]) == f"\n\nHuman: q\n\nAssistant:{side}{END}"


def test_an_example_of_the_wrong_kind_is_refused_by_name(plain):
    with pytest.raises(ValueError, match=r"data/0.*preferences"):
        encoder(plain, is_pair=True).encode(example(prompt="a", completion="b"))
    with pytest.raises(ValueError, match=r"data/0.*nothing to learn"):
        encoder(plain).encode(example(CHAT[:2]))
