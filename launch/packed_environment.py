"""Unpacks an archived Python environment once on each node and becomes its interpreter: no thousand small files over
the shared filesystem for every rank.

    python -I -S packed_environment.py ARCHIVE [--seconds N] -- python -m pekoe.launch.rank RUN ATTEMPT

It stands in front of a rank's command and runs before anything is installed: the standard library alone. The first
process of a node unpacks, the others wait; it then replaces itself, so that pid, signals and open descriptors are the
rank's. An unpacked environment is known by the archive's path, size and time: later jobs of the same user find it. One
that no living process uses is deleted when another is unpacked.

Exit code 78 when the archive or the program in it is not there, 1 when it could not be unpacked.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time

CONFIGURATION = 78
FAILURE = 1
SECONDS = 600.0
POLL_SECONDS = 0.2
REFUSED_SECONDS = 300.0
"""So long nobody tries again to unpack into a place that was too small."""
USAGE = "packed_environment.py ARCHIVE [--seconds N] -- python ARGS..."


class PackedEnvironmentError(Exception):
    """What is wrong, for people, and the exit code."""

    def __init__(self, text: str, code: int = FAILURE) -> None:
        super().__init__(text)
        self.code = code


def main(arguments: list[str]) -> None:
    """Does not return: the process becomes the program inside, or exits."""
    try:
        archive, seconds, command = parse(arguments)
        root = unpacked(archive, seconds)
        program = find_program(root, command[0])
        environ = inside(root, os.environ)
        sys.stdout.flush()
        os.execve(program, [program, *command[1:]], environ)
    except PackedEnvironmentError as error:
        print(f"pekoe: cluster.slurm.packed_environment: {error}", file=sys.stderr, flush=True)
        sys.exit(error.code)


def parse(arguments: list[str]) -> tuple[str, float, list[str]]:
    """(archive, seconds, command). PackedEnvironmentError for anything else than USAGE."""
    own, separator, command = arguments[:], "--" in arguments, []
    if separator:
        cut = arguments.index("--")
        own, command = arguments[:cut], arguments[cut + 1 :]
    try:
        seconds = float(own[2]) if own[1:2] == ["--seconds"] else SECONDS
        well_formed = bool(command) and len(own) in (1, 3) and (len(own) == 1 or own[1] == "--seconds")
    except (ValueError, IndexError):
        well_formed = False
    if not well_formed:
        raise PackedEnvironmentError(f"{' '.join(arguments)!r} is not: {USAGE}", CONFIGURATION)
    return os.path.abspath(own[0]), seconds, command


def unpacked(archive: str, seconds: float) -> str:
    """The folder of the environment on a local disk, held by this process and by what it becomes."""
    try:
        status = os.stat(archive)
    except OSError as error:
        raise PackedEnvironmentError(f"{archive}: {error.strerror}", CONFIGURATION) from None
    key = f"{os.path.realpath(archive)}\n{status.st_size}\n{status.st_mtime_ns}"
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    deadline = time.monotonic() + seconds
    troubles = []
    for folder in places():
        try:
            return Place(folder, name).take(archive, deadline)
        except OSError as error:
            troubles.append(f"{folder}: {error.strerror or error}")
    raise PackedEnvironmentError(f"{archive} found no room to be unpacked: {'; '.join(troubles)}")


def places() -> list[str]:
    """Folders on local disks that may hold environments, best first; only this user can look inside."""
    bases = [os.environ.get("SLURM_TMPDIR"), os.environ.get("TMPDIR"), "/tmp", "/dev/shm"]
    distinct = dict.fromkeys(base for base in bases if base)
    return [os.path.join(base, f"pekoe-{os.getuid()}-environments") for base in distinct]


class Place:
    """One environment in one folder: `NAME/` holds it, `NAME.done` says that it is whole, `NAME.lock` who may touch it.

    The lock is exclusive while somebody unpacks or deletes, and shared while processes run from it. It ends with its
    processes, however they end; both sides are on one node, where flock excludes.
    """

    def __init__(self, folder: str, name: str) -> None:
        self.folder = folder
        self.name = name
        self.root = os.path.join(folder, name)
        self.done = f"{self.root}.done"
        self.refused = f"{self.root}.refused"

    def take(self, archive: str, deadline: float) -> str:
        """The unpacked root. OSError where this place cannot hold it, PackedEnvironmentError after the deadline."""
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        if os.stat(self.folder).st_uid != os.getuid():
            raise OSError(0, "belongs to another user")
        lock = os.open(f"{self.root}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        os.set_inheritable(lock, True)
        while True:
            if os.path.exists(self.done):
                if take_lock(lock, fcntl.LOCK_SH) and os.path.exists(self.done):
                    return self.root
            elif take_lock(lock, fcntl.LOCK_EX):
                self._unpack_alone(archive, lock)
                continue
            if time.monotonic() > deadline:
                os.close(lock)
                raise PackedEnvironmentError(f"{self.root} was not unpacked in time by another process of this node")
            time.sleep(POLL_SECONDS)

    def _unpack_alone(self, archive: str, lock: int) -> None:
        """With the lock; another may have done it before."""
        if os.path.exists(self.done):
            return
        try:
            self._look_whether_refused()
            self._delete_unused()
            shutil.rmtree(self.root, ignore_errors=True)
            os.mkdir(self.root)
            began = time.monotonic()
            unpack(archive, self.root, lock)
            print(f"pekoe: {archive} unpacked in {time.monotonic() - began:.1f} s: {self.root}", file=sys.stderr)
            with open(self.done, "w"):
                pass
        except OSError:
            shutil.rmtree(self.root, ignore_errors=True)
            touch(self.refused)
            os.close(lock)
            raise

    def _look_whether_refused(self) -> None:
        try:
            age = time.time() - os.stat(self.refused).st_mtime
        except FileNotFoundError:
            return
        if 0 <= age < REFUSED_SECONDS:
            raise OSError(0, "another process of this node could not unpack it here")

    def _delete_unused(self) -> None:
        for entry in os.listdir(self.folder):
            name, extension = os.path.splitext(entry)
            if extension != ".lock" or name == self.name:
                continue
            lock = os.open(os.path.join(self.folder, entry), os.O_RDWR)
            if take_lock(lock, fcntl.LOCK_EX):
                for part in (f"{name}.done", f"{name}.refused"):
                    remove(os.path.join(self.folder, part))
                shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)
            os.close(lock)


def unpack(archive: str, root: str, lock: int) -> None:
    """Into an empty folder. OSError with the last words of the program that failed."""
    if archive.endswith((".squashfs", ".sqsh", ".sqfs")):
        run(["unsquashfs", "-no-progress", "-no-xattrs", "-force", "-dest", root, archive], lock)
    else:
        run(["tar", "--extract", "--no-same-owner", "--file", archive, "--directory", root], lock)
    home = environment_home(root)
    relocate = os.path.join(home, "bin", "conda-unpack")
    if os.path.exists(relocate):
        run([find_program(root, "python"), relocate], lock)


def run(command: list[str], lock: int) -> None:
    """The program holds the lock, too: when this process is killed, nobody unpacks beside one that still writes."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, pass_fds=[lock]
        )
    except FileNotFoundError:
        raise PackedEnvironmentError(f"{command[0]} is not installed on this node", CONFIGURATION) from None
    if done.returncode:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise OSError(0, f"{command[0]}: {last}")


