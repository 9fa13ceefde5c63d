"""Devices: the choice, the facts, and real groups on what is here."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest
import torch

from pekoe.pipeline.devices.cpu_device import CpuDevice
from pekoe.pipeline.devices.cuda_device import CudaDevice
from pekoe.pipeline.devices.device import Device, choose, for_backend
from pekoe.pipeline.devices.npu_device import NpuDevice

KINDS = {"cpu": CpuDevice, "cuda": CudaDevice, "npu": NpuDevice}


@pytest.mark.parametrize("kind", KINDS)
def test_facts_without_touching_the_vendor(kind):
    device = choose(kind)
    assert isinstance(device, KINDS[kind])
    assert device.kind == kind
    assert for_backend(device.process_group_backend).kind == kind
    defaults = device.environment_defaults("/scratch/me")
    caches = [value for name, value in defaults.items() if name.endswith(("_DIR", "_PATH"))]
    assert len(caches) >= 3
    assert all(value.startswith("/scratch/me/") for value in caches)
    assert all(isinstance(value, str) for value in defaults.values())


def test_facts_need_no_torch():
    script = (
        "import sys\nfrom pekoe.pipeline.devices.device import choose\n"
        "for kind in ('cpu', 'cuda', 'npu'):\n    choose(kind).environment_defaults('/x')\n"
        "assert 'torch' not in sys.modules and 'torch_npu' not in sys.modules, 'imported'"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_auto_takes_the_first_usable(monkeypatch):
    usable = {"cuda": False, "npu": False}
    monkeypatch.setattr(CudaDevice, "is_available", lambda self: usable["cuda"])
    monkeypatch.setattr(NpuDevice, "is_available", lambda self: usable["npu"])
    assert choose("auto").kind == "cpu"
    usable["npu"] = True
    assert choose("auto").kind == "npu"
    usable["cuda"] = True
    assert choose("auto").kind == "cuda"


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"cluster\.device: 'tpu' is not known; allowed: auto, cpu, cuda, npu"):
        choose("tpu")
    with pytest.raises(ValueError, match="'mpi' is not known; allowed: gloo, hccl, nccl"):
        for_backend("mpi")


@pytest.mark.skipif(NpuDevice().is_available(), reason="says what happens on a host without an NPU")
def test_absent_vendor_says_so():
    with pytest.raises(RuntimeError, match="npu needs torch_npu and CANN"):
        choose("npu").set_current(0)


def test_cpu_memory_and_its_group():
    device: Device = choose("cpu")
    memory = device.memory()
    assert 0 < memory["allocated"] <= memory["peak"] <= memory["total"]
    assert 0 < memory["free"] <= memory["total"]
    assert device.torch_device(3) == torch.device("cpu")
    assert (device.count(), device.attention_choice(), device.rng_state(), device.identity(0)) == (1, "sdpa", None, "")
    store = torch.distributed.HashStore()
    group = device.process_group(store, 0, 1, timedelta(seconds=5), "127.0.0.1")
    value = torch.ones(3)
    group.broadcast([value], torch.distributed.BroadcastOptions()).wait()
    assert value.tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError):
        device.process_group(store, 0, 2, timedelta(seconds=0.5), "127.0.0.1")
    with pytest.raises(ValueError, match="no generator of its own"):
        device.set_rng_state(torch.get_rng_state())


def test_ranks_on_processors_give_large_tensors_back_to_the_system() -> None:
    """The size is read when a process starts; glibc's own limit grows, and with it the holes between tensors."""
    assert choose("cpu").environment_defaults("/x")["MALLOC_MMAP_THRESHOLD_"] == str(1 << 20)
    assert "MALLOC_MMAP_THRESHOLD_" not in choose("cuda").environment_defaults("/x")
