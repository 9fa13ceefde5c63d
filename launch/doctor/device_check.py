"""Devices: which ones each rank sees, how much of their memory is free, and who holds the rest."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pekoe.launch.environment import Facts, guess_variable, pick_device
from pekoe.pipeline.devices.device import choose
from pekoe.pipeline.devices.memory_holders import DeviceMemory, Holder, ask_vendor, gib, holders_of
from pekoe.pipeline.runs.finding import Finding, first_few, note, ok, problem

AREA = "devices"
HELD_BYTES = 1 << 30
"""So much held by others is worth a word: a driver alone holds less."""


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
        return DeviceFacts(host, *ask_vendor())
    except (OSError, ValueError) as error:
        return DeviceFacts(host, error=str(error))


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
    text = f"{facts.host}: device {device.index} ({device.name}): {gib(device.free)} of {gib(device.total)} free"
    holders = holders_of(facts.holders, device)
    held = device.total - device.free
    if held < HELD_BYTES and not holders:
        return ok(AREA, text)
    lines = [holder.sentence() for holder in holders]
    if not holders:
        text += "; the holder cannot be seen from here"
        return note(AREA, text, "another job's, or a process outside this container: look on the node, or exclude it")
    pids = " ".join(str(holder.pid) for holder in holders)
    step = f"on {facts.host}, if it is yours and left over: kill {pids}; else cluster.slurm.exclude={facts.host}"
    return note(AREA, "\n".join([text, *lines]), step)
