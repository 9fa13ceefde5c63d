"""Whether a model beside the policy reads the policy's token ids as the policy does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


def has_tokenizer(folder: str) -> bool:
    """Whether a model folder comes with a tokenizer."""
    return any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)


def check_same_vocabulary(section: str, folder: str, policy: str, tokenizer: str) -> None:
    """Raises ValueError, naming a token, unless every id of the policy's tokenizer (folder `tokenizer`) that the policy
    has an embedding for is the same token for the model in `folder`.

    A folder without a tokenizer must have the policy's `vocab_size`. The model may know further tokens, and pad its
    vocabulary to another size.
    """
    if Path(folder).resolve() == Path(policy).resolve():
        return
    size, policy_size = _vocab_size(section, folder), _vocab_size("actor", policy)
    if not has_tokenizer(folder):
        if size != policy_size:
            raise ValueError(
                f"{section}.path: {folder} has {size} tokens and no tokenizer, the policy {policy_size}; "
                "a model beside the policy must have its vocabulary"
            )
        return
    ours = {token: number for token, number in _vocabulary(tokenizer).items() if number < policy_size}
    theirs = _vocabulary(folder)
    differing = sorted((number, token) for token, number in ours.items() if theirs.get(token) != number)
    if differing:
        number, token = differing[0]
        raise ValueError(
            f"{section}.path: {folder} has another vocabulary than the policy: token {token!r} is {number} in "
            f"{tokenizer} and {theirs.get(token, 'nothing')} here ({len(differing)} such tokens); a model beside the "
            "policy must have its vocabulary"
        )
    if max(ours.values(), default=-1) >= size:
        raise ValueError(
            f"{section}.path: {folder} has embeddings for {size} tokens; the policy's ids go up to {max(ours.values())}"
        )


def _vocabulary(folder: str) -> dict[str, int]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    found: dict[str, int] = tokenizer.get_vocab()
    return found


def _vocab_size(section: str, folder: str) -> int:
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise ValueError(f"{section}.path: {folder!r} is not a model folder (no config.json)")
    facts = json.loads(file.read_text())
    return int(facts.get("text_config", facts)["vocab_size"])