def environment_home(root: str) -> str:
    """The folder with `bin`: the root itself, or the only folder in it that has one."""
    inner = [root, *(os.path.join(root, name) for name in sorted(os.listdir(root)))]
    found = [folder for folder in inner if os.path.isdir(os.path.join(folder, "bin"))]
    if not found or (found[0] != root and len(found) > 1):
        raise PackedEnvironmentError(
            "the archive must hold one environment: bin/python at its root, or in its only folder", CONFIGURATION
        )
    return found[0]


def find_program(root: str, name: str) -> str:
    """A program of the environment, by its name."""
    home = environment_home(root)
    path = os.path.join(home, "bin", os.path.basename(name))
    if not os.access(path, os.X_OK):
        where = f"bin/{os.path.basename(name)}"
        target = os.path.realpath(path)
        why = f"points to {target}, which this node has not" if os.path.islink(path) else "is not a program in it"
        raise PackedEnvironmentError(f"{where} {why}", CONFIGURATION)
    return path


def inside(root: str, environ: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """The variables of a process that runs from the environment."""
    home = environment_home(root)
    kept = {name: value for name, value in environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
    kept["PATH"] = os.path.join(home, "bin") + os.pathsep + environ.get("PATH", os.defpath)
    kept["VIRTUAL_ENV" if os.path.exists(os.path.join(home, "pyvenv.cfg")) else "CONDA_PREFIX"] = home
    return kept


def take_lock(lock: int, kind: int) -> bool:
    """At once, or not at all."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def touch(path: str) -> None:
    """As far as there is room."""
    try:
        with open(path, "w"):
            os.utime(path)
    except OSError as error:
        print(f"pekoe: {path}: {error.strerror}", file=sys.stderr)


def remove(path: str) -> None:
    if os.path.exists(path):
        os.remove(path)


if __name__ == "__main__":
    main(sys.argv[1:])
