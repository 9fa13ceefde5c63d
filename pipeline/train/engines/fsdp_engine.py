"""The default trainer: a transformers model sharded by FSDP2 over the trainer ranks.

Master weights, gradients and optimiser state are float32 shards (by rows); layers are gathered one at a time in the
compute dtype. Sequences are packed, with exact attention isolation (`packed_attention.py`), which is tested on the
real model at start.

Ranks meet in every method but the queries. Nothing here names a vendor: the device object does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from pekoe.pipeline.config.actor import ActorConfig
from pekoe.pipeline.devices.device import Device
from pekoe.pipeline.messages import TensorSpec
from pekoe.pipeline.records import PackedBatch
from pekoe.pipeline.train.engine import LossFunction, TokenLogprobs
from pekoe.pipeline.train.engines.batch_tensors import batch_tensors
from pekoe.pipeline.train.engines.hf_folder import HfFolderWriter
from pekoe.pipeline.train.engines.host_copy import HostCopy
from pekoe.pipeline.train.engines.isolation import check_isolation
from pekoe.pipeline.train.engines.learning_rate import learning_rate
from pekoe.pipeline.train.engines.packed_attention import PackedSequences
from pekoe.pipeline.train.engines.sharded_files import read_sharded
from pekoe.pipeline.train.engines.sharded_model import build_model, tied_names
from pekoe.pipeline.train.engines.sharded_optimizer import build_optimizer, clip, gradient_norm
from pekoe.pipeline.train.engines.staged_shards import StagedShards, save_group

logger = logging.getLogger(__name__)


class FsdpEngine:
    """One policy model on all trainer ranks; implements `TrainEngine`.

    Building it is collective over torch's default process group (which must exist, also for one rank), or over
    `mesh`. `token_logprobs` is the algorithm's; `weight_dtype` (`float32`, `bfloat16`, …) is that of `weights` and
    of exports. `total_steps` is the length of the schedule. Methods may be called from one thread of any kind.
    """

    def __init__(
        self,
        config: ActorConfig,
        *,
        token_logprobs: TokenLogprobs,
        device: Device,
        device_index: int = 0,
        weight_dtype: str,
        total_steps: int,
        seed: int,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.config = config
        self.device = device.torch_device(device_index)
        device.set_current(device_index)
        self.mesh = mesh or init_device_mesh(device.kind, (dist.get_world_size(),), mesh_dim_names=("data",))
        self.data_parallel_rank = self.mesh.get_local_rank()
        self.data_parallel_size = self.mesh.size()
        self._token_logprobs = token_logprobs
        self._weight_dtype: torch.dtype = getattr(torch, weight_dtype)
        self._total_steps = max(1, total_steps)
        self._save_group = save_group(self.mesh)
        self._host_copy = HostCopy()
        self._staged: StagedShards | None = None
        torch.manual_seed(seed + self.data_parallel_rank)
        self.model: Any = build_model(config, device, self.device, self.mesh)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.set_progress(0.0)
        check_isolation(
            self.forward, self.model.config.get_text_config().vocab_size, getattr(torch, config.dtype), seed
        )

    def forward(self, micro_batches: Sequence[PackedBatch], temperature: float) -> list[Tensor]:
        """See `TrainEngine`; float64 where the compute dtype is."""
        self.model.eval()
        with torch.no_grad():
            found = [
                self._logprobs(batch_tensors(batch, self.device), temperature, False)[0] for batch in micro_batches
            ]
        # FSDP leaves the outermost group gathered for a backward pass that does not come.
        self.model.reshard()
        return found

    def train_batch(
        self, micro_batches: Sequence[PackedBatch], loss: LossFunction, temperature: float
    ) -> dict[str, float]:
        """See `TrainEngine`. FSDP averages gradients over ranks, so each share is scaled up by their number: shares add
        up."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        found: list[dict[str, Tensor]] = []
        for batch in micro_batches:
            tensors = batch_tensors(batch, self.device)
            logprobs, entropy, anchor = self._logprobs(tensors, temperature, True)
            if not loss.needs_entropy_gradient:
                entropy = entropy.detach()
            share, stats = loss(logprobs, entropy, tensors)
            torch.autograd.backward((share + anchor) * self.data_parallel_size)
            found.append(stats)
        norm = gradient_norm(self.optimizer, self.mesh.get_group(), self.device)
        skipped = not torch.isfinite(norm) or norm == 0
        if skipped:
            logger.warning("update skipped: the gradient's norm is %s", float(norm))
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
        self._staged = StagedShards(self._host_copy.take(self._state()), self._save_group)
        return self._staged

    def load(self, folder: Path) -> None:
        """See `TrainEngine`."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        state = self._state()
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
            writer.finish(str(self._weight_dtype).removeprefix("torch."))

    def close(self) -> None:
        """Lets go of model, optimiser and staged copy."""
        del self.model, self.optimizer, self._host_copy, self._staged
        dist.destroy_process_group(self._save_group)

    def _logprobs(
        self, tensors: dict[str, Tensor], temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probs [M], entropies [M], anchor): the anchor is 0, and ties a micro-batch without active tokens to the
        model, so that its rank takes part in the collectives of forward and backward."""
        if not tensors["loss_mask"].any():
            token = torch.zeros(1, dtype=torch.int64, device=self.device)
            logits = self._logits(token, torch.zeros_like(token), PackedSequences.of((0, 1), self.device), token)
            anchor = logits.sum() * 0
            zeros = torch.zeros(len(tensors["tokens"]), dtype=_result_dtype(logits), device=self.device)
            return zeros + anchor, zeros.clone(), anchor
        bounds = PackedSequences.of(tensors["cu_seqlens"].tolist(), self.device)

        def logits_at(positions: Tensor) -> Tensor:
            return self._logits(tensors["tokens"], tensors["position_ids"], bounds, positions)

        logprobs, entropy = self._token_logprobs(
            logits_at, tensors["tokens"], tensors["cu_seqlens"], tensors["loss_mask"], temperature, with_entropy
        )
        return logprobs, entropy, torch.zeros((), device=self.device)

    def _logits(self, tokens: Tensor, positions: Tensor, packed: PackedSequences, keep: Tensor) -> Tensor:
        """Logits [K, V] at the indices `keep` [K] of packed tokens [M]."""
        output = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=None,
            use_cache=False,
            logits_to_keep=keep,
            packed_sequences=packed,
        )
        logits: Tensor = output.logits[0]
        return logits

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


def _result_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
