"""Where a rank's engine runs, and when a nursery is started for it."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rollout"))

from pekoe.pipeline.config.load import from_yaml_text
from pekoe.pipeline.rollout.child.child_engine import ChildEngine
from pekoe.pipeline.rollout.engine import Instance
from pekoe.pipeline.rollout.engines.hf_engine import HfEngine
from pekoe.pipeline.runs.engine_setup import build_engine, build_teacher, child_limits, engine_process, start_nursery

BOTH, ROLLOUT, TRAINER = ("trainer", "rollout"), ("rollout",), ("trainer",)


@pytest.mark.parametrize(("choice", "engine", "colocated", "expected"), [
    ("auto", "hf", False, "own"), ("auto", "hf", True, "own"), ("auto", "vllm", False, "own"),
    ("auto", "vllm", True, "child"), ("child", "hf", False, "child"), ("child", "hf", True, "child"),
    ("child", "vllm", False, "child"), ("own", "hf", True, "own"), ("own", "vllm", False, "own"),
])  # fmt: skip
def test_the_choice(choice: str, engine: str, colocated: bool, expected: str) -> None:
    assert engine_process(choice, engine, colocated) == expected


def test_an_engine_cannot_share_the_trainers_group() -> None:
    with pytest.raises(ValueError, match=r"rollout\.engine_process: own, .*allowed: auto, child"):
        engine_process("own", "vllm", True)


@pytest.mark.parametrize(("overrides", "roles", "engine", "expected"), [
    ([], BOTH, "hf", False), ([], BOTH, "vllm", True), ([], ROLLOUT, "vllm", False), ([], TRAINER, "", False),
    (["rollout.engine_process=child"], ROLLOUT, "hf", True), (["rollout.engine_process=child"], TRAINER, "hf", False),
    (["teacher.place=engine"], ROLLOUT, "hf", False), (["teacher.place=engine"], ROLLOUT, "vllm", True),
    (["teacher.place=trainer"], ROLLOUT, "vllm", False), (["teacher.place=engine"], TRAINER, "vllm", False),
])  # fmt: skip
def test_a_nursery_is_started_only_for_a_child(
    overrides: list[str], roles: tuple[str, ...], engine: str, expected: bool
) -> None:
    nursery = start_nursery(from_yaml_text("", overrides), roles, engine)
    assert (nursery is not None) is expected
    if nursery is not None:
        nursery.close()


@pytest.mark.parametrize("process", ["own", "child"])
def test_a_teacher_is_built_where_the_configuration_says(tiny_model: Path, process: str) -> None:
    made = context(tiny_model, "hf", f"rollout.engine_process={process}", "teacher.place=engine")
    assert made.config.teacher.path == ""
    teacher = build_teacher(made)
    assert teacher is not None
    assert isinstance(teacher._engine, ChildEngine if process == "child" else HfEngine)
    assert teacher.gauges() == {"waiting": 0.0, "scored": 0.0}
    teacher.close()
    if made.nursery is not None:
        made.nursery.close()
    assert build_teacher(context(tiny_model, "hf", "teacher.place=trainer")) is None
    assert build_teacher(context(tiny_model, "hf")) is None


def test_a_teacher_that_does_not_fit_is_refused_by_its_own_key(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = context(tiny_model, "hf", "teacher.place=engine")
    monkeypatch.setattr(type(made.device), "room", lambda *_: (1, 2))
    with pytest.raises(ValueError, match=r"teacher\.place: the hf engine needs"):
        build_teacher(made)


def test_a_teacher_of_another_vocabulary_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """It lacks a token of the policy: the check before the start sees only tokens that both name."""
    other = shutil.copytree(tiny_model, tmp_path / "other")
    contents = json.loads((other / "tokenizer.json").read_text())
    contents["model"]["vocab"]["unheard"] = contents["model"]["vocab"].pop("7")
    (other / "tokenizer.json").write_text(json.dumps(contents))
    made = context(tiny_model, "hf", "teacher.place=engine", f"teacher.path={other}")
    with pytest.raises(ValueError, match=r"teacher\.path: .*has another vocabulary than the policy: token '7' is"):
        build_teacher(made)


def context(model: Path, engine: str, *overrides: str) -> Any:
    """What an engine needs of a rank, on the real configuration and device."""
    from pekoe.pipeline.devices.device import choose

    config = from_yaml_text("", [f"actor.path={model}", "gconfig.max_tokens=64", "rollout.max_slots=2", *overrides])
    ranks = SimpleNamespace(
        rollout=SimpleNamespace(engine=engine), colocated=False, roles_of=lambda rank: ROLLOUT
    )  # fmt: skip
    return SimpleNamespace(
        config=config, ranks=ranks, world=SimpleNamespace(rank=1), tokenizer_path=str(model), device=choose("cpu"),
        device_index=0, nursery=start_nursery(config, ROLLOUT, engine), building=threading.Lock(),
    )  # fmt: skip


def test_an_engine_can_be_built_again_after_its_death(tiny_model: Path) -> None:
    made = context(tiny_model, "child_worlds:EchoEngine", "rollout.engine_process=child")
    for _ in range(2):
        died = threading.Event()
        engine = build_engine(made, Instance(), lambda _, died=died: died.set())
        assert isinstance(engine, ChildEngine)
        made.nursery.kill(engine._process)
        assert died.wait(60)
        engine.close()
    with pytest.raises(ValueError, match="EchoEngine engine over 2 ranks"):
        build_engine(made, Instance(size=2), lambda _: None)
    made.nursery.close()
    own = build_engine(context(tiny_model, "hf"), Instance(), lambda _: None)
    assert isinstance(own, HfEngine)
    own.close()


def test_limits_of_a_child_lie_within_the_runs_own() -> None:
    config = from_yaml_text("", [])
    limits = child_limits(config)
    assert limits.answer < config.weights.ready_seconds
    assert limits.bucket < config.weights.bucket_seconds
    assert limits.progress < config.cluster.progress_seconds
    assert limits.silence < config.cluster.silence_seconds
