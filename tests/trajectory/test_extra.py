"""Optional token columns: per-turn rewards and a teacher's log-probs, from the trajectory to the trainer's buffer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from pekoe.pipeline.records import Finish, Group, Trajectory, pack
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.archive import Archive, archive_files
from pekoe.pipeline.trajectory.hand_over import decode, encode
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.shard import BadShard, Shard, encode_shard, write_shard
from pekoe.pipeline.trajectory.shard_views import episode_text
from pekoe.pipeline.trajectory.store import BadRows, Store

Same = Callable[[Trajectory, Trajectory], None]
MASK = [0, 0, 1, 1, 0, 0, 1, 1, 1]
TURNS = [-1, -1, 0, 0, -1, -1, 1, 1, 1]


def two_turns(sample: int = 0, *, turn_rewards: bool = True, teacher: bool = True) -> Trajectory:
    active = np.array(MASK, bool)
    rng = np.random.default_rng(sample)
    extra = {}
    if turn_rewards:
        extra["turn_rewards"] = np.array([0, 0, 0, -0.5, 0, 0, 0, 0, 1 + sample], np.float32)
    if teacher:
        extra["teacher_logprobs"] = np.where(active, -rng.random(9), 0).astype(np.float32)
    return Trajectory(
        tokens=np.arange(9, dtype=np.int32),
        loss_mask=np.array(MASK, np.uint8),
        logprobs=np.where(active, -rng.random(9), 0).astype(np.float32),
        versions=np.where(active, 3, -1).astype(np.int32),
        turns=np.array(TURNS, np.int32),
        prompt_length=2,
        reward=0.25,
        finish=Finish.STOP,
        sample=sample,
        extra=extra,
    )


def group_of(*trajectories: Trajectory, number: int = 7) -> Group:
    return Group(number, 0, "data/7", list(trajectories))


@pytest.mark.parametrize(
    ("turn_rewards", "teacher", "columns"),
    [
        (False, False, set()),
        (True, False, {"turn_reward"}),
        (False, True, {"teacher_logprob"}),
        (True, True, {"turn_reward", "teacher_logprob"}),
    ],
)
def test_a_shard_has_the_columns_that_its_rows_have(
    tmp_path: Path, attributes: ShardAttributes, assert_same: Same, turn_rewards: bool, teacher: bool, columns: set[str]
) -> None:
    path = tmp_path / "a.h5"
    rows = [two_turns(sample, turn_rewards=turn_rewards, teacher=teacher) for sample in range(3)]
    write_shard(path, [group_of(*rows)], attributes)
    with h5py.File(path, "r", locking=False) as file:
        assert set(file["tokens"]) == {"id", "loss_mask", "logprob", "version", "turn"} | columns
    with Shard(path) as shard:
        for row, (_, found) in zip((2, 0), shard.read([2, 0]), strict=True):
            assert_same(found, rows[row])
        for (found,), row in zip(([t] for g in shard.groups() for t in g.trajectories), rows, strict=True):
            assert_same(found, row)
        assert shard.verify() == shard.notice()


def test_the_bytes_of_a_shard_without_them_are_those_of_before(
    attributes: ShardAttributes, make_group: Callable[..., Group]
) -> None:
    """A shard that has them is longer by these columns; its other datasets are the same."""
    plain = encode_shard([group_of(two_turns(turn_rewards=False, teacher=False))], attributes)
    assert b"turn_reward" not in plain
    assert b"teacher" not in plain
    assert b"turn_reward" in encode_shard([group_of(two_turns(teacher=False))], attributes)


def test_rows_without_turn_rewards_have_zeros_beside_rows_that_have_some(
    tmp_path: Path, attributes: ShardAttributes
) -> None:
    path = tmp_path / "a.h5"
    rows = [two_turns(0, turn_rewards=False), two_turns(1)]
    (written,) = write_shard(path, [group_of(*rows)], attributes).groups
    assert [row.reward for row in written.rows] == [0.25, 0.25 - 0.5 + 2], "the notice has the outcome's and the turns'"
    with Shard(path) as shard:
        (_, first), (_, second) = shard.read([0, 1])
        assert shard.notice() == (written,)
    assert not first.extra["turn_rewards"].any()
    np.testing.assert_array_equal(second.extra["turn_rewards"], rows[1].extra["turn_rewards"])
    batch = pack([(7, row) for row in rows])
    np.testing.assert_array_equal(batch.extra["turn_rewards"], [0] * 9 + [0, 0, 0, -0.5, 0, 0, 0, 0, 2])


def test_log_probs_of_a_teacher_are_on_all_rows_or_on_none(tmp_path: Path, attributes: ShardAttributes) -> None:
    rows = [two_turns(0), two_turns(1, teacher=False)]
    with pytest.raises(ValueError, match="teacher_logprobs is on 1 of 2 trajectories; allowed: on all"):
        pack([(7, row) for row in rows])
    with pytest.raises(ValueError, match="teacher_logprobs is on 1 of 2"):
        write_shard(tmp_path / "a.h5", [group_of(*rows)], attributes)
    assert "teacher_logprobs" not in pack([(7, two_turns(teacher=False))]).extra
    both = pack([(7, two_turns(0)), (8, two_turns(1))])
    assert both.extra["teacher_logprobs"].shape == (18,)
    assert pack([]).extra == {}


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("turn_rewards", 2, 1.0, "last sampled token of a turn"),
        ("turn_rewards", 7, 1.0, "last sampled token of a turn"),
        ("turn_rewards", 5, 1.0, "last sampled token of a turn"),
        ("turn_rewards", 0, 1.0, "last sampled token of a turn"),
        ("turn_rewards", 3, np.nan, "turn_rewards is not finite"),
        ("teacher_logprobs", 3, np.inf, "teacher_logprobs is not finite"),
        ("teacher_logprobs", 4, -1.0, "0 where nothing was sampled"),
        ("teacher_logprobs", 3, 0.5, "must be log-probs"),
    ],
)
def test_unsound_extras_are_refused_everywhere(
    tmp_path: Path, attributes: ShardAttributes, name: str, at: int, value: float, message: str
) -> None:
    sound, unsound = two_turns(0), two_turns(1)
    sound.check()
    unsound.extra[name][at] = value
    with pytest.raises(ValueError, match=message):
        unsound.check()
    with pytest.raises(ValueError, match=message):
        write_shard(tmp_path / "a.h5", [group_of(sound, unsound, two_turns(2))], attributes)
    assert list(tmp_path.iterdir()) == []


def test_lengths_and_names_of_extras_are_checked() -> None:
    trajectory = two_turns()
    trajectory.extra["turn_rewards"] = np.zeros(8, np.float32)
    with pytest.raises(ValueError, match="turn_rewards has 8 entries for 9 tokens"):
        trajectory.check()
    trajectory.extra = {"teacher_logits": np.zeros(9, np.float32)}
    with pytest.raises(ValueError, match="'teacher_logits' is not known; allowed: turn_rewards, teacher_logprobs"):
        trajectory.check()


def test_a_turn_may_end_where_another_sequence_begins(tmp_path: Path, attributes: ShardAttributes) -> None:
    """The check of many rows at once knows where one ends, also when both have the same turn number there."""
    rows = [two_turns(sample) for sample in range(3)]
    for row in rows:
        row.turns[row.turns == 1] = 0
        row.extra["turn_rewards"][3] = 0
    write_shard(tmp_path / "a.h5", [group_of(*rows)], attributes)
    with Shard(tmp_path / "a.h5") as shard:
        shard.verify()


@pytest.mark.parametrize("name", ["turn_reward", "teacher_logprob"])
def test_a_flipped_bit_in_an_optional_column_is_found(tmp_path: Path, attributes: ShardAttributes, name: str) -> None:
    path = tmp_path / "a.h5"
    write_shard(path, [group_of(two_turns(0), two_turns(1))], attributes)
    with h5py.File(path, "r", locking=False) as file:
        position = file["tokens"][name].id.get_offset() + 9 * 4
    damaged = bytearray(path.read_bytes())
    damaged[position] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(BadShard, match="checksum"), Shard(path) as shard:
        shard.read([1])


def test_an_unsound_column_behind_a_right_seal_is_damage(
    tmp_path: Path, attributes: ShardAttributes, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = two_turns()
    bad.extra["turn_rewards"][2] = 5.0
    with monkeypatch.context() as patch:
        patch.setattr("pekoe.pipeline.trajectory.token_columns.optional_is_sound", lambda *_: True)
        write_shard(tmp_path / "a.h5", [group_of(bad)], attributes)
    with pytest.raises(BadShard, match="last sampled token of a turn"), Shard(tmp_path / "a.h5") as shard:
        shard.read([0])


def test_a_node_writer_gets_them_too(assert_same: Same) -> None:
    rows = [two_turns(0), two_turns(1, turn_rewards=False)]
    (found,) = decode(encode([group_of(*rows)]))
    for left, right in zip(found.trajectories, rows, strict=True):
        assert_same(left, right)


def test_an_archive_keeps_them_and_does_not_mix_kinds(
    run: RunDirectory, attributes: ShardAttributes, assert_same: Same
) -> None:
    folder = run.shards / "0-rank-1"
    folder.mkdir()
    kinds = [two_turns(0), two_turns(1, teacher=False, turn_rewards=False), two_turns(2)]
    for number, row in enumerate(kinds):
        write_shard(folder / f"{number:06d}.h5", [group_of(row, number=number)], attributes)
    archive = Archive(run)
    archive.add([run.relative(path) for path in sorted(folder.glob("*.h5"))])
    assert archive.close(30)
    found: dict[int, Trajectory] = {}
    for path in archive_files(run):
        with Shard(path) as shard:
            shard.verify()
            found.update(shard.read(range(shard.num_rows)))
    assert len(archive_files(run)) == 2
    for number, row in enumerate(kinds):
        assert_same(found[number], row)


def test_a_reader_that_wants_a_teacher_refuses_shards_without_and_the_other_way_round(
    run: RunDirectory, attributes: ShardAttributes
) -> None:
    folder = run.shards / "0-rank-1"
    folder.mkdir()
    write_shard(folder / "000000.h5", [group_of(two_turns(0))], attributes)
    write_shard(folder / "000001.h5", [group_of(two_turns(1, teacher=False))], attributes)
    names = [f"shards/0-rank-1/00000{number}.h5" for number in range(2)]
    with pytest.raises(BadRows, match=r"000001.h5 row 0: no log-probs of a teacher"):
        Store(run, teacher=True).read([(name, 0) for name in names])
    rows = Store(run, teacher=False).read([(name, 0) for name in names])
    assert [set(trajectory.extra) for _, trajectory in rows] == [{"turn_rewards"}] * 2
    with pytest.raises(ValueError, match="teacher_logprobs is on 1 of 2"):
        pack(Store(run).read([(name, 0) for name in names]))


def test_people_see_them() -> None:
    row = two_turns()
    text = episode_text(0, group_of(row), row, None)
    mean = row.extra["teacher_logprobs"][np.array(MASK, bool)].mean()
    assert f"turn rewards 0: -0.5, 1: 1 · teacher's mean log-prob {mean:.3f}" in text
    assert row.total_reward == 0.75
