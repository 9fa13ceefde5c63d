"""The single operations: what is durable when, what a reader waits for, and that nothing goes around the layer."""

from __future__ import annotations

import ast
import errno
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pekoe.pipeline import complete_folder, files
from pekoe.pipeline.messages import WrittenFile
from pekoe.pipeline.pins import Pin
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.start import HeadChoice
from pekoe.pipeline.train.checkpoint import Checkpoints
from pekoe.pipeline.trajectory.shard import Shard

sys.path.insert(0, str(Path(__file__).resolve().parent))

from crash_scenarios import write_checkpoint, write_shard_of
from faulty_disk import Crash, Fault, FaultyDisk, Lateness, installed

ROOT = Path(__file__).resolve().parents[2]

OWN_WRITES = {
    "pipeline/trajectory/hand_over.py": "groups on their way through the memory of a node: worth nothing after a crash",
    "pipeline/files.py": "the layer itself",
    "pipeline/config/show.py": "a page of the documentation, written by a developer's command",
    "pipeline/process_tree.py": "a setting of the kernel under /proc",
    "pipeline/rollout/engines/vllm/instance_group.py": "names of memory that the ranks of an engine share, taken away",
    "pipeline/observe/append_file.py": "cuts off a line that the layer could not write whole",
    "pipeline/observe/stack_request.py": "a question to a living rank, and its answer: worth nothing after a crash",
    "launch/numbered_files.py": "a number that only one can take: written by the layer, then linked to its name",
    "launch/shared_memory.py": "memory of a node that a killed MPI world has left",
    "launch/rank_log.py": "standard output and error of a rank, as they come",
    "launch/heartbeat_files.py": "what a rank says of itself every few seconds: worth nothing after a crash",
    "launch/error_record.py": "the last words of a rank: an exclusive name, without the layer's retries",
    "launch/supervisor.py": "notes to the launcher in a private folder of this node",
    "launch/guardian.py": "notes to the launcher in a private folder of this node",
    "launch/local.py": "notes to the launcher in a private folder of this node",
    "launch/doctor/filesystem_trial.py": "tries what the filesystem does with names, in a folder that goes again",
    "launch/node_cache.py": "compile caches on a disk of this node, and their locks",
    "launch/packed_environment.py": "what the archive holds, unpacked on a disk of this node; nothing is installed yet",
}
"""Files that write without the layer, with the reason why no fault need be injected there."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., FaultyDisk]]:
    """Makes a disk with a fault and puts it in place."""
    made: list[FaultyDisk] = []
    before = files.disk

    def make(fault: Fault | None = None, late: Lateness | None = None) -> FaultyDisk:
        made.append(FaultyDisk(tmp_path / "graveyard", fault, late))
        files.disk = made[-1]
        return made[-1]

    yield make
    files.disk = before
    for one in made:
        one.close()


def writes_around_the_layer(source: str) -> list[str]:
    """Calls that change the filesystem, by line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        text = ast.unparse(node.func)
        last = text.rpartition(".")[2]
        owner = text.rpartition(".")[0]
        modes = [arg.value for arg in [*node.args[:2], *(k.value for k in node.keywords)] if _is_mode(arg)]
        if (
            last in ("write_text", "write_bytes", "unlink", "rmtree", "copyfile", "copytree", "truncate", "symlink_to")
            or text in ("os.rename", "os.replace", "os.remove", "os.truncate", "os.link", "shutil.move", "shutil.copy")
            or (last in ("rename", "remove", "rmdir") and owner == "os")
            or (last == "open" and owner in ("", "os", "io") and any(set(mode) & set("wax+") for mode in modes))
            or (last == "open" and "O_CREAT" in ast.unparse(node))
            or last == "save_file"
        ) and not (owner == "files" or owner.endswith("files.disk")):
            found.append(f"line {node.lineno}: {text}")
    return found


