"""torch's distributed checkpoints, written and read through the durable files layer.

Each rank writes one file `__R_0.distcp`, the first one `.metadata` besides. Sizes and hashes are known when the bytes
have gone out; every file is fsynced; an OSError comes out as itself on the rank that saw it, and as another OSError on
its peers.
"""

from __future__ import annotations

import errno
import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter

from pekoe.pipeline import files
from pekoe.pipeline.messages import WrittenFile

LATE_SECONDS = 60.0
"""How long a file that another node has written may take to come into view."""


def write_sharded(state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> tuple[WrittenFile, ...]:
    """Collective over `group`, from any one thread: this rank's part of `state` (sharded tensors in host memory).

    Gives the files that this rank has written, named relative to `folder`, whose entries the caller makes durable:
    nothing may fail here on one rank alone, since its peers may go on to the next collective. When a rank fails, all
    ranks raise: OSError for a failure of the disk (with its errno where it happened), RuntimeError for anything else.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    disk = DurableFileSystem()
    writer = FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0)
    writer.fs = disk
    try:
        save(state, storage_writer=writer, process_group=group)
    except CheckpointException as failure:
        raise _as_plain_error(folder, failure, dist.get_rank(group)) from failure
    return tuple(
        WrittenFile(path.relative_to(folder).as_posix(), num_bytes, digest)
        for path, (num_bytes, digest) in sorted(disk.written.items())
    )


def read_sharded(state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> None:
    """Collective over `group`: fills the tensors of `state`, whatever the number of ranks that wrote them."""
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(folder)
    reader.fs = DurableFileSystem()
    try:
        load(state, storage_reader=reader, process_group=group)
    except CheckpointException as failure:
        raise RuntimeError(f"{folder}: cannot be loaded: {failure}") from failure


class DurableFileSystem(FileSystem):
    """What torch's readers and writers see of the disk."""

    def __init__(self) -> None:
        self.written: dict[Path, tuple[int, str]] = {}
        """(bytes, BLAKE2b) of each file written, by its present name."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        path = Path(path)
        if mode != "wb":
            with _open_late(path) as file:
                yield file
            return
        stream = HashedStream(path)
        try:
            with stream.file:
                yield cast(io.IOBase, stream)
        except Exception:
            if stream.error is not None:
                raise stream.error from None
            raise
        self.written[path] = (stream.file.num_bytes, stream.file.digest)

    def rename(self, path: Any, new_path: Any) -> None:
        files.disk.rename(Path(path), Path(new_path))
        self.written[Path(new_path)] = self.written.pop(Path(path))

    def mkdir(self, path: Any) -> None:
        files.make_folder(Path(path))

    def rm_file(self, path: Any) -> None:
        files.remove(Path(path))


class HashedStream:
    """A `DurableFile` as torch's writers use it: they close it before the layer has fsynced it, and serialisers in
    between put their own errors in place of the disk's."""

    def __init__(self, path: Path) -> None:
        self.file = files.create(path)
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def tell(self) -> int:
        return self.file.tell()

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Leaving the `with` block of the file closes it."""


def _open_late(path: Path) -> io.BufferedReader:
    """Opens for reading; what is not in this node's view yet is tried again for a while."""
    deadline = time.monotonic() + LATE_SECONDS
    pause = 0.02
    while True:
        try:
            return open(path, "rb")
        except OSError as error:
            if error.errno not in files.LATE or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause = min(pause * 2, 1.0)


def _as_plain_error(folder: Path, failure: CheckpointException, own_rank: int) -> Exception:
    """This rank's own error, or one that says what went wrong elsewhere."""
    errors = {rank: wrapped[0] for rank, wrapped in failure.failures.items()}
    told = "; ".join(f"trainer rank {rank}: {type(error).__name__}: {error}" for rank, error in sorted(errors.items()))
    text = f"{folder}: the checkpoint could not be written: {told}"[:2000]
    if not all(isinstance(error, OSError) for error in errors.values()):
        return RuntimeError(text)
    own = errors.get(own_rank)
    return OSError(own.errno if isinstance(own, OSError) and own.errno else errno.EIO, text)
