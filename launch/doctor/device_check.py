"""Devices: which ones each rank sees, how much of their memory is free, and who holds the rest."""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Sequence

import msgspec
import psutil  # type: ignore[import-untyped]

from pekoe.launch.environment import Facts, guess_variable, pick_device
from pekoe.launch.slurm_commands import SlurmError, ask
from pekoe.pipeline.devices.device import choose
from pekoe.pipeline.runs.finding import Finding, first_few, note, ok, problem

AREA = "devices"
ASK_SECONDS = 10.0
MEBI = 1 << 20
HELD_BYTES = 1 << 30
"""So much held by others is worth a word: a driver alone holds less."""


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
    """Index or UUID."""
    pid: int
    name: str
    bytes: int
    user: str
    """"" where the process cannot be seen from here (another user's, or in another container)."""


class DeviceFacts(msgspec.Struct):
    """Of one host."""

    host: str
    memory: list[DeviceMemory] = []
    holders: list[Holder] = []
    error: str = ""
    """Why the vendor's command gave nothing; "" also where there is none."""


class RankDevice(msgspec.Struct):
    """The device that a rank would take."""

    variable: str = ""
    """Of visible devices; "" = the device kind has none."""
    visible: list[str] | None = None
    """None = not set."""
    name: str = ""
    """As it stands in the list."""
    error: str = ""


def measure(host: str) -> DeviceFacts:
    """Asks `nvidia-smi` or `npu-smi`, whichever is there."""
    try:
        if shutil.which("nvidia-smi"):
            return DeviceFacts(host, *_nvidia())
        if shutil.which("npu-smi"):
            return DeviceFacts(host, *_ascend())
    except (SlurmError, ValueError, IndexError) as error:
        return DeviceFacts(host, error=str(error))
    return DeviceFacts(host)


def device_of(facts: Facts, kind: str) -> RankDevice:
    """Of this rank, picked as a run would; touches no device."""
    variable = (guess_variable(facts) or "") if kind == "auto" else choose(kind).visible_devices_variable
    listed = facts.visible.get(variable)
    found = RankDevice(variable, None if listed is None else list(listed))
    if listed is not None:
        try:
            found.name = pick_device(facts, variable).name
        except ValueError as error:
            found.error = str(error)
    return found


def judge(
    hosts: Sequence[DeviceFacts], ranks: Sequence[tuple[str, RankDevice]], counts: Sequence[tuple[str, str, int]],
    wanted: str, per_node: int,
) -> list[Finding]:  # fmt: skip
    """`ranks`: (host, its device) by rank; `counts`: (host, kind, devices that torch sees); `wanted`:
    cluster.device."""
    found = [_count(*count, wanted, per_node) for count in counts]
    kinds = {kind for _, kind, _ in counts}
    if kinds <= {"cpu"}:
        return found
    found += _of_ranks(ranks)
    for facts in hosts:
        if facts.error:
            found.append(note(AREA, f"{facts.host}: memory of devices is not known: {facts.error}"))
        found += [_memory(facts, one) for one in facts.memory]
    return found


def holders_of(facts: DeviceFacts, device: DeviceMemory) -> list[Holder]:
    return [holder for holder in facts.holders if holder.device in (device.index, device.uuid)]


def _count(host: str, kind: str, count: int, wanted: str, per_node: int) -> Finding:
    if kind == "cpu":
        return ok(AREA, f"{host}: cpu")
    if count == 0:
        step = "ask for devices (cluster.slurm.gres), or see that the driver is there; cluster.device: cpu uses none"
        return problem(AREA, f"{host}: cluster.device is {wanted}, but torch sees no {kind} device", step)
    if count < per_node:
        text = f"{host}: torch sees {count} {kind} devices; cluster.n_gpus_per_node is {per_node}"
        return note(AREA, text, f"cluster.n_gpus_per_node={count}, or ask for more (cluster.slurm.gres)")
    return ok(AREA, f"{host}: torch sees {count} {kind} devices")


def _of_ranks(ranks: Sequence[tuple[str, RankDevice]]) -> list[Finding]:
    wrong = [f"rank {rank}: {device.error}" for rank, (_, device) in enumerate(ranks) if device.error]
    if wrong:
        return [
            problem(AREA, first_few(wrong, 2), "as many ranks on a node as it has devices: cluster.n_gpus_per_node")
        ]
    named = [(host, device.name) for host, device in ranks if device.name]
    if not named:
        return [ok(AREA, "no list of visible devices is set: ranks take them in order")]
    listed = ", ".join(f"rank {n}: {host}/{device.name}" for n, (host, device) in enumerate(ranks) if device.name)
    return [ok(AREA, f"{ranks[0][1].variable} gives {listed}")]


def _memory(facts: DeviceFacts, device: DeviceMemory) -> Finding:
    text = f"{facts.host}: device {device.index} ({device.name}): {_gib(device.free)} of {_gib(device.total)} free"
    holders = holders_of(facts, device)
    held = device.total - device.free
    if held < HELD_BYTES and not holders:
        return ok(AREA, text)
    lines = [f"pid {h.pid} ({h.name}{f', {h.user}' if h.user else ''}) holds {_gib(h.bytes)}" for h in holders]
    if not holders:
        text += "; the holder cannot be seen from here"
        return note(AREA, text, "another job's, or a process outside this container: look on the node, or exclude it")
    pids = " ".join(str(holder.pid) for holder in holders)
    step = f"on {facts.host}, if it is yours and left over: kill {pids}; else cluster.slurm.exclude={facts.host}"
    return note(AREA, "\n".join([text, *lines]), step)


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def _nvidia() -> tuple[list[DeviceMemory], list[Holder]]:
    form = "--format=csv,noheader,nounits"
    devices = ask(["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free", form], ASK_SECONDS)
    apps = ask(["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", form], ASK_SECONDS)
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
        Holder(uuid, int(pid), name, int(used) * MEBI if used.isdigit() else 0, _user(int(pid)))
        for uuid, pid, name, used in rows
    ]


def _ascend() -> tuple[list[DeviceMemory], list[Holder]]:
    return ascend_tables(ask(["npu-smi", "info"], ASK_SECONDS))


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
            holders.append(Holder(match[1], pid, match[4], int(match[5]) * MEBI, _user(pid)))
        elif (match := ASCEND_MEMORY.match(line)) and number:
            used, total = int(match[2]) * MEBI, int(match[3]) * MEBI
            devices.append(DeviceMemory(number, "", name, total, total - used))
            number = ""
        elif (match := ASCEND_NAME.match(line)) and not match[2].isdigit():
            number, name = match[1], match[2]
    return devices, holders


def _user(pid: int) -> str:
    try:
        return str(psutil.Process(pid).username())
    except (psutil.Error, KeyError):
        return ""
