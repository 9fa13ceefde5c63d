"""The model of the hf engine: loading, forward passes over the slot cache, replacing its weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pekoe.pipeline.records import Float32, Int32
from pekoe.pipeline.rollout.engines.slot_attention import ATTENTION_NAME, AttentionPass, DecodePass, PackedPass, Segment
from pekoe.pipeline.rollout.engines.slot_cache import SlotCache

LOGIT_BYTES = 1 << 28
"""Most memory for the logits of one log-prob pass (one sequence is computed whole, whatever it takes)."""


class ServedModel:
    """A transformers causal LM without gradients whose attention is `slot_attention`."""

    def __init__(self, path: str, dtype: str, device: torch.device, model: PreTrainedModel | None = None) -> None:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
            raise ValueError(f"rollout.dtype: {dtype!r}; allowed: float32, bfloat16, float16, float64")
        if model is None:
            loaded = AutoModelForCausalLM.from_pretrained(path, dtype=kind, attn_implementation=ATTENTION_NAME)
            model = cast(PreTrainedModel, loaded)
        else:
            model.set_attn_implementation(ATTENTION_NAME)
        torch.nn.Module.to(model, device=device, dtype=kind)
        self.model: PreTrainedModel = torch.nn.Module.requires_grad_(torch.nn.Module.eval(model), False)
        self.device = device
        self.vocabulary = cast(torch.nn.Embedding, model.get_input_embeddings()).num_embeddings
        self._body = self.model.base_model
        self._check_cache()

    @property
    def num_positions(self) -> int | None:
        """Longest context that the model was made for, if it says so."""
        return getattr(self.model.config, "max_position_embeddings", None)

    @property
    def mixes_rows(self) -> bool:
        """True when a row's arithmetic depends on the other rows: experts compute on whatever was sent to them."""
        config = self.model.config
        return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))

    @torch.inference_mode()
    def prefill(self, tokens: list[int], segments: list[Segment], cache: SlotCache) -> None:
        """Puts the keys and values of the segments' tokens (end to end in `tokens`) into the cache."""
        self._body(**self._packed(tokens, segments, cache))

    @torch.inference_mode()
    def decode(self, tokens: torch.Tensor, decode_pass: DecodePass) -> torch.Tensor:
        """Feeds one token [B] per row at the pass's positions; gives the next token's logits [B, V]."""
        ids, positions = tokens[:, None], decode_pass.positions[:, None]
        output = self.model(input_ids=ids, position_ids=positions, use_cache=False, attention_pass=decode_pass)
        logits: torch.Tensor = output.logits
        return logits[:, -1]

    @torch.inference_mode()
    def logprobs(self, sequences: Sequence[Int32], temperature: float = 1.0) -> list[Float32]:
        """Token-aligned log-probs [T] (the first is 0) at a temperature, without the cache."""
        results: list[Float32] = []
        budget = LOGIT_BYTES // (4 * self.vocabulary)
        batch: list[Int32] = []
        for sequence in sequences:
            if batch and sum(map(len, batch)) + len(sequence) > budget:
                results += self._packed_logprobs(batch, temperature)
                batch = []
            batch.append(sequence)
        return results + (self._packed_logprobs(batch, temperature) if batch else [])

    def _packed_logprobs(self, sequences: Sequence[Int32], temperature: float) -> list[Float32]:
        offsets = np.cumsum([0, *map(len, sequences)]).tolist()
        starts = zip(sequences, offsets[:-1], strict=True)
        segments = [Segment(row=0, start=0, count=len(s), offset=offset) for s, offset in starts if len(s)]
        tokens = np.concatenate(sequences).tolist()
        if not tokens:
            return [np.zeros(0, np.float32) for _ in sequences]
        logits = self.model(**self._packed(tokens, segments, None)).logits[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        targets = torch.tensor(tokens, device=self.device)[1:, None]
        flat = np.zeros(len(tokens), np.float32)
        flat[1:] = torch.log_softmax(logits[:-1] / temperature, dim=-1).gather(1, targets)[:, 0].cpu().numpy()
        flat[[segment.offset for segment in segments]] = 0
        return [flat[a:b] for a, b in itertools.pairwise(offsets)]

    def _packed(
        self, tokens: list[int], segments: list[Segment], cache: SlotCache | None
    ) -> dict[str, torch.Tensor | bool | AttentionPass]:
        positions = np.concatenate([np.arange(s.start, s.start + s.count) for s in segments])
        return {
            "input_ids": torch.tensor([tokens], device=self.device),
            "position_ids": torch.from_numpy(positions).to(self.device)[None],
            "use_cache": False,
            "attention_pass": PackedPass(segments, cache, self.device),
        }

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies every tensor into the model. Names must equal `state_dict`'s, tied ones included.

        A tensor is used up before the next is asked for. Raises ValueError naming what is missing, unknown, given
        twice, of another shape, or unequal under two tied names; the weights are then mixed.
        """
        own = self.model.state_dict(keep_vars=True)
        missing = dict.fromkeys(own)
        written: dict[int, str] = {}
        for name, tensor in weights:
            if name not in missing:
                problem = "was given twice" if name in own else "is not in the model"
                raise ValueError(f"weights: {name!r} {problem}; still expected: {list(missing)[:5]}")
            del missing[name]
            target = own[name].detach()
            if tensor.shape != target.shape:
                shapes = f"{tuple(tensor.shape)}; allowed: the model's {tuple(target.shape)}"
                raise ValueError(f"weights: {name!r} has shape {shapes}")
            tied_to = written.setdefault(target.data_ptr(), name) if target.numel() else name
            if tied_to == name:
                target.copy_(tensor)
            elif not torch.equal(target, tensor.to(target)):
                raise ValueError(f"weights: {name!r} is tied to {tied_to!r} in the model, but their values differ")
        if missing:
            raise ValueError(f"weights: {len(missing)} of {len(own)} tensors are missing: {list(missing)[:5]} …")

    def _check_cache(self) -> None:
        """Decoding through the cache must equal one forward pass; it does not where layers keep another state."""
        generator = np.random.default_rng(0)
        tokens: Int32 = generator.integers(0, self.vocabulary, 8).astype(np.int32)
        ids = tokens.tolist()
        cache = SlotCache(self.device, 1)
        cache.reserve(1, len(ids))
        self.prefill(ids[:3], [Segment(row=0, start=0, count=3, offset=0)], cache)
        self.prefill(ids[3:5], [Segment(row=0, start=3, count=2, offset=0)], cache)
        found = [0.0] * 6
        for position in (5, 6):
            decode_pass = DecodePass(cache, [position])
            logits = self.decode(torch.tensor([ids[position]], device=self.device), decode_pass)
            found.append(float(torch.log_softmax(logits.float(), dim=-1)[0, ids[position + 1]]))
        wanted = self.logprobs([tokens])[0]
        gap = float(np.abs(wanted[6:] - np.array(found[6:])).max())
        limit = 1e-2 if self.model.dtype in (torch.float32, torch.float64) else 0.5
        if not gap <= limit:
            kind = self.model.config.model_type
            raise ValueError(
                f"rollout.backend: the hf engine cannot serve model type {kind!r}: decoding through its cache of keys "
                f"and values differs from one forward pass by {gap:.3g} in log-prob; allowed: up to {limit}"
            )
