"""Whether Triton can launch a kernel on a device type: it compiles it then, and by a C compiler what launches it."""

from __future__ import annotations

import torch

from pekoe.kernels.packing import triton_ragged


def try_launch(device_type: str) -> None:
    """Runs the smallest kernel there is, on the current device. Raises whatever stands in its way; RuntimeError for a
    wrong result."""
    found = triton_ragged.position_ids(torch.tensor([0, 2, 5], device=device_type), 5)
    if found.tolist() != [0, 1, 0, 1, 2]:
        raise RuntimeError(f"positions of sequences of 2 and 3 tokens came out as {found.tolist()}")
