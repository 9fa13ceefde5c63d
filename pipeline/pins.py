"""Which folders of a kind (weights by version, checkpoints by step) are being read: each reader names its own in a
small file, and their owner deletes around it.

    reader   writes readers/NAME.json ─► looks for the folder ─► reads, touching its file ─► removes it
    owner    renames the folder away ─► looks at readers/ again ─► deletes, or renames back

Either the reader's name was there at the second look, or the reader looks after the rename and does not find the
folder.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from pekoe.pipeline import files

FOLDER = "readers"


class Pin:
    """A reader's side."""

    def __init__(self, home: Path, name: str) -> None:
        self._path = home / FOLDER / f"{name}.json"
        self._beat = 0

    def hold(self, version: int) -> None:
        """Names the version, or says again that it is still being read."""
        files.make_folder(self._path.parent)
        self._beat += 1
        files.write_bytes(self._path, json.dumps({"version": version, "beat": self._beat}).encode())

    def release(self) -> None:
        files.remove(self._path)


class Pins:
    """The owner's side; a reader that says nothing for `patience_seconds` of the owner's own clock is taken for
    dead."""

    def __init__(self, home: Path, patience_seconds: float) -> None:
        self._folder = home / FOLDER
        self._patience = patience_seconds
        self._seen: dict[str, tuple[bytes, float]] = {}

    def pinned(self) -> set[int]:
        """Versions that live readers name."""
        versions = set()
        for path in self._folder.glob("*.json") if self._folder.is_dir() else ():
            try:
                content = path.read_bytes()
            except OSError:
                continue
            before, since = self._seen.get(path.name, (b"", 0.0))
            if content != before:
                since = time.monotonic()
                self._seen[path.name] = (content, since)
            if time.monotonic() - since <= self._patience and (version := _version(content)) is not None:
                versions.add(version)
        return versions

    def remove_unless_pinned(self, version: int, folder: Path) -> bool:
        """True when the version is gone."""
        if version in self.pinned():
            return False
        away = files.discarded_name(folder)
        try:
            files.disk.rename(folder, away)
        except FileNotFoundError:
            return True
        files.fsync_folder(away.parent)
        if version in self.pinned():
            files.disk.rename(away, folder)
            return False
        files.disk.remove_tree(away)
        return True


def _version(content: bytes) -> int | None:
    """None for a file that no reader has written like this: it pins nothing."""
    try:
        return int(json.loads(content)["version"])
    except (ValueError, KeyError, TypeError):
        return None
