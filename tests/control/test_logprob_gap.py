"""Engine against trainer: limits by device and dtype, refusals that say what to look at, alarms on sampled tokens."""

from __future__ import annotations

import logging
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.control.logprob_gap import ALARM_STEPS, EnginesDisagreeError, Gap, GapLimit, GapWatch, gap_limit
from pekoe.pipeline.control.start_check import StartCheck
from pekoe.pipeline.devices.device import choose
from pekoe.pipeline.messages import CheckEngine, CheckLogprobs, LogprobsChecked, Message
from pekoe.pipeline.registry import DEVICES, resolve

sys.path.insert(0, str(Path(__file__).resolve().parent))

from simulated_roles import World
from test_controller import config


def test_the_limit_is_by_device_and_by_the_coarser_dtype() -> None:
    made = RunConfig()
    made.rollout.dtype = made.actor.dtype = "float32"
    cpu = choose("cpu")
    assert gap_limit(made, cpu, "hf", "fsdp") == GapLimit(
        1e-3, "hf engine (rollout.dtype float32) and fsdp trainer (actor.dtype float32) on cpu"
    )
    assert gap_limit(made, resolve(DEVICES, "cuda", "")(), "vllm", "fsdp").limit == 0.05
    made.actor.dtype = "bfloat16"
    assert gap_limit(made, cpu, "hf", "fsdp").limit == 0.25
    made.gconfig.temperature = 0.5
    assert gap_limit(made, cpu, "hf", "fsdp").limit == 0.5
    made.gconfig.temperature = 2.0
    assert gap_limit(made, cpu, "hf", "fsdp").limit == 0.25
    made.rollout.logprob_gap_limit = 0.01
    assert gap_limit(made, cpu, "hf", "fsdp").limit == 0.01


def test_one_engine_among_many_is_found_out() -> None:
    limit = GapLimit(0.1, "vllm engine (rollout.dtype bfloat16) and fsdp trainer (actor.dtype bfloat16) on cuda")
    good = dict.fromkeys(range(1, 100), (-1.0, -2.01))
    assert limit.judge(4, (-1.0, -2.0), good) == (pytest.approx(0.005), pytest.approx(0.01), 0)
    assert limit.judge(4, (-1.0, -2.0), {**good, 5: (-1.0, -2.15)}).share_wide == pytest.approx(1 / 198)
    with pytest.raises(EnginesDisagreeError) as caught:
        limit.judge(4, (-1.0, -2.0), {**good, 70: (-1.0, -2.4)})
    for words in (
        "vllm engine (rollout.dtype bfloat16) and fsdp trainer (actor.dtype bfloat16) on cuda",
        "at version 4 (rank 70)", "mean |log-prob gap| 0.2, largest 0.4 > rollout.logprob_gap_limit 0.1",
        "tied embeddings", "actor.optimizer.lr=0",
    ):  # fmt: skip
        assert words in str(caught.value)
    with pytest.raises(EnginesDisagreeError, match=r"rank 3\): mean \|log-prob gap\| nan"):
        limit.judge(0, (-1.0,), {2: (-1.0,), 3: (math.nan,)})
    assert limit.judge(0, (), {}) == Gap()


def stats_of(gap: np.ndarray) -> dict[str, float]:
    return {
        "engine_gap/tokens": float(len(gap)), "engine_gap/mean": float(np.abs(gap).mean()),
        "engine_gap/drift": float(gap.mean()), "engine_gap/share_above_0.1": float((np.abs(gap) > 0.1).mean()),
        "engine_gap/max": float(np.abs(gap).max()),
    }  # fmt: skip


def drifted(noise: float, seed: int = 0) -> np.ndarray:
    """Rounding errors, and 0.2 more on a tenth of the tokens."""
    rng = np.random.default_rng(seed)
    return rng.normal(0, noise, 4000) + 0.2 * (rng.random(4000) < 0.1)


