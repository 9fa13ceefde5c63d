"""Free memory of the host and of devices, and who holds the rest."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pekoe.pipeline.devices import memory_holders
from pekoe.pipeline.devices.device import choose
from pekoe.pipeline.devices.memory_holders import Holder, ask_vendor, holders_of, host_holders, host_memory

MEBI = 1 << 20


def test_the_largest_processes_are_named_with_user_and_command() -> None:
    size = 200 * MEBI
    code = f"a=bytearray(b'x')*{size};print(1, flush=True);input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "a-large-holder"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        (found,) = (holder for holder in host_holders(1000) if holder.pid == process.pid)
    finally:
        process.communicate(b"\n", timeout=60)
    assert "a-large-holder" in found.name
    assert found.user == psutil.Process().username()
    assert size <= found.bytes < size + 100 * MEBI
    assert found.sentence().endswith(f", {found.user}) holds 0.2 GiB")
    sizes = [holder.bytes for holder in host_holders(5)]
    assert len(sizes) == 5
    assert sizes == sorted(sizes, reverse=True)


def test_what_is_free_falls_by_what_is_taken() -> None:
    free, total = host_memory()
    assert 0 < free <= total <= psutil.virtual_memory().total
    assert choose("cpu").room(0)[1] == total


def test_a_control_group_limits_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "job"
    group.mkdir()
    (group / "memory.max").write_text(f"{64 * MEBI}\n")
    (group / "memory.current").write_text(f"{50 * MEBI}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {20 * MEBI}\n")
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(memory_holders, "_group_folders", lambda: [group, tmp_path])
    assert host_memory() == (34 * MEBI, 64 * MEBI)
    (group / "memory.max").unlink()
    (group / "memory.limit_in_bytes").write_text(str(32 * MEBI))
    (group / "memory.usage_in_bytes").write_text(str(31 * MEBI))
    (group / "memory.stat").write_text(f"total_inactive_file {1 * MEBI}\n")
    assert host_memory() == (2 * MEBI, 32 * MEBI)


def test_a_vendor_that_hangs_or_refuses_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "npu-smi"
    command.write_text("#!/bin/sh\necho no driver >&2\nexit 3\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    with pytest.raises(OSError, match="npu-smi info: no driver"):
        ask_vendor()
    command.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(memory_holders, "ASK_SECONDS", 0.3)
    started = time.monotonic()
    with pytest.raises(OSError, match="no answer within"):
        ask_vendor()
    assert time.monotonic() - started < 30


def test_holders_are_found_by_index_or_uuid() -> None:
    device = memory_holders.nvidia_devices("1, GPU-aa, H100, 81559, 20000")[0]
    holders = memory_holders.nvidia_holders(f"GPU-aa, {os.getpid()}, python, 61000\nGPU-bb, 1, init, [N/A]")
    assert [(h.pid, h.bytes >> 20) for h in holders_of(holders, device)] == [(os.getpid(), 61000)]
    assert holders_of([Holder("1", 5, "x", 7, "")], device)[0].pid == 5
