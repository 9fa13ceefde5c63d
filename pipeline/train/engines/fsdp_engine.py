"""The default trainer: a transformers model sharded by FSDP2 over the trainer ranks.

Master weights, gradients and optimiser state are float32 shards (by rows); layers are gathered one at a time in the
compute dtype. A model that is only asked has no optimiser, and its shards are in the compute dtype. Sequences are
packed, with exact attention isolation (`packed_attention.py`), which is tested on the real model at start.

Ranks meet in every method but the queries. Nothing here names a vendor: the device object does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from pekoe.pipeline.config.actor import ModelConfig
from pekoe.pipeline.devices.device import Device
from pekoe.pipeline.messages import TensorSpec
from pekoe.pipeline.records import PackedBatch
from pekoe.pipeline.train.engine import LossFunction, TokenLogprobs, TokenValues, ValueLossFunction
from pekoe.pipeline.train.engines.batch_tensors import batch_tensors
from pekoe.pipeline.train.engines.hf_folder import HfFolderWriter
from pekoe.pipeline.train.engines.host_copy import HostCopy
from pekoe.pipeline.train.engines.isolation import check_isolation, check_sharing, random_tokens
from pekoe.pipeline.train.engines.learning_rate import learning_rate
from pekoe.pipeline.train.engines.lm_head import LmHead
from pekoe.pipeline.train.engines.sharded_files import read_sharded
from pekoe.pipeline.train.engines.sharded_model import Head, build_model, tied_names
from pekoe.pipeline.train.engines.sharded_optimizer import build_optimizer, clip, gradient_norm
from pekoe.pipeline.train.engines.shared_attention import merges
from pekoe.pipeline.train.engines.shared_prefix import shared_layout
from pekoe.pipeline.train.engines.staged_shards import StagedShards, save_group
from pekoe.pipeline.train.engines.token_layout import Layout, plain_layout
from pekoe.pipeline.train.engines.value_head import ValueHead

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

NUM_SETTLING = 16
"""Tokens that a head looks at a new model with."""


class FsdpEngine:
    """One model on all trainer ranks; implements `TrainEngine`.

    Building it is collective over torch's default process group (which must exist, also for one rank), or over
    `mesh`. `head` is `lm`, which takes the algorithm's `token_logprobs`, or `value`, which takes its `token_values`;
    a value head starts from a folder of a causal model, with values of 0, or from one of its own. `share_prefixes`
    computes neighbouring rows of one group once over the tokens with which they begin alike. `weight_dtype`
    (`float32`, `bfloat16`, …) is that of `weights` and of exports. `total_steps` is the length of the schedule.
    `section` of the configuration is named in errors. Methods may be called from one thread of any kind.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        head: str = "lm",
        trainable: bool = True,
        token_logprobs: TokenLogprobs | None = None,
        token_values: TokenValues | None = None,
        share_prefixes: bool = False,
        device: Device,
        device_index: int = 0,
        weight_dtype: str = "float32",
        total_steps: int = 1,
        seed: int,
        section: str = "actor",
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.config, self.section = config, section
        self.device = device.torch_device(device_index)
        device.set_current(device_index)
        self.mesh = mesh or init_device_mesh(device.kind, (dist.get_world_size(),), mesh_dim_names=("data",))
        self.data_parallel_rank = self.mesh.get_local_rank()
        self.data_parallel_size = self.mesh.size()
        self._head = _head(head, token_logprobs, token_values, shared_layout if share_prefixes else plain_layout)
        self._weight_dtype: torch.dtype = getattr(torch, weight_dtype)
        self._total_steps = max(1, total_steps)
        self._save_group = save_group(self.mesh) if trainable else None
        self._host_copy = HostCopy()
        self._staged: StagedShards | None = None
        torch.manual_seed(seed + self.data_parallel_rank)
        self.model: Any = build_model(
            config, self._head, device, self.device, self.mesh, trainable=trainable, section=section
        )
        self._optimizer = build_optimizer(self.model, config.optimizer) if trainable else None
        if trainable:
            self.set_progress(0.0)
        vocab_size = self.model.config.get_text_config().vocab_size
        few = [random_tokens(vocab_size, NUM_SETTLING, seed)]
        self._ask(few, lambda batch: self._head.settle(self.model, batch, self.device, section))
        check_isolation(self._probe, vocab_size, getattr(torch, config.dtype), seed)
        if share_prefixes:
            check_sharing(self._probe, vocab_size, getattr(torch, config.dtype), seed)
            copies = trainable and not config.gradient_checkpointing and not merges(self.device.type)
            if copies and self.data_parallel_rank == 0:
                logger.warning(
                    "%s: on %s prefix sharing keeps a prompt's keys and values for backward once for each response and "
                    "layer, not counted by max_tokens_per_mb; with %s.gradient_checkpointing one layer's at a time",
                    *(section, self.device.type, section),
                )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of a trainable model."""
        if self._optimizer is None:
            raise AssertionError(f"{self.section}: the model is only asked; it has no optimiser and nothing to save")
        return self._optimizer

    def forward(self, micro_batches: Sequence[PackedBatch], temperature: float) -> list[Tensor]:
        """See `TrainEngine`; float64 where the compute dtype is."""
        head = self._head
        if not isinstance(head, LmHead):
            raise AssertionError(f"{self.section}: a value head gives no log-probs")
        return self._ask(
            micro_batches,
            lambda batch: head.logprobs(self.model, batch_tensors(batch, self.device), temperature, False)[0],
        )

    def forward_values(self, micro_batches: Sequence[PackedBatch]) -> list[tuple[Tensor, Tensor]]:
        """See `TrainEngine`; float64 where the compute dtype is, float32 otherwise."""
        head = self._head
        if not isinstance(head, ValueHead):
            raise AssertionError(f"{self.section}: a language-model head gives no values")
        return self._ask(micro_batches, lambda batch: head.values(self.model, batch_tensors(batch, self.device))[:2])

    def train_batch(
        self,
        micro_batches: Sequence[PackedBatch],
        loss: LossFunction | ValueLossFunction,
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """See `TrainEngine`. FSDP averages gradients over ranks, so each share is scaled up by their number: shares add
        up."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        found: list[dict[str, Tensor]] = []
        for batch in micro_batches:
            share, stats = self._head.share(self.model, batch_tensors(batch, self.device), loss, temperature)
            torch.autograd.backward(share * self.data_parallel_size)
            found.append(stats)
        norm = gradient_norm(self.optimizer, self.mesh.get_group(), self.device)
        skipped = not torch.isfinite(norm) or norm == 0
        if skipped:
            logger.warning("%s: update skipped: the gradient's norm is %s", self.section, float(norm))
        else:
            clip(self.optimizer, norm, self.config.optimizer.gradient_clipping)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self._reduce(found) | {
            "grad_norm": float(norm),
            "lr": self.optimizer.param_groups[0]["lr"],
            "update_skipped": float(skipped),
        }

    def set_progress(self, fraction_done: float) -> None:
        """The step is `fraction_done` of all steps: sets the learning rate of the updates that follow."""
        step = round(fraction_done * self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.optimizer, step, self._total_steps)

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """See `TrainEngine`."""
        return tuple(
            TensorSpec(name, tuple(tensor.shape), str(self._sent_dtype(tensor)).removeprefix("torch."))
            for name, tensor in self.model.state_dict().items()
        )

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine`; cast before they are gathered."""
        for name, tensor in self.model.state_dict().items():
            part = tensor.to(self.device, self._sent_dtype(tensor))
            yield name, (part.full_tensor() if isinstance(part, DTensor) else part)

    def stage(self) -> StagedShards:
        """See `TrainEngine`."""
        if self._staged is not None and not self._staged.is_over:
            raise AssertionError("the staged state of the last save has not been written yet")
        state = self._state()
        assert self._save_group is not None
        self._staged = StagedShards(self._host_copy.take(state), self._save_group)
        return self._staged

    def load(self, folder: Path) -> None:
        """See `TrainEngine`."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        state = self._state()
        assert self._save_group is not None
        read_sharded(state, folder, self._save_group)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)

    def export_hf(self, folder: Path) -> None:
        """See `TrainEngine`. The first rank writes; whatever fails there, all gathers are finished before it is
        raised."""
        tied = tied_names(self.model)
        writer, failure = None, None
        if self.data_parallel_rank == 0:
            specs = [spec for spec in self.weight_specs() if spec.name not in tied]
            writer = HfFolderWriter(Path(self.config.path), folder, specs)
        for name, tensor in self.weights():
            if writer is not None and failure is None and name not in tied:
                try:
                    writer.add(name, tensor)
                except OSError as error:
                    failure = error
        if failure is not None:
            raise failure
        if writer is not None:
            writer.finish(str(self._weight_dtype).removeprefix("torch."), self._head.export_settings(self.model))

    def close(self) -> None:
        """Lets go of model, optimiser and staged copy."""
        del self.model, self._optimizer, self._host_copy, self._staged
        if self._save_group is not None:
            dist.destroy_process_group(self._save_group)

    def _ask(self, micro_batches: Sequence[PackedBatch], answer: Callable[[PackedBatch], Answer]) -> list[Answer]:
        """The answer to each micro-batch, without gradient."""
        self.model.eval()
        with torch.no_grad():
            found = [answer(batch) for batch in micro_batches]
        # FSDP leaves the outermost group gathered for a backward pass that does not come.
        self.model.reshard()
        return found

    def _probe(self, micro_batches: Sequence[PackedBatch], temperature: float) -> list[Tensor]:
        return self._ask(micro_batches, lambda batch: self._head.probe(self.model, batch, self.device))

    def _sent_dtype(self, tensor: Tensor) -> torch.dtype:
        return self._weight_dtype if tensor.is_floating_point() else tensor.dtype

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _reduce(self, found: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        """Sums over micro-batches and ranks; maxima where the name ends in `_max`."""
        names = sorted({name for stats in found for name in stats})
        if any(sorted(stats) != names for stats in found):
            raise ValueError(f"loss: micro-batches give different statistics: {[sorted(stats) for stats in found]}")
        if not names:
            return {}
        table = torch.stack([torch.stack([stats[name].to(torch.float64) for name in names]) for stats in found])
        sums, maxima = table.sum(dim=0), table.amax(dim=0)
        dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=self.mesh.get_group())
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self.mesh.get_group())
        return {
            name: (largest if name.endswith("_max") else total)
            for name, total, largest in zip(names, sums.tolist(), maxima.tolist(), strict=True)
        }


def _head(name: str, token_logprobs: TokenLogprobs | None, token_values: TokenValues | None, layout: Layout) -> Head:
    if name == "lm" and token_logprobs is not None:
        return LmHead(token_logprobs, layout)
    if name == "value" and token_values is not None:
        return ValueHead(token_values, layout)
    raise ValueError(f"head: {name!r} is not allowed; lm (with token_logprobs) or value (with token_values)")
