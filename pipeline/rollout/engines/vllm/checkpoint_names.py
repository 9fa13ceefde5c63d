"""What a full set of a model's weights consists of, by the names of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from pekoe.pipeline.rollout.engines.stop_check import end_token_ids

FINGERPRINT_ELEMENTS = 4096


class CheckpointNames:
    """Names and shapes of `state_dict`, tied ones included, and the tokens that end a completion.

    Built from the model folder's configuration alone, without weights.
    """

    def __init__(self, folder: str, tokenizer: Any) -> None:
        config = transformers.AutoConfig.from_pretrained(folder)
        architecture = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            build = transformers.AutoModelForCausalLM.from_config if architecture is None else architecture._from_config
            model = build(config)
        model.tie_weights()
        if (Path(folder) / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        self.end_ids = end_token_ids(model, tokenizer)
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self.positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
        tensors = model.state_dict(keep_vars=True)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        first: dict[int, str] = {}
        self._tied_to = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}

    def checked(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors in the same order. ValueError naming what is missing, unknown, given twice, of another
        shape, or unequal under two tied names."""
        missing = dict.fromkeys(self.shapes)
        prints: dict[str, tuple[str, torch.Tensor]] = {}
        tied = {first for name, first in self._tied_to.items() if name != first}
        for name, tensor in weights:
            if name not in missing:
                problem = "was given twice" if name in self.shapes else "is not in the model"
                raise ValueError(f"weights: {name!r} {problem}; still expected: {list(missing)[:5]}")
            del missing[name]
            if tuple(tensor.shape) != self.shapes[name]:
                shapes = f"{tuple(tensor.shape)}; allowed: the model's {self.shapes[name]}"
                raise ValueError(f"weights: {name!r} has shape {shapes}")
            first = self._tied_to[name]
            if first in tied:
                other, seen = prints.setdefault(first, (name, fingerprint(tensor)))
                if not torch.equal(seen, fingerprint(tensor)):
                    raise ValueError(f"weights: {name!r} is tied to {other!r} in the model, but their values differ")
            yield name, tensor
        if missing:
            raise ValueError(
                f"weights: {len(missing)} of {len(self.shapes)} tensors are missing: {list(missing)[:5]} …"
            )


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Some elements, evenly spaced, in float32 on the host: cheap, and unequal for tensors of two versions."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // FINGERPRINT_ELEMENTS)].to("cpu", torch.float32, copy=True)
