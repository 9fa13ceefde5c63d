"""Replacing the weights of a vLLM model between two steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, layerwise

from pekoe.pipeline.rollout.engines.vllm.checkpoint_names import CheckpointNames


class WeightLoader:
    """Loads full sets of Hugging Face weights through vLLM's layer-wise reload, which makes fused, prepacked and tied
    copies anew."""

    def __init__(self, client: Any, runner: Any, names: CheckpointNames) -> None:
        self._client = client
        self._runner = runner
        self._names = names
        logging.getLogger(layerwise.__name__).setLevel(logging.ERROR)  # it warns of layers that have no weights
        self.is_usable = True
        """False after a load that failed so that vLLM cannot take another one."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """ValueError as `CheckpointNames.checked`; after an exception the weights are mixed but may be loaded again."""
        model = self._runner.get_model()
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None  # type: ignore[union-attr]  # else the experts' prepacked copies stay
        stream = kept(self._names.checked(weights))
        try:
            self._client.engine_core.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})
        except BaseException:
            self.is_usable = False
            finalize_layerwise_reload(model, self._runner.model_config)
            self.is_usable = True
            raise


def kept(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies: vLLM holds tensors until their layer is complete, the sender's are gone with the next one."""
    for name, tensor in weights:
        yield name, tensor.clone()
