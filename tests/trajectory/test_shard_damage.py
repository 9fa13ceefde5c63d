"""Damaged files: truncations, flipped bits, garbage. A reader never crashes and never gives partial rows."""

from __future__ import annotations

import io
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from pekoe.pipeline.records import Group
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.sealed_file import BLOCK_BYTES, seal
from pekoe.pipeline.trajectory.shard import BadShard, Shard, encode_shard


@pytest.fixture
def sound(attributes: ShardAttributes, make_group: Callable[..., Group]) -> bytes:
    data = encode_shard([make_group(number, samples=3, length=300) for number in range(6)], attributes)
    assert len(data) > 4 * BLOCK_BYTES
    return data


def read_all(path: Path) -> int:
    with Shard(path) as shard:
        return len(shard.read(range(shard.num_rows)))


def test_the_undamaged_file_reads(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(sound)
    assert read_all(path) == 18


def test_every_truncation_is_named(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "a.h5"
    lengths = {*range(0, 200), *range(200, len(sound), 997), *range(len(sound) - 200, len(sound)), 96, len(sound) // 2}
    for length in sorted(lengths):
        path.write_bytes(sound[:length])
        with pytest.raises(BadShard, match=r"truncated|seal"):
            read_all(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 100_000, b"garbage" * 10_000, b"\x89HDF\r\n\x1a\n" + b"\xff" * 4096],
    ids=["empty", "zeros", "garbage", "only the signature"],
)
def test_garbage_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(content)
    with pytest.raises(BadShard):
        read_all(path)


def test_bytes_behind_the_seal_are_named(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(sound + b"x")
    with pytest.raises(BadShard):
        read_all(path)


def test_a_folder_and_another_hdf5_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder.h5").mkdir()
    with pytest.raises(BadShard):
        read_all(tmp_path / "folder.h5")


def test_any_flipped_bit_is_found(tmp_path: Path, sound: bytes) -> None:
    """A dense sample over metadata, data and seal: `verify` finds each."""
    path = tmp_path / "a.h5"
    rng = np.random.default_rng(0)
    positions = sorted(
        {*range(0, 1024, 3), *rng.integers(0, len(sound), 400).tolist(), *range(len(sound) - 100, len(sound))}
    )
    for position in positions:
        damaged = bytearray(sound)
        damaged[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(BadShard), Shard(path) as shard:
            shard.verify()


@pytest.mark.parametrize("name", ["id", "loss_mask", "logprob", "version", "turn"])
def test_a_flipped_bit_in_a_token_column_spoils_only_reads_that_touch_it(
    tmp_path: Path, attributes: ShardAttributes, make_group: Callable[..., Group], name: str
) -> None:
    sound = encode_shard([make_group(number, samples=1, length=40_000) for number in range(8)], attributes)
    path = tmp_path / "a.h5"
    path.write_bytes(sound)
    with Shard(path) as shard:
        column = shard._hdf5["tokens"][name]
        middle_of_row_3 = column.id.get_offset() + 140_000 * column.dtype.itemsize
    damaged = bytearray(sound)
    damaged[middle_of_row_3] ^= 4
    path.write_bytes(damaged)
    with Shard(path) as shard:
        assert len(shard.read([0, 7])) == 2
        with pytest.raises(BadShard, match="checksum"):
            shard.read([0, 3])
        with pytest.raises(BadShard, match="checksum"):
            shard.verify()


def test_a_sealed_file_of_another_schema_is_named(tmp_path: Path) -> None:
    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        file.attrs["schema_version"] = 99
    path = tmp_path / "a.h5"
    path.write_bytes(image.getvalue() + seal(image.getvalue()))
    with pytest.raises(BadShard, match="schema version 99"):
        Shard(path)


def test_h5dump_or_python_can_read_a_shard_without_us(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(sound)
    tool = shutil.which("h5ls")
    if tool is not None:
        listed = subprocess.run([tool, "-r", str(path)], capture_output=True, text=True, timeout=90).stdout
        assert "/tokens/id" in listed
    with h5py.File(path, "r", locking=False) as file:
        assert file["tokens/id"].shape[0] == file["sequences/offset"][-1]
