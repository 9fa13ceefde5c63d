from __future__ import annotations

import threading
from fractions import Fraction

import pytest

from pekoe.pipeline.config.dataset import DatasetConfig
from pekoe.pipeline.data.dataset import build
from pekoe.pipeline.reward.gsm8k_reward import gsm8k_reward, last_number
from pekoe.pipeline.reward.math_reward import last_boxed, math_reward
from pekoe.pipeline.reward.reasoning_gym_reward import reasoning_gym_reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", Fraction(18)),
        ("She makes $1,234.50 a day.", Fraction("1234.5")),
        ("16-3-4 = 9", Fraction(9)),
        ("so 5 - 3", Fraction(3)),
        ("16-3", Fraction(3)),
        ("it is -5.", Fraction(-5)),
        ("loss of -$20", Fraction(-20)),
        ("loss of $-20", Fraction(-20)),
        ("$ 7", Fraction(7)),
        ("7 apples and none else", Fraction(7)),
        ("0.10", Fraction(1, 10)),
        ("= .5", Fraction(1, 2)),
        ("**42**", Fraction(42)),
        ("1,000,000", Fraction(1_000_000)),
        ("12, 13", Fraction(13)),
        ("x2", None),
        ("no number", None),
        ("", None),
    ],
)
def test_last_number(text: str, number: Fraction | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("9 * 2 = 18\n#### 18", "18", 1.0),
        ("#### 18 and also 19 later", "18 is it\n#### 18", 0.0),
        ("\\boxed{18} is more than 17", "18", 1.0),
        ("18.0", "18", 1.0),
        ("18.01", "18", 0.0),
        ("1,800", "1800", 1.0),
        ("-18", "18", 0.0),
        ("", "18", 0.0),
        ("0.3", "0.1", 0.0),
        ("12345678901234567890", "12345678901234567891", 0.0),
    ],
)
def test_gsm8k(completion: str, answer: str, reward: float) -> None:
    assert gsm8k_reward("", completion, [], [], answer=answer, level=3) == reward


def test_gold_without_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="answer: 'unknown' holds no number"):
        gsm8k_reward("", "1", [], [], answer="unknown")
    with pytest.raises(ValueError, match="cannot parse"):
        math_reward("", "1", [], [], answer="")


VERDICTS = [
    ("0.5", "\\boxed{\\frac{1}{2}}", 1.0),
    ("\\frac{1}{2}", "the answer is 0.5", 1.0),
    ("1-1/e", "\\boxed{1+1/e}", 0.0),
    ("1-1/e", "\\boxed{1-1/e}", 1.0),
    ("3x-y+13=0", "\\boxed{3x+4y+14=0}", 0.0),
    ("3x-y+13=0", "\\boxed{3x-y+13=0}", 1.0),
    ("m>=sqrt(2)", "\\boxed{[sqrt(2),oo)}", 1.0),
    ("m \\geq \\sqrt{2}", "\\boxed{[\\sqrt{2},\\infty)}", 1.0),
    ("[\\sqrt{2},\\infty)", "\\boxed{m \\geq \\sqrt{2}}", 0.0),
    ("1,2,3", "\\boxed{3,2,1}", 1.0),
    ("(1,2)", "\\boxed{(2,1)}", 0.0),
    ("x=5", "\\boxed{5}", 1.0),
    ("2^{10}", "It is 1024.", 1.0),
    ("-3", "\\boxed{3}", 0.0),
    ("$x^2$", "\\boxed{x^2}", 1.0),
    ("so \\boxed{7}", "\\boxed{7}", 1.0),
    ("6 * 7 = 42\n#### 42", "\\boxed{42}", 1.0),
    ("5", "\\boxed{4} no, \\boxed{5}", 1.0),
    ("4", "\\boxed{4} no, \\boxed{5}", 0.0),
    ("\\frac{\\sqrt{2}}{2}", "\\boxed{\\frac{1}{\\sqrt{2}}}", 1.0),
    ("13", "I had 12, then 13.", 1.0),
    ("13", "", 0.0),
    ("13", "\\boxed{13", 0.0),
]


@pytest.mark.parametrize(("gold", "completion", "verdict"), VERDICTS)
def test_math_verdicts_are_pinned(gold: str, completion: str, verdict: float) -> None:
    assert math_reward("", completion, [], [], answer=gold) == verdict


def test_math_works_off_the_main_thread() -> None:
    results: list[float] = []
    thread = threading.Thread(target=lambda: results.append(math_reward("", "\\boxed{0.5}", [], [], answer="1/2")))
    thread.start()
    thread.join(90)
    assert results == [1.0]


def test_last_boxed() -> None:
    assert last_boxed("\\boxed{\\frac{1}{2}} and \\boxed{\\text{a {b}}}") == "\\text{a {b}}"
    assert last_boxed("\\boxed{1") is None
    assert last_boxed("1") is None


@pytest.mark.parametrize("task", ["countdown", "basic_arithmetic", "gsm_symbolic", "arc_agi", "knights_knaves"])
def test_reasoning_gym_scores_its_own_answers(task: str) -> None:
    dataset = build(DatasetConfig(type="reasoning_gym", path=task, size=3, seed=4))
    for index in range(3):
        data = dataset[index].data
        assert reasoning_gym_reward("", f"I think so. <answer> {data['answer']} </answer>", [], [], **data) == 1.0
        assert reasoning_gym_reward("", data["answer"], [], [], **data) == 1.0
        assert reasoning_gym_reward("", "<answer>none of it</answer>", [], [], **data) < 0.5
