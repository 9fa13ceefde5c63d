"""The random generators of a process, taken and put back: python's, numpy's, torch's, and the device's."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import torch

from pekoe.pipeline.devices.device import Device


class RngState(msgspec.Struct, frozen=True):
    """Everything needed to draw the same numbers again; msgpack-able, a few kilobytes."""

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, bytes, int, int, float]
    torch: bytes
    device: bytes = b""
    """Empty where the device has no generator of its own."""


def capture_rng_state(device: Device) -> bytes:
    """State of all generators of this process, encoded."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, numbers, gauss_next = random.getstate()
    on_device = device.rng_state()
    state = RngState(
        python=(version, tuple(numbers), gauss_next),
        numpy=(str(name), np.asarray(keys, dtype="<u4").tobytes(), int(position), int(has_gauss), float(gauss)),
        torch=torch.get_rng_state().numpy().tobytes(),
        device=b"" if on_device is None else on_device.cpu().numpy().tobytes(),
    )
    return msgspec.msgpack.encode(state)


def restore_rng_state(data: bytes, device: Device) -> None:
    """Puts back what `capture_rng_state` gave; raises ValueError when it comes from another kind of device."""
    state = msgspec.msgpack.decode(data, type=RngState)
    if bool(state.device) != (device.rng_state() is not None):
        origin = "with" if state.device else "without"
        raise ValueError(f"random state: captured {origin} a device generator, restored on device {device.kind}")
    random.setstate(state.python)
    name, keys, position, has_gauss, gauss = state.numpy
    np.random.set_state((name, np.frombuffer(keys, dtype="<u4"), position, has_gauss, gauss))
    torch.set_rng_state(torch.frombuffer(bytearray(state.torch), dtype=torch.uint8))
    if state.device:
        device.set_rng_state(torch.frombuffer(bytearray(state.device), dtype=torch.uint8))


def seed_generators(*seeds: int) -> None:
    """Starts all generators of this process anew, from numbers that name who draws and when."""
    state = np.random.SeedSequence(seeds).generate_state(3, np.uint32)
    random.seed(int(state[0]))
    np.random.seed(int(state[1]))
    torch.manual_seed(int(state[2]))
