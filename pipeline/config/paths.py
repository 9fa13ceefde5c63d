"""Models, tokenizers and data sets become absolute local paths, checked file by file, before anything starts.

No network is used. A compute node often has none, and a library that asks the Hub there hangs or fails late. So a
repository id is looked up once, here, in the local Hugging Face cache, and what the run records is the folder.
"""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

from pekoe.pipeline.config.dataset import DatasetConfig
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.schema import ConfigError
from pekoe.pipeline.config.settle import MODELS_BESIDE

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
PATH_DATASETS = ("demonstrations", "gsm8k", "jsonl", "preferences")
"""Registered data sets whose `path` is a file or folder."""

_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")


def resolve_paths(config: RunConfig) -> RunConfig:
    """A copy in which models, tokenizer, data sets and `cluster.fileroot` are absolute local paths.

    Raises ConfigError with one line per missing file. Nothing is read but file names, `config.json`'s presence and the
    weights' index; nothing is downloaded.
    """
    resolved = copy.deepcopy(config)
    problems: list[str] = []
    resolved.actor.path = _model(config.actor.path, "actor.path", problems)
    for name in MODELS_BESIDE:
        section = getattr(resolved, name)
        if section is not None:
            section.path = _model(section.path, f"{name}.path", problems) if section.path else resolved.actor.path
    if config.rollout.path is not None:
        resolved.rollout.path = _model(config.rollout.path, "rollout.path", problems)
    if config.tokenizer_path is not None:
        resolved.tokenizer_path = _tokenizer(config.tokenizer_path, "tokenizer_path", problems)
    elif config.actor.path and not problems:
        _tokenizer(resolved.actor.path, "tokenizer_path (null: actor.path)", problems)
    _dataset(resolved.train_dataset, "train_dataset", problems)
    if resolved.valid_dataset is not None:
        _dataset(resolved.valid_dataset, "valid_dataset", problems)
    resolved.cluster.fileroot = str(Path(config.cluster.fileroot).expanduser().absolute())
    if config.cluster.site is not None and config.cluster.site.endswith((".yaml", ".yml")):
        resolved.cluster.site = str(Path(config.cluster.site).expanduser().absolute())
    if problems:
        raise ConfigError(problems)
    return resolved


def model_context_limit(path: str | Path) -> int | None:
    """`max_position_embeddings` of a model folder; None where its configuration names none."""
    text = _read_model_config(Path(path))
    limit = text.get("max_position_embeddings", (text.get("text_config") or {}).get("max_position_embeddings"))
    return limit if isinstance(limit, int) else None