def _is_mode(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and set(node.value) <= set("rwaxbt+")


def test_nothing_writes_around_the_layer() -> None:
    offences = {
        name: found
        for top in ("pipeline", "launch")
        for path in sorted((ROOT / top).rglob("*.py"))
        if (name := path.relative_to(ROOT).as_posix()) not in OWN_WRITES
        and (found := writes_around_the_layer(path.read_text()))
    }
    assert offences == {}


def test_the_list_of_exceptions_is_no_longer_than_needed() -> None:
    assert [name for name in OWN_WRITES if not writes_around_the_layer((ROOT / name).read_text())] == []


@pytest.mark.parametrize(
    "line",
    ["path.write_text('')", "os.replace(a, b)", "open(path, 'w')", "open(path, mode='ab')", "path.unlink()",
     "shutil.rmtree(a)", "save_file(tensors, path)", "os.open(path, os.O_CREAT | os.O_WRONLY)"],
)  # fmt: skip
def test_the_static_check_sees(line: str) -> None:
    assert writes_around_the_layer(line)


@pytest.mark.parametrize("line", ["files.write_bytes(p, b'')", "open(path, 'rb')", "text.replace('a', 'w')"])
def test_the_static_check_lets_pass(line: str) -> None:
    assert not writes_around_the_layer(line)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT])
def test_a_pointer_that_is_late_twice_is_read(tmp_path: Path, disk: Callable[..., FaultyDisk], code: int) -> None:
    files.write_json(tmp_path / "latest.json", {"step": 3})
    late = Lateness(code, tries=2)
    disk(late=late)
    assert files.read_json(tmp_path / "latest.json") == {"step": 3}
    assert late.looks[tmp_path / "latest.json"][0] == 3


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT])
def test_a_pointer_that_stays_away_is_an_error_in_time(
    tmp_path: Path, disk: Callable[..., FaultyDisk], code: int
) -> None:
    files.write_json(tmp_path / "latest.json", {})
    disk(late=Lateness(code, tries=10**9))
    began = time.monotonic()
    with pytest.raises(OSError, match=r"latest\.json") as caught:
        files.read_bytes(tmp_path / "latest.json", retry_seconds=0.4)
    assert caught.value.errno == code
    assert time.monotonic() - began < 30


def test_another_error_is_not_waited_for(tmp_path: Path, disk: Callable[..., FaultyDisk]) -> None:
    files.write_json(tmp_path / "latest.json", {})
    late = Lateness(errno.EIO, tries=10**9)
    disk(late=late)
    with pytest.raises(OSError, match="Input/output"):
        files.read_bytes(tmp_path / "latest.json")
    assert late.looks[tmp_path / "latest.json"][0] == 1


