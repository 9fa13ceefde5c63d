"""Reading and writing a Hugging Face model folder tensor by tensor: no rank ever holds two whole models."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from pekoe.pipeline import files
from pekoe.pipeline.messages import TensorSpec

COPIED_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".py", ".tiktoken")
"""What configurations, tokenizers, templates and modelling code are made of; data that lies beside is not a model."""
LEFT_OUT = ("config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Written anew, or of other weight files."""
SHARD_BYTES = 4 << 30


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside (by this thread) have their parameters on the meta device and their buffers for real."""
    original, owner = nn.Module.register_parameter, threading.get_ident()

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, param)
        if param is not None and not param.is_meta and threading.get_ident() == owner:
            module._parameters[name] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def materialise(model: nn.Module, parameter_device: torch.device, buffer_device: torch.device) -> None:
    """Gives meta parameters memory on a device; buffers keep their values and move to theirs."""
    buffers = dict(model.named_buffers())
    model.to_empty(device=parameter_device)
    for name, buffer in buffers.items():
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._buffers[last] = buffer.to(buffer_device)


def load_parameters(
    model: nn.Module,
    folder: Path,
    tied: Iterable[str],
    *,
    fresh: Collection[str] = (),
    foreign: Collection[str] = (),
) -> None:
    """Fills each parameter from the folder's safetensors files; of a sharded one this rank's rows are read, nothing
    else.

    `tied` are names that share another parameter's memory; of `fresh`, those that the files lack become 0; `foreign`
    are left out where the files have them. Raises ValueError naming other parameters that the files lack, parameters
    that the model lacks, and shapes that differ.
    """
    from safetensors import safe_open

    holders = _files_by_name(folder)
    parameters = dict(model.named_parameters())
    known = set(parameters) | set(tied) | {name for name, _ in model.named_buffers()} | set(foreign)
    missing = sorted(set(parameters) - set(holders) - set(fresh))
    extra = sorted(name for name in set(holders) - known if not name.endswith("rotary_emb.inv_freq"))
    if missing or extra:
        raise ValueError(f"{folder}: names differ from the model's; missing {missing[:5]}, unknown {extra[:5]}")
    with ExitStack() as stack:
        opened = {
            file: stack.enter_context(safe_open(folder / file, framework="pt"))
            for file in sorted(set(holders.values()))
        }
        for name, parameter in parameters.items():
            if name not in holders:
                _zero(parameter)
                continue
            stored = opened[holders[name]].get_slice(name)
            if tuple(stored.get_shape()) != tuple(parameter.shape):
                raise ValueError(f"{folder}: {name} has shape {stored.get_shape()}, the model {tuple(parameter.shape)}")
            _copy_rows(parameter, stored)


def _files_by_name(folder: Path) -> dict[str, str]:
    """Which file holds each tensor."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return names
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ValueError(f"{folder}: has neither model.safetensors nor model.safetensors.index.json")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single.name)


@torch.no_grad()
def _zero(parameter: nn.Parameter) -> None:
    (parameter.to_local() if isinstance(parameter, DTensor) else parameter).zero_()


@torch.no_grad()
def _copy_rows(parameter: nn.Parameter, stored: Any) -> None:
    if not isinstance(parameter, DTensor):
        parameter.copy_(stored[:])
        return
    local = parameter.to_local()
    start, rows = local_rows(parameter)
    if rows:
        local.copy_(stored[start : start + rows])


def local_rows(parameter: DTensor) -> tuple[int, int]:
    """(first row, number of rows) of a parameter sharded by rows over a one-dimensional mesh that this rank holds."""
    mesh, (placement,) = parameter.device_mesh, parameter.placements
    local = parameter.to_local()
    assert isinstance(placement, Shard), placement
    assert placement.dim == 0, placement
    chunk = -(-parameter.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * chunk, parameter.shape[0])
    rows = min(chunk, parameter.shape[0] - start)
    assert rows == local.shape[0], (rows, local.shape)
    return start, rows


class HfFolderWriter:
    """Writes safetensors shards beside copies of a source folder's other files, then makes the folder visible at
    once."""

    def __init__(self, source: Path, folder: Path, specs: Sequence[TensorSpec]) -> None:
        self.source, self.folder = source, folder
        self.part = folder.with_name(f"{folder.name}{files.PART}")
        self._plan = plan_shards(specs, SHARD_BYTES)
        self._held: dict[str, Tensor] = {}
        self._number = 0
        files.restore_folder(folder)
        files.put_away(self.part)
        files.make_folder(self.part)

    def add(self, name: str, tensor: Tensor) -> None:
        """Tensors come in the order of the specs; a full shard is written and let go."""
        self._held[name] = tensor.detach().to("cpu").clone()
        if len(self._held) == len(self._plan[self._number]):
            self._write_shard()

    def finish(self, dtype: str, changed: Mapping[str, Any] | None = None) -> None:
        """Writes index, configuration (the source's, with the keys of `changed`) and tokenizer files; renames. An
        older folder of this name is replaced, and deleted when the new one is there."""
        if self._held or self._number != len(self._plan):
            raise ValueError(f"{self.folder}: {self._number} of {len(self._plan)} weight files are complete")
        if len(self._plan) > 1:
            names = {name: self._file(number) for number, shard in enumerate(self._plan) for name in shard}
            index = {"metadata": {}, "weight_map": names}
            files.write_bytes(self.part / "model.safetensors.index.json", json.dumps(index, indent=1).encode())
        for file in sorted(self.source.iterdir()):
            if file.suffix in COPIED_SUFFIXES and file.name not in LEFT_OUT:
                files.copy(file, self.part / file.name)
        settings = json.loads((self.source / "config.json").read_text())
        settings.pop("torch_dtype", None)
        settings = {**settings, **(changed or {}), "dtype": dtype}
        files.write_bytes(self.part / "config.json", (json.dumps(settings, indent=2) + "\n").encode())
        files.fsync_folder(self.part)
        files.replace_folder(self.part, self.folder)
        for left_over in self.folder.parent.glob(f"{self.folder.name}.*{files.DISCARDED}"):
            files.put_away(left_over)

    def _file(self, number: int) -> str:
        if len(self._plan) == 1:
            return "model.safetensors"
        return f"model-{number + 1:05d}-of-{len(self._plan):05d}.safetensors"

    def _write_shard(self) -> None:
        from safetensors.torch import save_file

        write = partial(save_file, self._held, metadata={"format": "pt"})
        files.write_with(self.part / self._file(self._number), write)
        self._held = {}
        self._number += 1


def plan_shards(specs: Sequence[TensorSpec], limit: int) -> list[list[str]]:
    """Names of the tensors of each file, in order, at most `limit` bytes each (a larger tensor has its own)."""
    shards: list[list[str]] = []
    room = 0
    for spec in specs:
        size = torch.Size(spec.shape).numel() * getattr(torch, spec.dtype).itemsize
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(spec.name)
        room -= size
    return shards
