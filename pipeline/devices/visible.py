"""Which of the visible devices a rank takes: from the list that it sees, never from its local rank alone."""

from __future__ import annotations

from collections.abc import Mapping

from pekoe.pipeline.devices.device import Device


def visible_devices(device: Device, environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """Entries (ids or UUIDs) of the vendor's visible-devices variable; None when it is not set: all are visible.

    Raises ValueError on duplicates, on a UUID or an unsorted list where the vendor wants ascending numbers (Ascend).
    """
    variable = device.visible_devices_variable
    if not variable or variable not in environment:
        return None
    text = environment[variable]
    entries = tuple(entry.strip() for entry in text.split(",") if entry.strip())
    if len(set(entries)) != len(entries):
        raise ValueError(f"{variable}={text!r}: a device is named twice; name each once")
    if device.kind == "npu":
        if not all(entry.isdecimal() for entry in entries):
            raise ValueError(f"{variable}={text!r}: allowed are numbers, ascending, split by commas")
        if [int(entry) for entry in entries] != sorted(int(entry) for entry in entries):
            raise ValueError(f"{variable}={text!r}: must be ascending, e.g. {','.join(sorted(entries, key=int))}")
    return entries


def device_index(num_visible: int, local_rank: int, ranks_on_node: int, variable: str) -> int:
    """Index, within what this process sees, of the device that it takes.

    One visible device is taken by whoever sees it (Slurm's `--gpus-per-task=1` gives each task its own, always
    numbered 0; the transfer group's check of physical identities finds tasks that share one). Otherwise ranks take
    one each.
    """
    if not 0 <= local_rank < ranks_on_node:
        raise ValueError(f"local rank {local_rank} of {ranks_on_node} ranks on the node")
    if num_visible < 1:
        raise ValueError(f"{variable}: no device is visible to local rank {local_rank}")
    if num_visible == 1:
        return 0
    if num_visible < ranks_on_node:
        raise ValueError(
            f"{variable}: {ranks_on_node} ranks on this node but only {num_visible} devices are visible; "
            "start fewer ranks per node or ask for more devices"
        )
    return local_rank
