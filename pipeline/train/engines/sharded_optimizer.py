"""AdamW on sharded parameters, and the global gradient norm over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pekoe.pipeline.config.optimizer import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with its moments in place; norms and biases (parameters with one axis) do not decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=all(_local(p).device.type == "cpu" for p in parameters),
    )
    _make_state(optimizer)
    return optimizer


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Moments of zero after no update, as they are before the first one. Left to torch's checkpoints, they would count
    an update that never was, and a run that goes on from step 0 would take another first step."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()


def gradient_norm(optimizer: torch.optim.Optimizer, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Norm (float64 scalar, equal on all ranks of `group`) of the whole gradient; not finite if any rank's part is
    not."""
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in _gradients(optimizer):
        squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square().to(device)
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


def clip(optimizer: torch.optim.Optimizer, norm: Tensor, limit: float) -> None:
    """Scales the gradient to norm `limit` where it is longer."""
    scale = limit / (float(norm) + 1e-6)
    if scale < 1:
        for gradient in _gradients(optimizer):
            gradient.mul_(scale)


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """This rank's part of every gradient."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
