from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pekoe.pipeline.records import Finish, Group, Trajectory
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.schema import ShardAttributes


def build_trajectory(rng: np.random.Generator, length: int, sample: int = 0, version: int = 0) -> Trajectory:
    prompt = max(1, length // 3)
    mask = np.zeros(length, np.uint8)
    mask[prompt:] = 1
    mask[-1] = 1
    active = mask.astype(bool)
    return Trajectory(
        tokens=rng.integers(0, 150_000, length, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(active, -rng.random(length), 0).astype(np.float32),
        versions=np.where(active, version, -1).astype(np.int32),
        turns=np.where(active, 0, -1).astype(np.int32),
        prompt_length=prompt,
        reward=float(np.float32(rng.random())),
        finish=Finish.STOP,
        seed=int(rng.integers(0, 1 << 62)),
        sample=sample,
        info={"note": "größer", "score": 0.5},
    )


def build_group(number: int, samples: int = 4, length: int = 24, version: int = 0, try_number: int = 0) -> Group:
    rng = np.random.default_rng([number, try_number])
    trajectories = [build_trajectory(rng, length + sample, sample, version) for sample in range(samples)]
    return Group(number, try_number, f"data/{number}", trajectories)


@pytest.fixture
def make_group() -> Callable[..., Group]:
    return build_group


@pytest.fixture
def attributes() -> ShardAttributes:
    return ShardAttributes(run="test/run", attempt=0, writer="rank-1", temperature=0.7)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def check_equal(found: Trajectory, expected: Trajectory) -> None:
    for name in ("tokens", "loss_mask", "logprobs", "versions", "turns"):
        left, right = getattr(found, name), getattr(expected, name)
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    for name in ("prompt_length", "reward", "finish", "seed", "sample", "info"):
        assert getattr(found, name) == getattr(expected, name), name
    assert set(found.extra) == set(expected.extra)
    for name, values in expected.extra.items():
        assert found.extra[name].dtype == np.float32
        np.testing.assert_array_equal(found.extra[name], values)


@pytest.fixture
def assert_same() -> Callable[[Trajectory, Trajectory], None]:
    return check_equal
