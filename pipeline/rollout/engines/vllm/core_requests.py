"""Requests as vLLM's engine core takes them. It only computes: what is sampled and when it ends is decided here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from pekoe.pipeline.rollout.engines.vllm.batch_row import BatchRow


def sampling_request(row: BatchRow, adapter: Any = None) -> EngineCoreRequest:
    """The row from where it is; `adapter` is vLLM's request of a LoRA adapter."""
    return _request(row.key, row.tokens, SamplingParams(
        temperature=0.0, max_tokens=row.room, ignore_eos=True, detokenize=False, logprobs=0
    ), adapter)  # fmt: skip


def scoring_request(key: str, tokens: Sequence[int]) -> EngineCoreRequest:
    """Log-probs of the tokens after the first, then one more token."""
    return _request(key, list(tokens), SamplingParams(
        temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=0,
        prompt_logprobs=0 if len(tokens) > 1 else None,
    ))  # fmt: skip


def _request(key: str, tokens: list[int], parameters: SamplingParams, adapter: Any = None) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=key,
        prompt_token_ids=tokens,
        mm_features=None,
        sampling_params=parameters,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=adapter,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=key,
    )
