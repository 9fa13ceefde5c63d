from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pekoe.pipeline.config.dataset import DatasetConfig
from pekoe.pipeline.data.dataset import build, filter_by_length
from pekoe.pipeline.data.reasoning_gym_dataset import task_seed
from pekoe.pipeline.prompts import prompt_ids

ROWS = [
    {"question": "What is 1 + 1?", "answer": "It is <<1+1=2>>2.\n#### 2"},
    {"question": "How many {things}?", "answer": "Many.\n#### 1,234"},
    {"question": "Cold?", "answer": "Below zero.\n#### -5"},
]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def word_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    words = ["[UNK]", "<user>", "<system>", "<assistant>", "What", "is", "1", "+", "Cold", "?"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("layout", ["file", "folder", "hub", "parquet_folder", "saved", "saved_dict"])
def test_gsm8k_reads_every_layout_alike(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    table = datasets.Dataset.from_list(ROWS)
    if layout == "file":
        write_lines(path, ROWS)
    elif layout == "folder":
        path.mkdir()
        write_lines(path / "train.jsonl", ROWS)
        write_lines(path / "test.jsonl", ROWS[:1])
    elif layout == "hub":
        for subset, rows in (("main", ROWS), ("socratic", ROWS[:1])):
            (path / subset).mkdir(parents=True)
            datasets.Dataset.from_list(rows).to_parquet(path / subset / "train-00000-of-00001.parquet")
    elif layout == "parquet_folder":
        path.mkdir()
        table.select([0, 1]).to_parquet(path / "train-00000-of-00002.parquet")
        table.select([2]).to_parquet(path / "train-00001-of-00002.parquet")
    elif layout == "saved":
        table.save_to_disk(str(path))
    else:
        datasets.DatasetDict({"train": table}).save_to_disk(str(path))
    dataset = build(DatasetConfig(type="gsm8k", path=str(path)))
    assert len(dataset) == 3
    assert [dataset[i].data for i in range(3)] == [{"answer": "2"}, {"answer": "1234"}, {"answer": "-5"}]
    assert dataset[1].messages == ({"role": "user", "content": "How many {things}?"},)
    assert dataset[2].name == "gsm8k/train/2"


def test_template_system_prompt_and_size_are_applied(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ROWS)
    config = DatasetConfig(
        type="gsm8k",
        path=str(tmp_path / "a.jsonl"),
        size=2,
        prompt_template="{question} Answer in \\boxed{}.",
        system_prompt="Be brief.",
    )
    dataset = build(config)
    assert len(dataset) == 2
    assert dataset[1].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many {things}? Answer in \\boxed{}."},
    )
    with pytest.raises(IndexError):
        dataset[2]


def test_jsonl_takes_chats_prompts_and_questions_and_passes_the_rest(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "v"},
    ]
    rows = [
        {"messages": chat, "answer": "1", "level": 3},
        {"prompt": "p", "question": "ignored", "answer": "2"},
        {"prompt": [{"role": "user", "content": "q"}]},
        {"question": "r", "tests": ["x"]},
    ]
    write_lines(tmp_path / "mine.jsonl", rows)
    dataset = build(DatasetConfig(type="jsonl", path=str(tmp_path / "mine.jsonl"), prompt_template="<{question}>"))
    assert [m["content"] for m in dataset[0].messages] == ["s", "u", "a", "<v>"]
    assert dataset[0].data == {"answer": "1", "level": 3}
    assert dataset[1].messages == ({"role": "user", "content": "<p>"},)
    assert dataset[1].data == {"answer": "2"}
    assert dataset[3].data == {"tests": ["x"]}
    assert dataset[3].name == "mine/3"


def test_jsonl_prompt_key(tmp_path: Path) -> None:
    write_lines(tmp_path / "m.jsonl", [{"problem": "1+1", "solution": "2"}])
    dataset = build(DatasetConfig(type="jsonl", path=str(tmp_path / "m.jsonl"), args={"prompt_key": "problem"}))
    assert dataset[0].messages[0]["content"] == "1+1"
    assert dataset[0].data == {"solution": "2"}