def model_vocabulary(path: str | Path) -> int | None:
    """`vocab_size` of a model folder; None where its configuration names none."""
    text = _read_model_config(Path(path))
    size = text.get("vocab_size", (text.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def tokenizer_vocabulary(path: str | Path) -> dict[str, int]:
    """Id of each token that `tokenizer.json` of a folder names, added ones too; {} where there is none."""
    file = Path(path) / "tokenizer.json"
    try:
        parsed = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError:
        return {}
    vocabulary = (parsed.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # of kind Unigram: pieces with their scores, in the order of the ids
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    return vocabulary | {added["content"]: added["id"] for added in parsed.get("added_tokens") or ()}


def model_heads(path: str | Path) -> tuple[int, int] | None:
    """Attention heads, and heads of keys and values, of a model folder; None where its configuration names none."""
    text = _read_model_config(Path(path))
    text = text.get("text_config") or text
    heads = text.get("num_attention_heads")
    if not isinstance(heads, int):
        return None
    keys = text.get("num_key_value_heads")
    return heads, keys if isinstance(keys, int) else heads


def lacks_value_head(path: str | Path) -> bool:
    """Whether a model folder says that it is of another kind than a sequence classifier, whose head gives the score."""
    kinds = _read_model_config(Path(path)).get("architectures")
    return isinstance(kinds, list) and not any(str(kind).endswith("ForSequenceClassification") for kind in kinds)


def _read_model_config(folder: Path) -> dict[str, Any]:
    with open(folder / "config.json", encoding="utf-8") as file:
        parsed = json.load(file)
    return parsed if isinstance(parsed, dict) else {}


def _model(path: str, key: str, problems: list[str]) -> str:
    folder = _folder(path, key, "model", problems)
    if folder is None:
        return path
    missing = _missing_of_model(folder)
    if missing:
        problems.append(f"{key}: {path!r} lacks {missing} (looked in {folder})")
    return str(folder)


def _missing_of_model(folder: Path) -> str:
    """What a model folder lacks, or "": its configuration, its weights, or a shard that the index names."""
    if not (folder / "config.json").is_file():
        return _named(folder, "config.json")
    try:
        _read_model_config(folder)
    except ValueError:
        return "a readable config.json (it is not JSON)"
    present = [name for name in WEIGHTS if (folder / name).is_file()]
    if not present:
        dangling = [name for name in WEIGHTS if (folder / name).is_symlink()]
        return _named(folder, dangling[0]) if dangling else f"weights (one of {', '.join(WEIGHTS)})"
    if not present[0].endswith(".index.json"):
        return ""
    try:
        shards = sorted(set(json.loads((folder / present[0]).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError):
        return f"a readable {present[0]} (no weight_map in it)"
    absent = [name for name in shards if not (folder / name).is_file()]
    more = f" and {len(absent) - 1} more of its {len(shards)} shards" if len(absent) > 1 else ""
    return f"{_named(folder, absent[0])}{more}" if absent else ""


def _named(folder: Path, name: str) -> str:
    return f"{name} (a symbolic link to nothing)" if (folder / name).is_symlink() else name


def _tokenizer(path: str, key: str, problems: list[str]) -> str:
    folder = _folder(path, key, "model", problems)
    if folder is None:
        return path
    if not any((folder / name).is_file() for name in TOKENIZERS):
        problems.append(f"{key}: {str(path)!r} lacks a tokenizer (one of {', '.join(TOKENIZERS)}; looked in {folder})")
    return str(folder)


def _dataset(config: DatasetConfig, key: str, problems: list[str]) -> None:
    if config.type not in PATH_DATASETS:
        if config.type != "reasoning_gym" and config.path and Path(config.path).expanduser().exists():
            config.path = str(Path(config.path).expanduser().absolute())
        return
    found = _local(config.path, f"{key}.path", "dataset", problems)
    if found is not None:
        config.path = str(found)


def _folder(path: str, key: str, kind: str, problems: list[str]) -> Path | None:
    found = _local(path, key, kind, problems)
    if found is not None and not found.is_dir():
        problems.append(f"{key}: {path!r} is not a folder; allowed: a {kind} folder in Hugging Face format")
        return None
    return found


def _local(path: str, key: str, kind: str, problems: list[str]) -> Path | None:
    """The absolute path of an existing file or folder, or of the snapshot of a repository in the local cache."""
    if not path:
        problems.append(
            f"{key}: is not set; allowed: a local path, or the id of a repository in the local Hugging Face cache"
        )
        return None
    local = Path(path).expanduser()
    if local.exists():
        return Path(os.path.abspath(local))
    if not _REPOSITORY.fullmatch(path) or path.startswith("."):
        problems.append(f"{key}: {path!r} does not exist; allowed: an existing local path")
        return None
    snapshot = _cached_snapshot(path, kind)
    if snapshot is None:
        problems.append(
            f"{key}: {path!r} is no local path and not in the local Hugging Face cache ({_cache_folder()}); "
            "download it there first: nothing is downloaded at the start of a run"
        )
    return snapshot


def _cache_folder() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _cached_snapshot(repository: str, kind: str) -> Path | None:
    """The folder of the repository's newest revision in the cache; asks nobody."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(repository, repo_type=kind, cache_dir=_cache_folder(), local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return Path(folder)
