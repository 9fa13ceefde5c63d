"""What one rank's part of a save does when its disk refuses something."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from pekoe.pipeline import files
from pekoe.pipeline.messages import WrittenFile
from pekoe.pipeline.train.saver import StagedSave, write_save


class Staged:
    """A model's copy; its write stands for a collective that all ranks must come to."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.name, self.order, self.discarded = name, order, False

    def write(self, folder: Path) -> tuple[WrittenFile, ...]:
        self.order.append(f"write {self.name}")
        folder.mkdir()
        (folder / "part").write_bytes(b"weights")
        return (WrittenFile("part", 7, "digest"),)

    def discard(self) -> None:
        self.discarded = True


@pytest.mark.parametrize("refused", ["engine", "critic", "", None])
def test_no_rank_leaves_before_the_last_model_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str | None
) -> None:
    """What fails on one rank alone comes after every write that its peers wait in."""
    order: list[str] = []
    staged = {name: Staged(name, order) for name in ("engine", "critic")}
    real = files.disk.sync_folder

    def sync_folder(path: Path) -> None:
        order.append(f"fsync {path.relative_to(tmp_path)}")
        if refused is not None and path == tmp_path / refused:
            raise OSError(errno.EIO, "no")
        real(path)

    monkeypatch.setattr(files.disk, "sync_folder", sync_folder)
    saved = write_save(StagedSave(3, tmp_path, staged, {"rng-0": b"state"}, 0.0, 0.0))
    assert order[:2] == ["write engine", "write critic"]
    if refused is None:
        assert {"fsync engine", "fsync critic", "fsync ."} <= set(order)
        assert [file.name for file in saved.files] == ["engine/part", "critic/part", "rng-0"]
        return
    assert "no" in saved.error
    assert not saved.files
    assert all(one.discarded for one in staged.values())
