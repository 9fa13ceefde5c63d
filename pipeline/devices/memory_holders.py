"""How much memory of a device, or of the host, is free, and which processes hold the rest.

The vendors' own commands are asked (`nvidia-smi`, `npu-smi`), so this starts processes: not for a rank that has
initialised MPI, unless the run ends for it anyway. The host's memory is read from /proc and the control group.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped]

ASK_SECONDS = 10.0
MEBI = 1 << 20
COMMAND_LENGTH = 120
NUM_HOST_HOLDERS = 3
GROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file"),
)
"""Files of a control group, version 2 and 1: limit, use, and what of the use is cache that can be dropped."""


class DeviceMemory(msgspec.Struct):
    """One device of a host, by the vendor's own command."""

    index: str
    uuid: str
    name: str
    total: int
    """Bytes."""
    free: int


class Holder(msgspec.Struct):
    """A process that holds memory of a device."""

    device: str
    """Index or UUID; empty for the host's memory."""
    pid: int
    name: str
    """Of the program, or the beginning of its command line."""
    bytes: int
    user: str
    """"" where the process cannot be seen from here (another user's, or in another container)."""

    def sentence(self) -> str:
        return f"pid {self.pid} ({self.name}{f', {self.user}' if self.user else ''}) holds {gib(self.bytes)}"


def gib(count: float) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def holders_of(holders: Sequence[Holder], device: DeviceMemory) -> list[Holder]:
    return [holder for holder in holders if holder.device in (device.index, device.uuid)]


def ask_vendor() -> tuple[list[DeviceMemory], list[Holder]]:
    """Of this host, by whichever vendor's command is there; nothing where none is. OSError or ValueError when it gives
    no answer, or one that cannot be read."""
    try:
        if shutil.which("nvidia-smi"):
            return _nvidia()
        if shutil.which("npu-smi"):
            return ascend_tables(_ask(["npu-smi", "info"]))
    except IndexError as error:
        raise ValueError(f"the vendor's command gave a table of another form: {error}") from error
    return [], []


def _ask(arguments: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            list(arguments), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"{' '.join(arguments)}: no answer within {ASK_SECONDS:.0f} s") from None
    if done.returncode:
        raise OSError(f"{' '.join(arguments)}: {(done.stderr or done.stdout).strip() or done.returncode}")
    return done.stdout


def _nvidia() -> tuple[list[DeviceMemory], list[Holder]]:
    form = "--format=csv,noheader,nounits"
    devices = _ask(["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free", form])
    apps = _ask(["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", form])
    return nvidia_devices(devices), nvidia_holders(apps)


def nvidia_devices(text: str) -> list[DeviceMemory]:
    """Lines `index, uuid, name, MiB, MiB`."""
    rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]
    return [
        DeviceMemory(index, uuid, name, int(total) * MEBI, int(free) * MEBI) for index, uuid, name, total, free in rows
    ]


def nvidia_holders(text: str) -> list[Holder]:
    """Lines `uuid, pid, name, MiB`; memory may be `[N/A]` in containers."""
    rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if len(row) == 4]
    return [
        Holder(uuid, int(pid), name, int(used) * MEBI if used.isdigit() else 0, user_of(int(pid)))
        for uuid, pid, name, used in rows
    ]


ASCEND_MEMORY = re.compile(r"^\|\s*(\d+)\s[^|]*\|[^|]*\|[^|]*?(\d+)\s*/\s*(\d+)\s*\|\s*$")
ASCEND_NAME = re.compile(r"^\|\s*(\d+)\s+(\S+)\s*\|\s*(\S+)\s*\|")
ASCEND_HOLDER = re.compile(r"^\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|\s*(\S*)\s*\|\s*(\d+)\s*\|")


def ascend_tables(text: str) -> tuple[list[DeviceMemory], list[Holder]]:
    """The tables of `npu-smi info`: two lines a device (name; chip with `used / total` MB of memory, the last such
    pair on the line), then a line a process."""
    devices: list[DeviceMemory] = []
    holders: list[Holder] = []
    number, name = "", ""
    for line in text.splitlines():
        if match := ASCEND_HOLDER.match(line):
            pid = int(match[3])
            holders.append(Holder(match[1], pid, match[4], int(match[5]) * MEBI, user_of(pid)))
        elif (match := ASCEND_MEMORY.match(line)) and number:
            used, total = int(match[2]) * MEBI, int(match[3]) * MEBI
            devices.append(DeviceMemory(number, "", name, total, total - used))
            number = ""
        elif (match := ASCEND_NAME.match(line)) and not match[2].isdigit():
            number, name = match[1], match[2]
    return devices, holders


def user_of(pid: int) -> str:
    try:
        return str(psutil.Process(pid).username())
    except (psutil.Error, KeyError):
        return ""


def host_memory() -> tuple[int, int]:
    """(free, total) bytes: what programs of this control group can still have, cache that the kernel drops for them
    included."""
    host = psutil.virtual_memory()
    free, total = int(host.available), int(host.total)
    for folder in _group_folders():
        for limit_file, use_file, stat_file, cache in GROUPS:
            with suppress(OSError, ValueError):
                limit = int((folder / limit_file).read_text())
                stat = dict(line.split() for line in (folder / stat_file).read_text().splitlines())
                used = int((folder / use_file).read_text()) - int(stat.get(cache, 0))
                if limit < total:
                    free, total = min(free, limit - used), limit
    return max(free, 0), total


def _group_folders() -> list[Path]:
    """The control groups of this process and those above them, as far as they are mounted here."""
    found: list[Path] = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root = Path("/sys/fs/cgroup", controllers)
            folder = root / path.lstrip("/")
            found += [one for one in (folder, *folder.parents) if one.is_relative_to(root) and one.is_dir()]
    return found


def host_holders(count: int = NUM_HOST_HOLDERS) -> list[Holder]:
    """The processes with the most resident memory, the largest first."""
    page = os.sysconf("SC_PAGE_SIZE")
    sizes: list[tuple[int, int]] = []
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit():
                sizes.append((int(Path("/proc", name, "statm").read_text().split()[1]) * page, int(name)))
    found = []
    for size, pid in sorted(sizes, reverse=True)[:count]:
        with suppress(OSError):
            words = Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ")
            command = words.decode(errors="replace").strip() or Path("/proc", str(pid), "comm").read_text().strip()
            found.append(Holder("", pid, command[:COMMAND_LENGTH], size, user_of(pid)))
    return found
