"""The smallest shard, damaged in every way that a disk knows: prefixes, bytes, datasets, names, rights, locks."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from pekoe.pipeline import files
from pekoe.pipeline.records import Group
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory import schema
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.sealed_file import BLOCK_BYTES, FOOTER
from pekoe.pipeline.trajectory.shard import BadShard, Shard, encode_shard, write_shard
from pekoe.pipeline.trajectory.store import BadRows, Store

Make = Callable[..., Group]
ATTRIBUTES = ShardAttributes("r", 0, "rank-1", 1.0)
DATASETS = [
    *(f"tokens/{name}" for name in schema.TOKEN_COLUMNS),
    *(f"sequences/{name}" for name in (*schema.SEQUENCE_COLUMNS, "offset", *schema.TEXT_COLUMNS)),
]
NOBODY = 65534


def name_of(run: RunDirectory, path: Path) -> str:
    return run.relative(path)


def publish(run: RunDirectory, number: int, groups: list[Group]) -> Path:
    folder = run.shards / "0-rank-1"
    folder.mkdir(exist_ok=True)
    path = folder / f"{number:06d}.h5"
    write_shard(path, groups, ATTRIBUTES)
    return path


def is_refused(path: Path) -> bool:
    """Nothing of the file is handed out, and nothing but BadShard is raised."""
    try:
        with Shard(path) as shard:
            shard.read(range(shard.num_rows))
    except BadShard:
        return True
    return False


def test_every_prefix_of_the_smallest_shard_is_refused(tmp_path: Path, make_group: Make) -> None:
    sound = encode_shard([make_group(1, samples=1, length=2)], ATTRIBUTES)
    path = tmp_path / "a.h5"
    path.write_bytes(sound)
    assert not is_refused(path)
    for length in range(len(sound) - 1, -1, -1):
        os.truncate(path, length)
        assert is_refused(path), f"{length} of {len(sound)} bytes"


def test_every_block_boundary_of_a_larger_shard_is_refused_as_its_end(tmp_path: Path, make_group: Make) -> None:
    sound = encode_shard([make_group(number, samples=2, length=4000) for number in range(3)], ATTRIBUTES)
    path = tmp_path / "a.h5"
    path.write_bytes(sound)
    near = {end + by for end in range(0, len(sound), BLOCK_BYTES) for by in (-1, 0, 1)}
    near |= {len(sound) - FOOTER.size + by for by in (-1, 0, 1)}
    for length in sorted((length for length in near if 0 <= length < len(sound)), reverse=True):
        os.truncate(path, length)
        assert is_refused(path), f"{length} of {len(sound)} bytes"


def test_a_flipped_bit_in_any_byte_of_the_smallest_shard_is_found(tmp_path: Path, make_group: Make) -> None:
    sound = encode_shard([make_group(1, samples=1, length=2)], ATTRIBUTES)
    path = tmp_path / "a.h5"
    path.write_bytes(sound)
    with path.open("r+b", buffering=0) as file:
        for position, value in enumerate(sound):
            os.pwrite(file.fileno(), bytes([value ^ 1 << position % 8]), position)
            assert is_refused(path), f"byte {position}"
            os.pwrite(file.fileno(), bytes([value]), position)
    assert not is_refused(path)


def place_of(path: Path, dataset: str) -> tuple[int, int]:
    """Where a dataset's bytes lie; of texts, their references."""
    with h5py.File(path, "r", locking=False) as file:
        found = file[dataset]
        return int(found.id.get_offset()), int(found.id.get_storage_size())


@pytest.mark.parametrize("dataset", DATASETS)
def test_each_bit_of_the_ends_of_each_dataset_counts(tmp_path: Path, make_group: Make, dataset: str) -> None:
    path = tmp_path / "a.h5"
    write_shard(path, [make_group(number, samples=3, length=2000) for number in range(4)], ATTRIBUTES)
    start, size = place_of(path, dataset)
    assert size > 0
    with path.open("r+b", buffering=0) as file:
        for position in (start, start + size // 2, start + size - 1):
            (value,) = os.pread(file.fileno(), 1, position)
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([value ^ 1 << bit]), position)
                with pytest.raises(BadShard, match="checksum"), Shard(path) as shard:
                    shard.verify()
                os.pwrite(file.fileno(), bytes([value]), position)
    with Shard(path) as shard:
        shard.verify()


