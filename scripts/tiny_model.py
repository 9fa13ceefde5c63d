"""A random Qwen3 with a character tokenizer, and additions as JSON lines: for tests, benchmarks and smoke runs.

python scripts/tiny_model.py OUT        writes OUT/model and OUT/sums.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

CHARACTERS = "0123456789+-= "


def write_tiny_model(
    folder: Path, seed: int = 0, layers: int = 2, hidden: int = 32, positions: int = 128, head_dim: int = 16
) -> Path:
    """Qwen3 in Hugging Face format, float32, tied embeddings; the characters above and three special tokens.

    vLLM wants a `head_dim` of at least 32."""
    import torch
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(vocabulary), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=positions,
        tie_word_embeddings=True, eos_token_id=1, pad_token_id=0, bos_token_id=None, dtype="float32",
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def write_sums(path: Path, count: int, seed: int = 0) -> Path:
    """Additions of one-digit numbers as JSON lines."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            a, b = rng.randint(0, 9), rng.randint(0, 9)
            file.write(json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)}) + "\n")
    return path


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    print(write_tiny_model(out / "model"), write_sums(out / "sums.jsonl", 64))
