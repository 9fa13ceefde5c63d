"""The data of a supervised run: examples on every rank, and how they become labelled tokens."""

from __future__ import annotations

from typing import Any

from pekoe.pipeline.config.dataset import DatasetConfig
from pekoe.pipeline.config.paths import model_context_limit
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.supervised_checks import labelled_limit
from pekoe.pipeline.config.tasks import sides
from pekoe.pipeline.data.dataset import Dataset, build
from pekoe.pipeline.data.encoder import Encoder
from pekoe.pipeline.runs.start import RunData
from pekoe.pipeline.runs.supervised_rows import KEPT_ENCODINGS, RowSource


class SupervisedData(RunData):
    """Examples as the source has them: `max_length` cuts sequences here, and leaves no prompt out."""

    def _made(self, key: str, section: DatasetConfig) -> Dataset:
        return build(section, key)


def row_source(config: RunConfig, dataset: Dataset, section: DatasetConfig) -> RowSource:
    """Labelled tokens of the examples of a section. ValueError names what of its `args` is not allowed."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(config.tokenizer_path or config.actor.path)
    limit = labelled_limit(section, model_context_limit(config.actor.path))
    if limit is None:
        raise ValueError("max_length: not given, and the model names no limit; allowed: a number of tokens")
    encoder = Encoder(tokenizer, limit, sides(config) == 2, section.args)
    return RowSource(dataset, encoder, KEPT_ENCODINGS * config.train_dataset.batch_size)