def test_the_marker_of_a_checkpoint_may_come_late(tmp_path: Path, disk: Callable[..., FaultyDisk]) -> None:
    """One rank (the head) says which checkpoint; another that does not see it yet waits, and decides nothing."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    checkpoints = Checkpoints(run, keep=1)
    part = checkpoints.begin(1)
    with files.create(part / "state") as file:
        file.write(b"x")
    path = checkpoints.commit(1, {}, [WrittenFile("state", file.num_bytes, file.digest)])
    disk(late=Lateness(errno.ENOENT, seconds=0.3))
    assert complete_folder.verify_share(path, 0, 1, retry_seconds=20) == []
    disk(late=Lateness(errno.ESTALE, tries=10**9))
    assert complete_folder.verify_share(path, 0, 1, retry_seconds=0.2) != []


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT, errno.EIO])
def test_one_failed_look_of_the_head_does_not_make_the_newest_checkpoint_a_damaged_one(
    tmp_path: Path, disk: Callable[..., FaultyDisk], code: int
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    checkpoints = Checkpoints(run, keep=2)
    for step in (1, 2):
        write_checkpoint(checkpoints, step)
    disk(late=Lateness(code, tries=2))
    choice = HeadChoice(Checkpoints(run, keep=2, attempt=1))
    assert choice.propose().path == "checkpoints/step-2"
    choice.settle()
    assert not any(run.set_aside.iterdir())


def test_nobody_returns_before_the_writer_is_done(tmp_path: Path) -> None:
    """A folder that appears a second later, as a whole."""
    folder = tmp_path / "step-1"
    part = tmp_path / "step-1.part"

    def write() -> None:
        time.sleep(0.5)
        files.make_folder(part)
        files.write_bytes(part / "state", b"x" * 1000)
        complete_folder.seal(part, {})
        time.sleep(0.5)
        files.publish(part, folder)

    writer = threading.Thread(target=write)
    began = time.monotonic()
    writer.start()
    assert complete_folder.verify(folder, deep=True, retry_seconds=30)["files"][0]["bytes"] == 1000
    assert time.monotonic() - began >= 1.0
    writer.join(60)


def test_a_full_disk_leaves_the_old_content_and_no_part(tmp_path: Path, disk: Callable[..., FaultyDisk]) -> None:
    path = tmp_path / "run.json"
    files.write_bytes(path, b"old")
    disk(Fault(1, errno.EDQUOT))
    with pytest.raises(OSError, match=r"run\.json") as caught:
        files.write_bytes(path, b"new, longer than before")
    assert files.is_full(caught.value)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["run.json"]


def test_after_the_crash_no_clean_up_happens(tmp_path: Path, disk: Callable[..., FaultyDisk]) -> None:
    """The disk of the tests is what it says: a killed process leaves its temporary file, cut in the middle."""
    disk(Fault(1))
    with pytest.raises(Crash):
        files.write_bytes(tmp_path / "a", b"12345678")
    (left,) = [entry for entry in tmp_path.iterdir() if entry.is_file()]
    assert left.name.endswith(files.PART)
    assert left.read_bytes() == b"1234"


def test_a_power_loss_takes_what_was_not_synced(tmp_path: Path, disk: Callable[..., FaultyDisk]) -> None:
    """The disk of the tests is what it says: without fsync, data and names go."""
    careless = disk()
    files.write_bytes(tmp_path / "kept", b"kept")
    file = careless.create(tmp_path / "data.part")
    careless.write(file, b"0123456789")
    file.close()
    careless.rename(tmp_path / "data.part", tmp_path / "data")
    careless.sync_folder(tmp_path)
    careless.remove(tmp_path / "kept")
    careless.make_folder(tmp_path / "folder")
    careless.rename(tmp_path / "data", tmp_path / "moved")
    careless.lose_power(seed=0)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data", "graveyard", "kept"]
    assert (tmp_path / "data").read_bytes() == b""
    assert (tmp_path / "kept").read_bytes() == b"kept"


def test_every_level_of_a_new_folder_is_durable(tmp_path: Path, disk: Callable[..., FaultyDisk]) -> None:
    careful = disk()
    files.make_folder(tmp_path / "a" / "b" / "c", mode=0o700)
    careful.lose_power(seed=0)
    assert (tmp_path / "a" / "b" / "c").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a").stat().st_mode & 0o777 != 0o700


def test_a_folder_can_be_put_away_again_after_a_part_of_it_stayed(
    tmp_path: Path, disk: Callable[..., FaultyDisk]
) -> None:
    """An open file of another node may keep a folder from going; its name is free nevertheless, also the next time."""
    for number in range(2):
        files.make_folder(tmp_path / "v-1")
        files.write_bytes(tmp_path / "v-1" / "x", b"x")
        disk(Fault(2, errno.EBUSY))
        files.put_away(tmp_path / "v-1")
        assert not (tmp_path / "v-1").exists()
        left = list(tmp_path.glob(f"v-1.*{files.DISCARDED}"))
        assert len(left) == number + 1
    disk()
    for folder in left:
        files.put_away(folder)
    assert not list(tmp_path.glob("v-1*"))


@pytest.mark.parametrize("at", range(6))
def test_no_part_of_a_folder_stands_under_its_name_at_any_instant(
    tmp_path: Path, disk: Callable[..., FaultyDisk], at: int
) -> None:
    files.make_folder(tmp_path / "v-1")
    for name in ("x", "y"):
        files.write_bytes(tmp_path / "v-1" / name, b"x")
    failing = disk(Fault(at))
    with suppress(Crash):
        files.put_away(tmp_path / "v-1")
    failing.lose_power(seed=0)
    assert failing.dead == (at < 5), failing.operations
    found = sorted(path.name for path in (tmp_path / "v-1").iterdir()) if (tmp_path / "v-1").exists() else None
    assert found == (["x", "y"] if at < 2 else None)


def test_a_replaced_folder_comes_back_after_a_crash_between_the_renames(
    tmp_path: Path, disk: Callable[..., FaultyDisk]
) -> None:
    for name, text in (("f", b"old"), ("f.part", b"new")):
        files.make_folder(tmp_path / name)
        files.write_bytes(tmp_path / name / "x", text)
    disk(Fault(2))
    with pytest.raises(Crash):
        files.replace_folder(tmp_path / "f.part", tmp_path / "f")
    disk()
    assert not (tmp_path / "f").exists()
    assert files.restore_folder(tmp_path / "f")
    assert (tmp_path / "f" / "x").read_bytes() == b"old"
    assert not files.restore_folder(tmp_path / "f")


def test_put_aside_on_a_full_disk_moves_and_tells_the_log(
    tmp_path: Path, disk: Callable[..., FaultyDisk], caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    (run.shards / "bad.h5").write_bytes(b"garbage")
    disk(Fault(0, errno.ENOSPC, lasting=True))
    with caplog.at_level(logging.WARNING):
        target = run.put_aside(run.shards / "bad.h5", "no seal at the end")
    assert target is not None
    assert target.read_bytes() == b"garbage"
    assert "no seal at the end" in caplog.text
    assert run.put_aside(run.shards / "bad.h5", "again") is None


def test_put_aside_makes_its_folder(tmp_path: Path) -> None:
    """Without it the move would fail like that of a file that is gone."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.set_aside.rmdir()
    (run.shards / "bad.h5").write_bytes(b"garbage")
    target = run.put_aside(run.shards / "bad.h5", "a reason")
    assert target is not None
    assert json.loads((run.set_aside / f"{target.name}.reason.json").read_text())["reason"] == "a reason"


