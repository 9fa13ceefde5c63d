"""The layout in which the samples of one prompt are computed once over the shared prompt.

    flat         [prompt a1] [prompt a2] [prompt a3] [prompt b1]      M tokens
    the model's  [prompt | a1 | a2 | a3] [prompt b1]                  N tokens

Responses go on with the position after the prompt. Attention is told the boundaries (`shared_attention.py`); every
other layer works on single tokens. Log-probs, losses and gradients are those of the flat batch: what the model gives at
a place of the prompt is read for each of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pekoe.pipeline.train.engines.packed_attention import PackedSequences
from pekoe.pipeline.train.engines.token_layout import TokenLayout, plain_layout
from pekoe.pipeline.train.shared_rows import shared_rows


def shared_layout(tensors: Mapping[str, Tensor]) -> TokenLayout:
    """Of a micro-batch's `tokens` and `position_ids` [M], `cu_seqlens` [S+1] and `groups` [S]; the plain layout where
    no rows begin alike."""
    flat, device = tensors["tokens"], tensors["tokens"].device
    starts = tensors["cu_seqlens"].cpu().numpy()
    runs = shared_rows(flat.cpu().numpy(), starts, tensors["groups"].cpu().numpy())
    if not any(run.length for run in runs):
        return plain_layout(tensors)
    slots = np.empty(len(flat), dtype=np.int64)
    kept: list[npt.NDArray[np.int64]] = []
    bounds, prompts = [0], []

    def place(first: int, end: int, prompt: int) -> None:
        """Gives flat tokens `first` to `end` - 1 places of their own."""
        kept.append(np.arange(first, end))
        slots[first:end] = np.arange(bounds[-1], bounds[-1] + end - first)
        bounds.append(bounds[-1] + end - first)
        prompts.append(prompt)

    for run in runs:
        number = len(prompts)
        if not run.length:
            place(starts[run.first], starts[run.end], number)
            continue
        prompt = int(starts[run.first]), int(starts[run.first]) + run.length
        place(*prompt, number)
        for row in range(run.first, run.end):
            slots[starts[row] : starts[row] + run.length] = slots[slice(*prompt)]
            place(starts[row] + run.length, starts[row + 1], number)
    chosen = torch.from_numpy(np.concatenate(kept)).to(device)
    return TokenLayout(
        flat[chosen],
        tensors["position_ids"][chosen],
        PackedSequences.of(bounds, device, prompts),
        torch.from_numpy(slots).to(device),
    )
