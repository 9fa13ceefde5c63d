"""The vllm engine answers requests as every engine does: the checks that the hf engine passes, too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pekoe.pipeline.rollout.engine import SamplingParameters
from pekoe.pipeline.rollout.self_test import check_engine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rollout"))

from engine_contract import CHECKS, CONTEXT, Served, served, write_contract_model

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def vllm(engines: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_contract_model(tmp_path_factory.mktemp("contract"))
    yield served(engines.build(engines.settings(folder, context_limit=CONTEXT)), folder)
    engines.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_the_vllm_engine_answers_as_every_engine_does(vllm: Served, check: Any) -> None:
    check(vllm)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_sampled_equals_scored_equals_a_plain_forward_pass(vllm: Served, temperature: float) -> None:
    sampling = SamplingParameters(
        temperature=temperature, top_p=0.7, top_k=9, frequency_penalty=1.0, logit_bias=((4, 3.0), (5, -100.0))
    )
    sequences = [list(vllm.prompt), [7, 8, 40, 33, 21, 90, 4, 6, 12, 13]]
    found = check_engine(vllm.engine, 3, sequences, sampling)
    wanted = [x for sequence in sequences for x in vllm.logprobs(sequence, temperature)]
    np.testing.assert_allclose(found.check, wanted, atol=vllm.tolerance)
    np.testing.assert_allclose(found.sampled, found.scored, atol=vllm.tolerance)
