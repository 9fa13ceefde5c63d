"""The quickstart's model maker: solutions, tokenizer, split, and that a second run changes nothing."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_maker", ROOT / "scripts" / "make_quickstart_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("problem", "right", "forgetful"),
    [
        ((47, 85), "12 13 #### 132", "12 12 #### 22"),
        ((11, 22), "3 3 #### 33", "3 3 #### 33"),
        ((99, 99), "18 19 #### 198", "18 18 #### 88"),
        ((15, 95), "10 11 #### 110", "10 10 #### 0"),
    ],
)
def test_solutions(maker: ModuleType, problem: tuple[int, int], right: str, forgetful: str) -> None:
    assert "".join(maker.solution(problem, forgets_carries=False)) == right
    assert "".join(maker.solution(problem, forgets_carries=True)) == forgetful


def test_solutions_fit_and_survive_the_tokenizer_and_please_the_reward(maker: ModuleType) -> None:
    from pekoe.pipeline.reward.gsm8k_reward import gsm8k_reward

    tokenizer = maker.make_tokenizer()
    for a in range(10, 100, 7):
        for b in range(10, 100):
            ids = tokenizer.convert_tokens_to_ids([*maker.solution((a, b), False), "<eos>"])
            assert tokenizer.unk_token_id not in ids
            assert len(ids) <= maker.MAX_NEW_TOKENS
            text = tokenizer.decode(ids, skip_special_tokens=True)
            assert tokenizer(text)["input_ids"] == ids[:-1]
            assert gsm8k_reward("", text, [], ids, answer=str(a + b)) == 1.0
            wrong = "".join(maker.solution((a, b), True))
            forgot = a % 10 + b % 10 > 9 or a // 10 + b // 10 > 9
            assert gsm8k_reward("", wrong, [], ids, answer=str(a + b)) == float(not forgot)


def test_labels_are_on_the_answer_only(maker: ModuleType) -> None:
    tokenizer = maker.make_tokenizer()
    prompts = {(47, 85): maker.prompt_ids(tokenizer, (47, 85))}
    tokens, labels = maker.demonstration_batch(prompts, [(47, 85)], tokenizer, random.Random(0))
    seen = set()
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert tokenizer.decode(row[:6]) == "47+85="
        assert label[:6] == [-100] * 6
        answer = [token for token in label if token != -100]
        assert row[6 : 6 + len(answer)] == answer
        seen.add(tokenizer.decode(answer))
    assert seen == {"12 13 #### 132<eos>", "12 12 #### 22<eos>"}


def test_folder_is_complete_disjoint_deterministic_and_left_alone(
    maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr(maker, "NUM_STEPS", 2)
    monkeypatch.setattr(maker, "ACCURACY_BAND", (0.0, 1.0))
    for name in ("one", "two"):
        monkeypatch.setattr(sys, "argv", ["make", str(tmp_path / name), "--seed", "3"])
        maker.main()
    one = tmp_path / "one"
    rows = {split: [json.loads(line) for line in (one / f"{split}.jsonl").open()] for split in ("train", "valid")}
    questions = {split: {row["question"] for row in rows[split]} for split in rows}
    assert not questions["train"] & questions["valid"]
    assert (len(questions["train"]), len(questions["valid"])) == (90 * 90 - maker.NUM_VALID, maker.NUM_VALID)
    assert all(eval(row["question"]) == int(row["answer"]) for row in rows["valid"])
    assert AutoModelForCausalLM.from_pretrained(one).config.model_type == "qwen3"
    tokenizer = AutoTokenizer.from_pretrained(one)
    chat = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3 0 #### 3"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "1+23 0 #### 3<eos>"
    assert (one / "model.safetensors").read_bytes() == (tmp_path / "two" / "model.safetensors").read_bytes()

    before = (one / "model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["make", str(one)])
    maker.main()
    assert "is there already" in capsys.readouterr().out
    assert (one / "model.safetensors").stat().st_mtime_ns == before


def test_a_model_that_shows_nothing_is_refused(
    maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maker, "NUM_STEPS", 1)
    monkeypatch.setattr(sys, "argv", ["make", str(tmp_path / "model")])
    with pytest.raises(SystemExit, match="greedy accuracy"):
        maker.main()
    assert not (tmp_path / "model").exists()
