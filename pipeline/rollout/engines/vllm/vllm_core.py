"""vLLM in this rank: applies commands and steps the batch, on one thread.

Ranks of a tensor-parallel instance each have one; given the same commands and steps they sample the same tokens, so
nothing here depends on time, on other threads, or on what only the leader knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from pekoe.pipeline.records import Float32
from pekoe.pipeline.rollout.engine import EngineSettings, Instance
from pekoe.pipeline.rollout.engines.vllm.adapters import AdapterShelf
from pekoe.pipeline.rollout.engines.vllm.batch_row import BatchRow
from pekoe.pipeline.rollout.engines.vllm.checkpoint_names import CheckpointNames
from pekoe.pipeline.rollout.engines.vllm.commands import (
    Add,
    Command,
    Load,
    LoadAdapter,
    Remove,
    Score,
    Sleep,
    Stop,
    Wake,
)
from pekoe.pipeline.rollout.engines.vllm.core_build import build_core, check_platform, model_runner
from pekoe.pipeline.rollout.engines.vllm.process_setup import (
    forget_groups,
    make_default_group,
    process_kept,
    set_environment,
)


class VllmCore:
    """The batch, the weights and the KV cache. Built, used and closed by one thread.

    Between `load`, `score` or `sleep` and the next step, the sequences under way are outside of vLLM; they enter again
    with all their tokens, whose keys and values are computed anew.
    """

    def __init__(self, settings: EngineSettings, instance: Instance, names: CheckpointNames) -> None:
        set_environment()
        check_platform(settings.device)
        make_default_group(instance, settings.device)
        try:
            with process_kept():
                self._client = build_core(settings, instance)
        except BaseException:
            forget_groups()
            raise
        from pekoe.pipeline.rollout.engines.vllm.memory import CacheMemory
        from pekoe.pipeline.rollout.engines.vllm.row_sampler import RowSampler
        from pekoe.pipeline.rollout.engines.vllm.weight_loading import WeightLoader

        self.version = 0
        self.num_sampled = 0
        self.num_prefilled = 0
        """Tokens whose keys and values were computed, but for those that a sampled token followed."""
        self.num_steps = 0
        self.is_lost = False
        """A load failed so that not even another one can help."""
        self._rows: dict[int, BatchRow] = {}
        self._by_key: dict[str, BatchRow] = {}
        self._entries = 0
        self._scheduled = 0
        runner = model_runner(self._client)
        self.model: torch.nn.Module = runner.get_model()
        self._sampler = RowSampler(lambda: runner.input_batch.req_ids, self._by_key, names.vocabulary)
        runner.sampler = self._sampler
        self._loader = WeightLoader(self._client, runner, names)
        self.adapters = AdapterShelf(self._client)
        self._memory = CacheMemory(self._client, runner, settings.device)
        self._count_scheduled()

    @property
    def cache_bytes(self) -> int:
        return self._memory.num_bytes

    def apply(self, command: Command, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> Any:
        """Does what a command says; `weights` are those that this rank receives for a `Load`."""
        match command:
            case Add():
                self.add(command)
            case Remove(numbers):
                self.remove(numbers)
            case Load(version):
                assert weights is not None
                self.load(weights, version)
            case Score(sequences, temperature):
                return self.score(sequences, temperature)
            case Sleep():
                self.sleep()
            case Wake():
                self.wake()
            case LoadAdapter(name, folder, version):
                self.load_adapter(name, folder, version)
            case Stop():
                pass

    def add(self, add: Add) -> None:
        self._rows[add.number] = BatchRow(add)

    def remove(self, numbers: Iterable[int]) -> None:
        """Those that are not there any more are passed over."""
        self._leave([self._rows.pop(number) for number in numbers if number in self._rows])

    def step(self) -> list[tuple[int, int, float]]:
        """One pass over the batch: (number, token, log-prob) of every sequence that got a token.

        FloatingPointError when a log-prob is not finite."""
        for row in self._rows.values():
            if not row.key:
                self._enter(row)
        sampled = []
        for output in self._advance():
            row = self._by_key[output.request_id]
            token, logprob = output.new_token_ids[0], float(output.new_logprobs.logprobs[0, 0])
            if not math.isfinite(logprob):
                raise FloatingPointError(
                    f"log-prob {logprob} for token {len(row.tokens)} of a sequence (weight version {self.version}): "
                    "the model's logits are not finite"
                )
            row.append(token)
            sampled.append((row.add.number, token, logprob))
        self.num_sampled += len(sampled)
        return sampled

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See the protocol. After an exception the weights are mixed, and may be loaded again."""
        self._leave(self._rows.values())
        self._forget_cache()
        self._memory.restore_weights()
        try:
            self._loader.load(weights)
        except BaseException:
            self.is_lost = not self._loader.is_usable
            raise
        self.adapters.reload()
        self.version = version

    def load_adapter(self, name: str, folder: Path, version: int) -> None:
        """See the protocol and `AdapterShelf.load`."""
        self._leave(self._rows.values())
        self._forget_cache()
        self.adapters.load(name, folder, version)

    def version_of(self, adapter: str) -> int:
        """The version of what samples: of an adapter, or of the model itself for an empty name."""
        return self.adapters.version(adapter) if adapter else self.version

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[Float32]:
        """Token-aligned log-probs [T] (first is 0) of each sequence."""
        from pekoe.pipeline.rollout.engines.vllm.scoring import score

        self._leave(self._rows.values())
        return score(self._client, self._sampler, self._advance, sequences, temperature)

    def sleep(self) -> None:
        self._leave(self._rows.values())
        self._forget_cache()
        self._memory.release()

    def wake(self) -> None:
        self._memory.restore()

    def close(self) -> None:
        """Gives memory, threads and torch's default group back; what it has counted can still be read."""
        self._client.shutdown()
        self._memory.close()
        self.adapters.close()
        del self.model, self._client, self._sampler, self._loader
        forget_groups()

    def _enter(self, row: BatchRow) -> None:
        from pekoe.pipeline.rollout.engines.vllm.core_requests import sampling_request

        self._entries += 1
        row.key = f"{row.add.number}-{self._entries}"
        self._by_key[row.key] = row
        self._client.add_request(sampling_request(row, self.adapters.request(row.add.request.adapter)))

    def _leave(self, rows: Iterable[BatchRow]) -> None:
        inside = [row for row in rows if row.key]
        self._client.abort_requests([row.key for row in inside])
        for row in inside:
            del self._by_key[row.key]
            row.key = ""
        left = self._client.engine_core.scheduler.get_num_unfinished_requests()
        if left != len(self._by_key):
            raise RuntimeError(f"vllm: {left} sequences are in the batch where {len(self._by_key)} should be left")

    def _advance(self) -> list[Any]:
        """One step of vLLM; what it has to say."""
        self._scheduled = 0
        outputs = list(self._client.get_output().outputs)
        self.num_steps += 1
        self.num_prefilled += self._scheduled - len(outputs)
        return outputs

    def _forget_cache(self) -> None:
        if not self._client.reset_prefix_cache():
            raise RuntimeError("vllm: the prefix cache could not be dropped; keys and values of old weights are in use")

    def _count_scheduled(self) -> None:
        scheduler = self._client.engine_core.scheduler
        schedule = scheduler.schedule

        def counted(*arguments: Any, **options: Any) -> Any:
            output = schedule(*arguments, **options)
            self._scheduled += output.total_num_scheduled_tokens
            return output

        scheduler.schedule = counted