def test_rows_of_undamaged_blocks_are_read_and_no_partial_row_is(tmp_path: Path, make_group: Make) -> None:
    """A flip in every stretch of a large shard: a row is whole and right, or the read is refused."""
    groups = [make_group(number, samples=1, length=9000) for number in range(6)]
    path = tmp_path / "a.h5"
    write_shard(path, groups, ATTRIBUTES)
    size, refused, right = path.stat().st_size, 0, 0
    with path.open("r+b", buffering=0) as file:
        for position in range(100, size, 12_000):
            (value,) = os.pread(file.fileno(), 1, position)
            os.pwrite(file.fileno(), bytes([value ^ 16]), position)
            for row, group in enumerate(groups):
                try:
                    with Shard(path) as shard:
                        ((number, found),) = shard.read([row])
                except BadShard:
                    refused += 1
                    continue
                right += 1
                assert number == group.number
                np.testing.assert_array_equal(found.tokens, group.trajectories[0].tokens)
                np.testing.assert_array_equal(found.logprobs, group.trajectories[0].logprobs)
            os.pwrite(file.fileno(), bytes([value]), position)
    assert refused > 0
    assert right > refused


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        lambda path: path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size)),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: (path.unlink(), path.mkdir(), (path / "inside").write_text("x")),
        lambda path: (path.unlink(), path.symlink_to(path)),
    ],
    ids=["empty", "zeros", "garbage", "cut", "a folder", "a link to itself"],
)
def test_what_is_no_shard_is_named_set_aside_and_counted_and_the_rest_is_used(
    run: RunDirectory, make_group: Make, spoil: Callable[[Path], object]
) -> None:
    bad, good = publish(run, 0, [make_group(1)]), publish(run, 1, [make_group(2)])
    spoil(bad)
    store = Store(run, retry_seconds=0.1)
    with pytest.raises(BadRows) as caught:
        store.read([(name_of(run, good), 0), (name_of(run, bad), 0)])
    assert [(shard, row) for shard, row, _ in caught.value.rows] == [(name_of(run, bad), 0)]
    found = store.adoptable(0, lambda _: True)
    assert [notice.path for notice in found.notices] == [name_of(run, good)]
    assert store.num_quarantined == 1
    assert store.paths() == [name_of(run, good)]
    assert len(list(run.set_aside.glob("*.reason.json"))) == 1


