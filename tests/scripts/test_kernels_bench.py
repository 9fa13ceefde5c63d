"""The benchmark of the kernels runs and has every figure; those that depend on a machine are its own to judge."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

import smollm2_memory  # noqa: E402

FIGURES = {
    "bfd_over_trl", "kk_over_verl", "equal_count_imbalance", "plan_over_budget", "plan_barrier_loss", "gae_over_stream",
    "gae_over_padded", "pack_over_mask", "unpack_over_mask", "logprob_over_gemm", "logprob_over_naive",
    "logprob_extra_mib", "logprob_backward_extra_mib", "attention_over_fastest", "trie_bytes_per_token",
}  # fmt: skip


@pytest.mark.kernels
def test_every_figure_is_measured() -> None:
    command = [sys.executable, str(BENCH / "kernels.py"), "--quick"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=280)
    found = json.loads(done.stdout.splitlines()[-1])
    figures = found["figures"]
    assert figures.keys() >= FIGURES
    assert found["targets"].keys() <= figures.keys()
    assert done.returncode == (0 if found["met"] else 1)
    assert figures["plan_over_budget"] == 0, "what does not depend on the machine holds on any"
    assert figures["bfd_bins_over_bound"] <= 1.002
    assert figures["equal_count_imbalance"] <= 1.001
    assert figures["plan_barrier_loss"] <= 0.01
    assert figures["gae_error"] <= 1e-5
    assert figures["logprob_gradient_error"] <= 1e-5
    assert figures["bfd_over_trl"] > 50
    assert figures["kk_over_verl"] > 250


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_micro_batch_of_8192_tokens_of_smollm2_trains_in_less_than_a_gib_beside_its_state() -> None:
    """Beside weights, optimiser state and gradients. Every logit alone would be 1.5 GiB in float32."""
    smollm2_memory.find_model()
    found = smollm2_memory.measured(8192, smollm2_memory.THRESHOLD)
    assert found["tokens"] == 8192
    assert found["extra_mib"] < 1024
