"""Operations as operators of torch, `torch.ops.pekoe.NAME`: on any device, traced by torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library: Any = torch.library.Library("pekoe", "FRAGMENT")  # type: ignore[no-untyped-call]


def add_operator(schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Adds an operator: `run` computes it on any device, `shapes` gives empty results of the right shape and dtype."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pekoe::{name}", shapes, lib=_library)


def add_gradient(name: str, backward: Callable[..., Any], keep: Callable[..., None]) -> None:
    """Makes an operator differentiable: `keep(ctx, inputs, output)` stores what `backward(ctx, *gradients)` needs,
    which gives one gradient an input."""
    torch.library.register_autograd(f"pekoe::{name}", backward, setup_context=keep, lib=_library)