def test_a_file_swapped_under_an_open_handle_is_read_anew(run: RunDirectory, make_group: Make) -> None:
    """Even with the size and the time of the one that it replaces."""
    path, other = publish(run, 0, [make_group(1)]), publish(run, 1, [make_group(1, try_number=1)])
    store = Store(run)
    (_, before), *_ = store.read([(name_of(run, path), 0)])
    status = path.stat()
    assert other.stat().st_size == status.st_size
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(other, path)
    (_, after), *_ = store.read([(name_of(run, path), 0)])
    expected = make_group(1, try_number=1).trajectories[0].tokens
    np.testing.assert_array_equal(after.tokens, expected)
    assert not np.array_equal(before.tokens, expected)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_disk_that_refuses_to_read_gives_bad_rows(
    run: RunDirectory, make_group: Make, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = publish(run, 0, [make_group(1)])

    def refuse(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(BadRows, match=os.strerror(code)):
        Store(run).read([(name_of(run, path), 0)])


def test_a_handle_gone_stale_in_the_middle_of_a_read_is_opened_again(
    run: RunDirectory, make_group: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = publish(run, 0, [make_group(number, samples=1, length=20_000) for number in range(3)])
    store = Store(run)
    keys = [(name_of(run, path), row) for row in range(3)]
    real, calls = os.preadv, 0

    def once_stale(descriptor: int, buffers: Any, position: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(descriptor, buffers, position)

    monkeypatch.setattr(os, "preadv", once_stale)
    assert [group for group, _ in store.read(keys)] == [0, 1, 2]
    assert calls > 8


AS_NOBODY = """
import os, sys
from pathlib import Path
import numpy as np
from pekoe.pipeline.records import Finish, Group, Trajectory
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.store import BadRows, Store
from pekoe.pipeline.trajectory.writer import ShardWriter

run = RunDirectory(Path(sys.argv[1]))
if os.geteuid() == 0:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
store = Store(run, retry_seconds=0.1)
print(len(store.read([("shards/0-rank-1/000001.h5", 0)])))
try:
    store.read([("shards/0-rank-1/000000.h5", 0)])
except BadRows as error:
    print(error.rows[0][2])
mask = np.array([0, 1], np.uint8)
numbers = mask.astype(np.int32) - 1
row = Trajectory(numbers + 5, mask, -mask.astype(np.float32), numbers, numbers, 1, 1.0, Finish.STOP)
writer = ShardWriter(run, ShardAttributes("r", 0, "rank-1", 1.0))
writer.add(Group(3, 0, "x", [row]))
for _ in range(2):
    try:
        writer.flush()
    except OSError as error:
        print(error.strerror)
"""


def test_without_rights_shards_are_read_or_named_and_groups_are_kept(tmp_path: Path, make_group: Make) -> None:
    """A folder in which nobody may write, with one file that nobody may read; as another user, for root may all."""
    home = Path("/tmp") / f"pekoe-rights-{os.getpid()}"
    home.mkdir(mode=0o755)
    try:
        run = RunDirectory(home / "run")
        run.create()
        hidden, _ = publish(run, 0, [make_group(1)]), publish(run, 1, [make_group(2)])
        hidden.chmod(0o000)
        for folder in (hidden.parent, run.shards, run.path):
            folder.chmod(0o555)
        done = subprocess.run([sys.executable, "-c", AS_NOBODY, run.path], capture_output=True, text=True, timeout=60)
        one, denied, first, second = done.stdout.splitlines()
        assert one == "1", done.stderr
        assert "Permission denied" in denied
        assert first == second == "cannot publish a shard of 1 groups: Permission denied"
        assert len(list(hidden.parent.iterdir())) == 2
    finally:
        for folder in (home / "run", home / "run" / "shards", home / "run" / "shards" / "0-rank-1"):
            folder.chmod(0o755)
        shutil.rmtree(home)


LOCKS = {
    "no locks": "int flock(int fd, int op) { (void)fd; (void)op; errno = ENOLCK; return -1; }",
    "no lock manager": "int flock(int fd, int op) { (void)fd; (void)op; errno = ENOSYS; return -1; }",
    "blocked": "int flock(int fd, int op) { (void)fd; (void)op; for (;;) pause(); }",
    "all succeed": "int flock(int fd, int op) { (void)fd; (void)op; return 0; }",
}
FCNTL = """
int fcntl64(int fd, int command, ...) {
    va_list rest; va_start(rest, command); long value = va_arg(rest, long); va_end(rest);
    if (command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW) {
        errno = ENOLCK; return -1;
    }
    return (int)syscall(SYS_fcntl, fd, command, value);
}
int fcntl(int fd, int command, ...) {
    va_list rest; va_start(rest, command); long value = va_arg(rest, long); va_end(rest);
    return fcntl64(fd, command, value);
}
"""
INCLUDES = (
    "#define _GNU_SOURCE\n#include <errno.h>\n#include <fcntl.h>\n#include <stdarg.h>\n"
    "#include <sys/syscall.h>\n#include <unistd.h>\n"
)

WRITE_AND_READ = """
import fcntl, multiprocessing, os, sys
from pathlib import Path
import numpy as np
from pekoe.pipeline.records import Finish, Group, Trajectory
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.archive import Archive
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.store import Store
from pekoe.pipeline.trajectory.writer import ShardWriter

def main():
    run = RunDirectory(Path(sys.argv[1]))
    mask = np.array([0, 1], np.uint8)
    ids = mask.astype(np.int32) - 1
    row = Trajectory(ids + 5, mask, -mask.astype(np.float32), ids, ids, 1, 1.0, Finish.STOP)
    writer = ShardWriter(run, ShardAttributes("r", 0, "rank-2", 1.0))
    writer.add(Group(3, 0, "x", [row]))
    made = writer.flush()
    store = Store(run)
    print(len(store.read([(made.path, 0)])), len(store.read([("shards/0-rank-1/000000.h5", 0)])), flush=True)
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.apply(read_once, (str(run.path), made.path)), flush=True)
    print(len(store.adoptable(0, lambda _: True).notices), flush=True)
    archive = Archive(run)
    archive.add([made.path])
    print(archive.close(30), flush=True)

def read_once(run, name):
    return len(Store(RunDirectory(Path(run))).read([(name, 0)]))

if __name__ == "__main__":
    main()
"""

OPEN_LOCKED = "import h5py, sys; h5py.File(sys.argv[1], 'r', locking=True)"

HOLD_LOCK = """
import fcntl, sys, time
held = [open(path, "rb+") for path in sys.argv[1:]]
for file in held:
    fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize("kind", LOCKS)
def test_no_kind_of_flock_matters_to_writers_and_readers(run: RunDirectory, make_group: Make, kind: str) -> None:
    """The library's own locks fail, hang or lie, while another process holds a real one on the shard."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    path = publish(run, 0, [make_group(1)])
    source, library, program = run.path / "lock.c", run.path / "lock.so", run.path / "program.py"
    source.write_text(INCLUDES + LOCKS[kind] + FCNTL)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    program.write_text(WRITE_AND_READ)
    preload = os.environ | {"LD_PRELOAD": str(library)}
    preload.pop("HDF5_USE_FILE_LOCKING", None)
    if kind == "blocked":
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run([sys.executable, "-c", OPEN_LOCKED, path], env=preload, timeout=4)
    holder = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, path], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        done = subprocess.run(
            [sys.executable, program, run.path],
            env=preload, capture_output=True, text=True, timeout=90,
        )  # fmt: skip
    finally:
        holder.kill()
        holder.wait(timeout=60)
    assert done.stdout.split() == ["1", "1", "1", "1", "2", "True"], done.stderr


def test_a_published_name_is_never_written_again(run: RunDirectory, make_group: Make) -> None:
    path = publish(run, 0, [make_group(1)])
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="never written again"):
        write_shard(path, [make_group(2)], ATTRIBUTES)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("done_before", [True, False], ids=["it was done", "it was not"])
def test_an_ambiguous_rename_is_settled_by_looking(
    run: RunDirectory, make_group: Make, monkeypatch: pytest.MonkeyPatch, done_before: bool
) -> None:
    real = files.disk.rename

    def ambiguous(old: Path, new: Path) -> None:
        if done_before:
            real(old, new)
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(files.disk, "rename", ambiguous)
    if done_before:
        assert not is_refused(publish(run, 0, [make_group(1)]))
    else:
        with pytest.raises(FileNotFoundError):
            publish(run, 0, [make_group(1)])
        assert list(run.shards.rglob("*.*")) == []


def test_a_name_that_never_appears_after_its_rename_is_reported_as_bad_rows(
    run: RunDirectory, make_group: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.disk, "rename", lambda old, new: None)
    path = publish(run, 0, [make_group(1)])
    with pytest.raises(BadRows, match="No such file"):
        Store(run, retry_seconds=0.1).read([(name_of(run, path), 0)])
    assert Store(run).adoptable(0, lambda _: True).notices == []


def test_notes_that_cannot_be_written_do_not_cost_the_group(run: RunDirectory, make_group: Make) -> None:
    group = make_group(1, samples=3)
    group.example = "half \ud800 and nul \0"
    circle: dict[str, Any] = {}
    circle["self"] = circle
    for trajectory, info in zip(group.trajectories, (circle, {(1, 2): 3}, {"text": "\udfff"}), strict=True):
        trajectory.info = info
    path = publish(run, 0, [group])
    with Shard(path) as shard:
        shard.verify()
        (found,) = shard.groups()
    assert found.example == "half \\ud800 and nul \\0"
    assert "unwritable" in found.trajectories[0].info
    assert "unwritable" in found.trajectories[1].info
    assert found.trajectories[2].info == {"text": "\udfff"}
