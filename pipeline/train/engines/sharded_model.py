"""Building a transformers model as FSDP2 shards, and filling them from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from pekoe.pipeline.config.actor import ModelConfig
from pekoe.pipeline.devices.device import Device
from pekoe.pipeline.records import PackedBatch
from pekoe.pipeline.train.engines.hf_folder import load_parameters, materialise, parameters_on_meta
from pekoe.pipeline.train.engines.packed_attention import choose_attention, register


class Head(Protocol):
    """What a model ends in, and what an engine makes of it."""

    @property
    def fresh(self) -> frozenset[str]:
        """Names of parameters that start at 0 where the folder has none and they will be trained."""
        ...

    @property
    def foreign(self) -> frozenset[str]:
        """Names of parameters of other heads, left out where the folder has them."""
        ...

    def build(self, settings: Any, **options: Any) -> Any:
        """The transformers model of a configuration; `options` are those of `from_config`."""
        ...

    def settle(self, model: Any, batch: PackedBatch, device: torch.device, section: str) -> None:
        """Looks at the loaded model, by passes over a few tokens, and chooses how to compute; collective, without
        gradient."""
        ...

    def export_settings(self, model: Any) -> Mapping[str, Any]:
        """What differs in `config.json` from that of the folder that the model was loaded from."""
        ...

    def probe(self, model: Any, batch: PackedBatch, device: torch.device) -> Tensor:
        """A number [M] for each token that depends on the tokens before it, for the test of isolation."""
        ...

    def share(
        self, model: Any, tensors: dict[str, Tensor], loss: Any, temperature: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's share of a loss, with its gradient, and its statistics. An empty one takes part, too."""
        ...


def build_model(
    config: ModelConfig,
    head: Head,
    device: Device,
    torch_device: torch.device,
    mesh: DeviceMesh,
    *,
    trainable: bool,
    section: str,
) -> Any:
    """The model of `config.path`, loaded, each decoder layer a shard group of its own.

    Master weights are float32 (float64 for float64); those of a model that is not `trainable` have the compute dtype.
    `section` of the configuration is named in errors.
    """
    import transformers

    dtype: torch.dtype = getattr(torch, config.dtype)
    folder = Path(config.path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{section}.path: {config.path!r} is not a model folder (no config.json)")
    kind = choose_attention(config.fsdp.attention, device.attention_choice(), dtype, section)
    settings = transformers.AutoConfig.from_pretrained(folder)
    if config.disable_dropout:
        _clear_dropout(settings)
    held = dtype if not trainable else torch.promote_types(dtype, torch.float32)
    with parameters_on_meta():
        model = head.build(settings, dtype=held, attn_implementation=register(kind))
    model.requires_grad_(trainable)
    if config.gradient_checkpointing and trainable:
        newer = getattr(model, "activation_checkpointing_enable", None)
        (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
    _shard(model, config, dtype, mesh, pin_memory=device.kind != "cpu")
    home = torch.device("cpu") if config.fsdp.offload_params else torch_device
    materialise(model, home, torch_device)
    _check_ties(model)
    fresh = head.fresh if trainable else frozenset[str]()
    load_parameters(model, folder, tied_names(model), fresh=fresh, foreign=head.foreign)
    return model


def tied_names(model: Any) -> frozenset[str]:
    """Names in the state dict that share another parameter's memory, and that Hugging Face files leave out."""
    owned = {name for name, _ in model.named_parameters()}
    return frozenset(name for name, _ in model.named_parameters(remove_duplicate=False) if name not in owned)


def _shard(model: Any, config: ModelConfig, dtype: torch.dtype, mesh: DeviceMesh, pin_memory: bool) -> None:
    half = dtype in (torch.bfloat16, torch.float16)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    offload = CPUOffloadPolicy(pin_memory=pin_memory) if config.fsdp.offload_params else OffloadPolicy()
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)


def _check_ties(model: Any) -> None:
    """Sharding must not have torn the input and output embeddings of a tied model apart."""
    if model.config.tie_word_embeddings and model.get_output_embeddings() is not None:
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        if not tied:
            raise RuntimeError("sharding made two parameters of tied embeddings")


def _clear_dropout(settings: Any) -> None:
    """Sets every dropout probability of a transformers configuration to 0."""
    for name, value in list(vars(settings).items()):
        if "dropout" in name and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(settings, name, 0.0)
