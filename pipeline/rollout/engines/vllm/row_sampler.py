"""The sampler that replaces vLLM's: the one of the hf engine, so that both mean the same by every parameter.

vLLM reports log-probs either before the temperature or after top-k and top-p; here they are of the full distribution
at the row's temperature. Legend: B rows, N prompt tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from pekoe.pipeline.rollout.engines.token_sampler import TokenSampler
from pekoe.pipeline.rollout.engines.vllm.batch_row import BatchRow


class Scoring:
    """Sequences whose log-probs are asked for: their last token is the one that is "sampled"."""

    def __init__(self, temperature: float, last: Mapping[str, int]) -> None:
        self.temperature = temperature
        self.last = last


class RowSampler(Sampler):
    """Samples the rows of vLLM's batch; `request_ids` are their keys in order. The engine's thread owns `rows`."""

    def __init__(self, request_ids: Callable[[], Sequence[str]], rows: Mapping[str, BatchRow], vocabulary: int) -> None:
        super().__init__()
        self.scoring: Scoring | None = None
        self._request_ids = request_ids
        self._rows = rows
        self._vocabulary = vocabulary
        self._expected: list[tuple[str, int]] = []
        self._sampler: TokenSampler | None = None

    def forward(self, logits: torch.Tensor, *_: Any, **__: Any) -> SamplerOutput:
        """logits [B, V] -> one token and its log-prob per row. vLLM drops those of prompts that are not complete."""
        keys = self._request_ids()
        if self.scoring is not None:
            last = [self.scoring.last[key] for key in keys]
            tokens = torch.tensor(last, device=logits.device)
            logprobs = self.compute_logprobs(logits).gather(1, tokens[:, None])[:, 0]
        else:
            tokens, logprobs = self._sample(logits, keys, [self._rows[key] for key in keys])
        tensors = one_each(tokens, logprobs)
        return SamplerOutput(sampled_token_ids=tensors.logprob_token_ids, logprobs_tensors=tensors)

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [N, V] -> log-probs [N, V] of prompts, at the temperature of the scoring under way."""
        temperature = 1.0 if self.scoring is None else self.scoring.temperature
        return torch.log_softmax(logits.to(torch.float32) / temperature, dim=-1)

    @staticmethod
    def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
        """logprobs [N, V], token_ids [N] -> those of the tokens alone [N, 1]; nobody reads their ranks."""
        return one_each(token_ids, logprobs.gather(1, token_ids[:, None])[:, 0])

    def _sample(
        self, logits: torch.Tensor, keys: Sequence[str], rows: list[BatchRow]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        present = [(key, len(row.completion)) for key, row in zip(keys, rows, strict=True)]
        if self._sampler is None or present != self._expected:
            self._sampler = TokenSampler(
                [row.add.request.sampling for row in rows],
                logits.device,
                self._vocabulary,
                [r.completion for r in rows],
            )
        self._expected = [(key, count + 1) for key, count in present]
        uniforms = [0.0 if row.add.request.sampling.greedy else row.uniform for row in rows]
        forbidden = [(i, token) for i, row in enumerate(rows) for token in row.forbidden]
        return self._sampler.sample(logits, uniforms, forbidden)


def one_each(tokens: torch.Tensor, logprobs: torch.Tensor) -> LogprobsTensors:
    """tokens [N], logprobs [N] -> vLLM's record of one log-prob per position."""
    ranks = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
    return LogprobsTensors(tokens.to(torch.int32)[:, None], logprobs.to(torch.float32)[:, None], ranks)
