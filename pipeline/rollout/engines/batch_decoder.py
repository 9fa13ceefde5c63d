"""Token-level continuous batching: who sits in which row, and what the next forward pass computes.

Owned by one thread at a time. A turn is `sweep`, `admit`, then `prefill` until nothing is left to cache, then `decode`:
one token for every row. Sequences enter and leave between any two tokens. In free mode the rows are kept dense (the
last one moves into a hole). In deterministic mode the batch belongs to one group at a time, with a fixed number of rows
(a sample's row is its number), a fixed attended length and one sequence per prefill, so that nothing about a row's
arithmetic depends on who else is there.
"""

from __future__ import annotations

import math
from collections import Counter, deque

import torch

from pekoe.pipeline.rollout.engines.sequence_state import SequenceState
from pekoe.pipeline.rollout.engines.served_model import ServedModel
from pekoe.pipeline.rollout.engines.slot_attention import DecodePass, Segment
from pekoe.pipeline.rollout.engines.slot_cache import SlotCache, round_length
from pekoe.pipeline.rollout.engines.token_sampler import TokenSampler


class BatchDecoder:
    """The rows of the engine; see the module."""

    def __init__(
        self, model: ServedModel, *, max_slots: int, context_limit: int, deterministic: bool, prefill_tokens: int
    ) -> None:
        self.model = model
        self.cache = SlotCache(model.device, max_slots)
        self.rows: list[SequenceState | None] = []
        self.waiting: deque[SequenceState] = deque()
        self.num_prefilled = 0
        """Prompt and completion tokens whose keys and values were computed by prefill passes."""
        self.num_sampled = 0
        self.num_steps = 0
        self._max_slots = max_slots
        self._fixed_length = round_length(context_limit) if deterministic else None
        self._prefill_tokens = prefill_tokens
        self._cohort: tuple[int, int] | None = None
        self._pass: DecodePass | None = None
        self._sampler: TokenSampler | None = None
        self._tokens = torch.zeros(0, dtype=torch.long, device=model.device)
        self._unripe: list[int] = []

    @property
    def active(self) -> list[SequenceState]:
        return [sequence for sequence in self.rows if sequence is not None]

    def has_work(self, version: int) -> bool:
        return any(self.rows) or any(s.request.min_version <= version and not s.cancelled for s in self.waiting)

    def sweep(self) -> None:
        """Frees the rows of cancelled sequences."""
        for row, sequence in enumerate(self.rows):
            if sequence is not None and sequence.cancelled:
                self._leave(row)
        if any(sequence.cancelled for sequence in self.waiting):
            self.waiting = deque(sequence for sequence in self.waiting if not sequence.cancelled)

    def invalidate(self) -> None:
        """Weights changed or the cache is gone: everything is recomputed before the next token."""
        self.cache.release()
        self._pass = None
        for sequence in self.active:
            sequence.cached = 0

    @torch.inference_mode()
    def admit(self, version: int, *, begin: bool = True) -> None:
        """Gives rows to waiting sequences whose minimum version is reached, in order of arrival (or of group). Without
        `begin` only a deterministic group that is in the rows already is completed."""
        if self._fixed_length is not None:
            if begin or any(self.rows):
                self._admit_cohort(version)
            return
        free = deque(row for row, sequence in enumerate(self.rows) if sequence is None)
        free.extend(range(len(self.rows), self._max_slots))
        if begin and self.waiting and free:
            kept: deque[SequenceState] = deque()
            for sequence in self.waiting:
                if free and sequence.request.min_version <= version:
                    self._enter(sequence, free.popleft())
                else:
                    kept.append(sequence)
            self.waiting = kept
        self._close_holes()

    @torch.inference_mode()
    def prefill(self) -> bool:
        """Computes one pass of at most `prefill_tokens`; False when every row is ready to decode."""
        if self._pass is not None:
            return False
        self.cache.reserve(len(self.rows), self._needed_length())
        segments = self._plan_prefill()
        if not segments:
            return False
        tokens: list[int] = []
        for segment in segments:
            sequence = self.rows[segment.row]
            assert sequence is not None
            tokens += sequence.slice(segment.start, segment.start + segment.count)
        self.model.prefill(tokens, segments, self.cache)
        for segment in segments:
            sequence = self.rows[segment.row]
            assert sequence is not None
            sequence.cached = segment.start + segment.count
        self.num_prefilled += len(tokens)
        return True

    @torch.inference_mode()
    def decode(self, version: int) -> list[SequenceState]:
        """Samples one token for every row; gives the sequences that end with it. Their rows are free."""
        decode_pass, sampler = self._ready()
        logits = self.model.decode(self._tokens, decode_pass)
        uniforms = [0.0 if s is None or s.request.sampling.greedy else s.uniform() for s in self.rows]
        chosen, chosen_logprobs = sampler.sample(logits, uniforms, self._forbidden())
        self._tokens = chosen
        self.num_steps += 1
        ended = self._append(chosen.tolist(), chosen_logprobs.tolist(), version)
        finished = []
        for row in ended:
            sequence = self.rows[row]
            assert sequence is not None
            finished.append(sequence)
            self._leave(row)
        if not ended and decode_pass.can_advance:
            decode_pass.advance()
        else:
            self._pass = None
        return finished

    def _append(self, tokens: list[int], logprobs: list[float], version: int) -> list[int]:
        """Gives every sequence its token; the rows of those that end with it."""
        ended = []
        for row, sequence in enumerate(self.rows):
            if sequence is None:
                continue
            if not math.isfinite(logprobs[row]):
                raise FloatingPointError(
                    f"log-prob {logprobs[row]} for token {sequence.length} of a sequence (weight version {version}): "
                    "the model's logits are not finite"
                )
            self.num_sampled += 1
            sequence.append(tokens[row], logprobs[row], version)
            if sequence.finish is not None:
                ended.append(row)
        return ended

    def _ready(self) -> tuple[DecodePass, TokenSampler]:
        """The pass and the sampler of the present rows; made anew when rows or the cache changed."""
        if self._pass is None or self._sampler is None:
            positions = [0 if s is None else s.length - 1 for s in self.rows]
            self._pass = DecodePass(self.cache, positions, whole_length=self._fixed_length is not None)
            sampling = [None if s is None else s.request.sampling for s in self.rows]
            completions = [() if s is None else s.completion for s in self.rows]
            self._sampler = TokenSampler(sampling, self.model.device, self.model.vocabulary, completions)
            last = [0 if s is None else s.last_token for s in self.rows]
            self._tokens = torch.tensor(last, device=self.model.device)
            self._unripe = [row for row, s in enumerate(self.rows) if s is not None and s.stop.min_new > 0]
        return self._pass, self._sampler

    def _forbidden(self) -> list[tuple[int, int]]:
        """Stop tokens of rows that have not sampled `min_new_tokens` yet."""
        pairs = []
        for row in self._unripe:
            sequence = self.rows[row]
            if sequence is not None and len(sequence.completion) < sequence.stop.min_new:
                pairs += [(row, token) for token in sequence.stop.token_ids if token < self.model.vocabulary]
        return pairs

    def _needed_length(self) -> int:
        return self._fixed_length or max((s.length for s in self.rows if s is not None), default=1)

    def _enter(self, sequence: SequenceState, row: int) -> None:
        if row == len(self.rows):
            self.rows.append(None)
        self.rows[row] = sequence
        self._pass = None

    def _leave(self, row: int) -> None:
        self.rows[row] = None
        self._pass = None

    def _close_holes(self) -> None:
        """Moves last rows into holes until the rows are dense."""
        while None in self.rows:
            last = self.rows.pop()
            if last is None:
                continue
            hole = self.rows.index(None)
            self.cache.copy(len(self.rows), [hole], last.cached)
            self.rows[hole] = last
            self._pass = None

    def _admit_cohort(self, version: int) -> None:
        """The group in the rows keeps them while any of it is there; then the lowest waiting group follows."""
        ready = [s for s in self.waiting if s.request.min_version <= version]
        if not any(self.rows):
            if not ready:
                return
            self._cohort = min(self._cohort_of(sequence) for sequence in ready)
            size = 1 if self.model.mixes_rows else ready_size(ready, self._cohort)
            self.rows = [None] * size
            self._pass = None
        for sequence in sorted(ready, key=lambda s: s.request.sample):
            row = sequence.request.sample % len(self.rows)
            if self._cohort_of(sequence) == self._cohort and self.rows[row] is None:
                self.waiting.remove(sequence)
                self._enter(sequence, row)

    def _cohort_of(self, sequence: SequenceState) -> tuple[int, int]:
        return sequence.request.group, sequence.request.sample if self.model.mixes_rows else 0

    def _plan_prefill(self) -> list[Segment]:
        """Segments of the next pass: prompts once each, then what every sequence has beyond its prompt."""
        pending = [(row, s) for row, s in enumerate(self.rows) if s is not None and s.cached < s.length - 1]
        if not pending:
            return []
        shared = Counter(s.request.tokens for _, s in pending)
        self._copy_prompts(pending)
        planned: set[tuple[int, ...]] = set()
        segments: list[Segment] = []
        room = self._prefill_tokens
        for row, sequence in pending:
            prompt = sequence.request.tokens
            target = sequence.length - 1
            if sequence.cached < sequence.prompt_target:
                if prompt in planned:
                    continue
                planned.add(prompt)
                if self._fixed_length is not None or shared[prompt] > 1:
                    target = sequence.prompt_target
            count = min(target - sequence.cached, room)
            if count > 0:
                offset = self._prefill_tokens - room
                segments.append(Segment(row=row, start=sequence.cached, count=count, offset=offset))
                room -= count
            if room == 0 or (segments and self._fixed_length is not None):
                break
        return segments

    def _copy_prompts(self, pending: list[tuple[int, SequenceState]]) -> None:
        """Sequences whose prompt is in another row's cache get it by copy."""
        donors = {
            s.request.tokens: row
            for row, s in enumerate(self.rows)
            if s is not None and s.cached >= s.prompt_target > 0
        }
        copies: dict[int, list[int]] = {}
        for row, sequence in pending:
            donor = donors.get(sequence.request.tokens)
            if donor is not None and sequence.cached < sequence.prompt_target:
                copies.setdefault(donor, []).append(row)
                sequence.cached = sequence.prompt_target
        for donor, targets in copies.items():
            self.cache.copy(donor, targets, len(self._prompt(donor)) - 1)

    def _prompt(self, row: int) -> tuple[int, ...]:
        sequence = self.rows[row]
        assert sequence is not None
        return sequence.request.tokens


def ready_size(ready: list[SequenceState], cohort: tuple[int, int]) -> int:
    """Rows of a group's batch: its group size."""
    return next(s.request.group_size for s in ready if s.request.group == cohort[0])