def test_a_reader_that_never_says_it_is_done_holds_a_folder_for_a_time_only(tmp_path: Path) -> None:
    """Bounded disk use: after its patience the owner takes a silent reader for dead."""
    from pekoe.pipeline.pins import Pins

    files.make_folder(tmp_path / "v-1")
    Pin(tmp_path, "rank-3").hold(1)
    pins = Pins(tmp_path, patience_seconds=0.3)
    assert not pins.remove_unless_pinned(1, tmp_path / "v-1")
    assert (tmp_path / "v-1").is_dir()
    deadline = time.monotonic() + 20
    while not pins.remove_unless_pinned(1, tmp_path / "v-1"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not (tmp_path / "v-1").exists()


def test_a_thousand_trajectories_are_one_file(tmp_path: Path) -> None:
    """Inodes are bounded by flushes and writers, not by trajectories."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    write_shard_of(run, 0, list(range(500)))
    assert [path.name for path in run.shards.rglob("*") if path.is_file()] == ["000000.h5"]
    with Shard(run.shards / "0-rank-1" / "000000.h5") as shard:
        assert shard.num_rows == 1000


def test_installed_puts_the_disk_back(tmp_path: Path) -> None:
    before, other = files.disk, FaultyDisk(tmp_path / "graveyard")
    with installed(other):
        assert files.disk is other
    assert files.disk is before
