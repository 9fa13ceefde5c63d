"""The hf engine answers requests as every engine does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pekoe.pipeline.rollout.engine import EngineSettings, Instance
from pekoe.pipeline.rollout.engines.hf_engine import HfEngine

sys.path.insert(0, str(Path(__file__).resolve().parent))

from engine_contract import CHECKS, CONTEXT, Served, served, write_contract_model


@pytest.fixture(scope="module", params=[False, True], ids=["free", "deterministic"])
def hf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_contract_model(tmp_path_factory.mktemp("contract"))
    settings = EngineSettings(
        path=str(folder), tokenizer_path=str(folder), dtype="float32", device="cpu", device_index=0, max_slots=8,
        context_limit=CONTEXT, deterministic=request.param,
    )  # fmt: skip
    engine = HfEngine.build(settings, Instance())
    yield served(engine, folder)
    engine.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_the_hf_engine_answers_as_every_engine_does(hf: Served, check) -> None:
    check(hf)
