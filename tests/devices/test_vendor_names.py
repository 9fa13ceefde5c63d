"""Vendor interfaces are named in pipeline/devices only."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENDOR = re.compile(r"torch\.(cuda|npu)\.|import torch_npu|ProcessGroup(NCCL|HCCL|Gloo)\b")


def test_no_vendor_outside_devices():
    files = [path for folder in ("pipeline", "launch") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 10
    found = [str(path.relative_to(ROOT)) for path in files if VENDOR.search(path.read_text())]
    assert [path for path in found if not path.startswith("pipeline/devices/")] == []
    assert "pipeline/devices/cuda_device.py" in found