@pytest.mark.parametrize(("limit", "noise"), [(1e-3, 1e-5), (0.05, 0.008), (0.25, 0.05)])
def test_a_trainer_that_is_off_on_a_tenth_of_the_tokens_is_told_of(
    limit: float, noise: float, caplog: pytest.LogCaptureFixture
) -> None:
    watch = GapWatch(GapLimit(limit, "hf engine and fsdp trainer"))
    rounding = np.random.default_rng(1).normal(0, noise, 4000)
    with caplog.at_level(logging.ERROR):
        watch.look(1, stats_of(rounding))
        watch.look(2, {"train/loss": 0.0})
        assert not caplog.records
        for version in range(3, 3 + ALARM_STEPS + 1):
            watch.look(version, stats_of(drifted(noise)))
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("step 3: hf engine and fsdp trainer drift apart on what was sampled: ")
    assert "rollout.stop_at_gap=true" in first
    assert second.startswith(f"step {3 + ALARM_STEPS}: ")
    with pytest.raises(EnginesDisagreeError, match="stop_at_gap"):
        GapWatch(GapLimit(limit), stops=True).look(3, stats_of(drifted(noise)))


def test_few_tokens_do_not_alarm_by_chance() -> None:
    watch = GapWatch(GapLimit(0.25))
    for seed in range(200):
        assert watch.alarm(stats_of(np.random.default_rng(seed).normal(0, 0.05, 30))) == ""


class Roles(World):
    """Roles that answer the comparison at the start."""

    by_trainer: tuple[float, ...] = (-1.0, -2.0)
    by_engine: LogprobsChecked = LogprobsChecked(0, (-1.0, -2.0), (-0.5,), (-0.5,))

    def build(self, version: int = 0):
        controller = super().build(version)
        controller.parts.start_check = StartCheck(
            self.post, [0], self.rollout_ranks, GapLimit(0.1, "hf engine and fsdp trainer"), 5.0
        )
        send = self.post.send

        def answer(to: int, message: Message) -> None:
            if isinstance(message, CheckLogprobs):
                assert controller.admitting is False
                self._tell(to, LogprobsChecked(message.version, self.by_trainer))
            elif isinstance(message, CheckEngine):
                self._tell(to, self.by_engine)
            else:
                send(to, message)

        self.post.send = answer  # type: ignore[method-assign]
        return controller


@pytest.mark.parametrize(("stand", "agree"), [((), False), ((2,), True)])
def test_nobody_is_said_to_agree_who_was_not_compared(
    stand: tuple[int, ...], agree: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines that have failed meanwhile are compared when they get weights."""
    check = StartCheck(
        World(config(), 12, 2, num_rollout=2).post, [0], (1, 2), GapLimit(0.1), 5.0, available=lambda: stand
    )
    check.version = 0
    check.on_checked(0, LogprobsChecked(0, (-1.0, -2.0)))
    assert check.is_over == (not stand)
    for rank in stand:
        check.on_checked(rank, Roles.by_engine)
    assert check.is_over
    with caplog.at_level("INFO", "pekoe.pipeline.control.start_check"):
        check.judge()
    assert ("agree at version 0" in caplog.text) is agree
    lacking = ", ".join(str(rank) for rank in (1, 2) if rank not in stand)
    assert f"not compared yet: engines of ranks {lacking}, which are built anew" in caplog.text


@pytest.mark.parametrize("colocated", [False, True])
def test_a_run_begins_when_engines_and_trainer_agree(colocated: bool) -> None:
    world = Roles(config(), 12, 2, num_rollout=2, colocated=colocated)
    assert world.run() == "finished"


@pytest.mark.parametrize(
    ("by_trainer", "by_engine", "words"),
    [
        ((-1.0, -2.5), LogprobsChecked(0, (-1.0, -2.0), (-0.5,), (-0.5,)), "disagree at version 0 .rank 1.: mean"),
        ((-1.0, -2.0), LogprobsChecked(0, (-1.0, -2.0), (-0.1,), (-0.5,)), "otherwise than it has sampled it"),
    ],
)
def test_nothing_is_sampled_while_they_disagree(
    by_trainer: tuple[float, ...], by_engine: LogprobsChecked, words: str
) -> None:
    world = Roles(config(), 12, 2, num_rollout=2)
    world.by_trainer, world.by_engine = by_trainer, by_engine
    with pytest.raises(EnginesDisagreeError, match=words):
        world.run()
    assert world.post.sent["Assign"] == 0
