"""Demonstrations and preferences from disk: the shapes of their rows, and what is refused."""

from __future__ import annotations

import json

import pytest

from pekoe.pipeline.config.dataset import DatasetConfig
from pekoe.pipeline.data.dataset import build

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
OTHER = {"role": "assistant", "content": "b"}
DIALOGUE = "\n\nHuman: q1\n\nAssistant: a1\n\nHuman: q2\n\nAssistant:"


def dataset(tmp_path, rows, kind, **more):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build(DatasetConfig(type=kind, path=str(path), **more))


def test_demonstrations_are_chats_or_completed_prompts(tmp_path):
    rows = [
        {"messages": [USER, {**ANSWER, "extra": 1}]},
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": [USER], "completion": [ANSWER]},
    ]
    found = dataset(tmp_path, rows, "demonstrations")
    assert found[0].messages == (USER, ANSWER)
    assert found[0].data == {}
    assert (found[1].messages, found[1].data) == ((), {"prompt": "1+1=", "completion": "2"})
    assert (found[2].messages, found[2].data) == ((USER,), {"completion": (ANSWER,)})
    assert found[2].name == "rows/2"


@pytest.mark.parametrize("row", [{"prompt": "a"}, {"messages": []}, {"messages": ["x"]}, {"completion": "b"}])
def test_other_rows_are_refused_with_their_number(tmp_path, row):
    with pytest.raises(ValueError, match="row 1"):
        dataset(tmp_path, [{"prompt": "a", "completion": "b"}, row], "demonstrations")


def test_hh_rows_part_after_their_last_common_opening(tmp_path):
    rows = [{"chosen": DIALOGUE + " yes", "rejected": DIALOGUE + " yes, but"}]
    found = dataset(tmp_path, rows, "preferences")[0]
    assert found.data == {"prompt": DIALOGUE, "chosen": " yes", "rejected": " yes, but"}
    early = {
        "chosen": "\n\nHuman: q\n\nAssistant: a\n\nHuman: x\n\nAssistant: y",
        "rejected": "\n\nHuman: q\n\nAssistant: b",
    }
    found = dataset(tmp_path, [early], "preferences")[0]
    assert found.data["prompt"] == "\n\nHuman: q\n\nAssistant:"
    assert found.data["chosen"] == " a\n\nHuman: x\n\nAssistant: y"


def test_an_opening_that_only_one_side_has_is_no_part_of_the_prompt(tmp_path):
    rows = [{"chosen": DIALOGUE + " a\n\nAssistant: b", "rejected": DIALOGUE + " a\n\nAssistant"}]
    assert dataset(tmp_path, rows, "preferences")[0].data["prompt"] == DIALOGUE


def test_hh_rows_become_chats_when_asked_for(tmp_path):
    rows = [{"chosen": DIALOGUE + " yes", "rejected": DIALOGUE + " no"}]
    found = dataset(tmp_path, rows, "preferences", args={"dialogue": "chat"}, system_prompt="be kind")[0]
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "user"]
    assert found.messages[-1]["content"] == "q2"
    assert found.data == {
        "chosen": ({"role": "assistant", "content": "yes"},), "rejected": ({"role": "assistant", "content": "no"},),
    }  # fmt: skip


def test_prompts_of_pairs_are_text_or_messages(tmp_path):
    rows = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
    ]
    found = dataset(tmp_path, rows, "preferences")
    assert found[0].data == {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    for example in (found[1], found[2]):
        assert (example.messages, example.data) == ((USER,), {"chosen": (ANSWER,), "rejected": (OTHER,)})


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"chosen": "a"}, "chosen and rejected"),
        ({"chosen": "yes", "rejected": "no"}, "Assistant:"),
        ({"chosen": [USER, ANSWER], "rejected": [OTHER, ANSWER]}, "common first message"),
        ({"prompt": "a", "chosen": [ANSWER], "rejected": [OTHER]}, "all text or all messages"),
    ],
)
def test_pairs_without_a_prompt_are_refused(tmp_path, row, text):
    with pytest.raises(ValueError, match=f"row 0.*{text}"):
        dataset(tmp_path, [row], "preferences")


def test_arguments_and_system_prompts_are_checked(tmp_path):
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    with pytest.raises(ValueError, match=r"dialogue.*text, chat"):
        dataset(tmp_path, [row], "preferences", args={"dialogue": "poem"})
    with pytest.raises(ValueError, match=r"kind.*allowed: subset, loss_on"):
        dataset(tmp_path, [{"messages": [USER, ANSWER]}], "demonstrations", args={"kind": 1})
    with pytest.raises(ValueError, match="system_prompt"):
        dataset(tmp_path, [row], "preferences", system_prompt="be kind")