@pytest.mark.parametrize("task", ["countdown", "basic_arithmetic", "gsm_symbolic"])
def test_reasoning_gym_is_deterministic_and_splits_differ(task: str) -> None:
    first, again, other = (
        build(DatasetConfig(type="reasoning_gym", path=task, size=40, seed=seed)) for seed in (1, 1, 2)
    )
    rows = [first[i] for i in range(40)]
    assert rows == [again[i] for i in range(40)]
    prompts = {row.messages[-1]["content"] for row in rows}
    assert len(prompts & {other[i].messages[-1]["content"] for i in range(40)}) < 10
    assert rows[3].data["task"] == task
    assert rows[3].name == f"{task}/1/3"


def test_neighbouring_seeds_of_a_task_lie_far_apart() -> None:
    seeds = sorted(task_seed(seed) for seed in range(50))
    assert min(b - a for a, b in itertools.pairwise(seeds)) > 10_000_000
    assert max(seeds) < 2**31


def test_reasoning_gym_options_reach_the_task() -> None:
    config = DatasetConfig(
        type="reasoning_gym", path="basic_arithmetic", size=5, args={"min_terms": 2, "max_terms": 2, "max_digits": 1}
    )
    dataset = build(config)
    assert dataset[0].data["options"] == {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    assert all(dataset[i].data["metadata"]["num_terms"] == 2 for i in range(5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "nowhere.jsonl"}, "train_dataset: path: 'nowhere.jsonl' does not exist"),
        ({"type": "gms8k"}, "train_dataset.type: 'gms8k' is not known .did you mean 'gsm8k'"),
        ({"prompt_template": "no place"}, "train_dataset.prompt_template: 'no place' does not contain {question}"),
        ({"args": {"sub": 1}}, "args: \\['sub'\\] not known for gsm8k; allowed: subset"),
        ({"type": "reasoning_gym", "path": "countdwn", "size": 3}, "did you mean 'countdown'"),
        ({"type": "reasoning_gym", "path": "countdown"}, "size: a generated dataset needs a number"),
        (
            {"type": "reasoning_gym", "path": "countdown", "size": 3, "args": {"nonsense": 1}},
            "args: .*nonsense.* do not suit the task 'countdown'",
        ),
    ],
)
def test_mistakes_name_the_key(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ROWS)
    settings = {"type": "gsm8k", "path": str(tmp_path / "a.jsonl"), **change}
    with pytest.raises(ValueError, match=message):
        build(DatasetConfig(**settings))


def test_broken_rows_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n{"question": \n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2 is not JSON"):
        build(DatasetConfig(type="gsm8k", path=str(tmp_path / "bad.jsonl")))
    write_lines(tmp_path / "no_mark.jsonl", [ROWS[0], {"question": "a", "answer": "5"}])
    with pytest.raises(ValueError, match=r"row 1 of .* lacks a question or an answer with ####"):
        build(DatasetConfig(type="gsm8k", path=str(tmp_path / "no_mark.jsonl")))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no example"):
        build(DatasetConfig(type="jsonl", path=str(tmp_path / "empty.jsonl")))
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="has no split 'validation'"):
        build(DatasetConfig(type="jsonl", path=str(tmp_path / "folder"), split="validation"))


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ROWS)
    dataset = build(DatasetConfig(type="gsm8k", path=str(tmp_path / "a.jsonl")))
    tokenizer = word_tokenizer(TEMPLATE)
    assert [len(prompt_ids(tokenizer, dataset[i].messages)) for i in range(3)] == [7, 5, 3]
    kept, num_left_out = filter_by_length(dataset, tokenizer, 5)
    assert num_left_out == 1
    assert [(kept[i].index, kept[i].name) for i in range(len(kept))] == [(0, "gsm8k/train/1"), (1, "gsm8k/train/2")]
    assert filter_by_length(dataset, tokenizer, 7) == (dataset, 0)
    with pytest.raises(ValueError, match="max_length: 2 leaves no example; the shortest prompt has 3 tokens"):
        filter_by_length(dataset, tokenizer, 2)


def test_without_a_chat_template_the_contents_are_joined(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "What is"}, {"role": "user", "content": "1 + 1"}]
    assert prompt_ids(word_tokenizer(None), messages) == [4, 5, 6, 7, 6]
    assert prompt_ids(word_tokenizer(TEMPLATE), messages) == [2, 4, 5, 1, 6, 7, 6, 3]
