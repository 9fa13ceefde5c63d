"""Tokenizers with the chat templates of common families, one token a character."""

from __future__ import annotations

from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen3's: an empty thought before the last answer alone, so that a shorter chat is no beginning of a longer one."""
HEADERS = (
    "<|bos|>{% for m in messages %}<|start|>{{ m['role'] }}<|end|>\n\n{{ m['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
"""As Llama 3's: headers, a token at the beginning, contents trimmed."""
TAGGED = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)
"""As Llama 2's: no opening of an answer; a space before it belongs to the template."""
TEMPLATES = {"chatml": CHATML, "thinking": THINKING, "headers": HEADERS, "tagged": TAGGED}
SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>", "<|bos|>", "<|start|>", "<|end|>", "<unk>")


def make_tokenizer(template: str | None) -> Any:
    """Characters of ASCII and the special tokens above; ends with `<|im_end|>`."""
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    characters = ["\n", *map(chr, range(32, 127)), "é", "日"]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    core = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<pad>", unk_token="<unk>",
        additional_special_tokens=[token for token in SPECIAL if token not in ("<pad>", "<unk>")],
        chat_template=template, clean_up_tokenization_spaces=False,
    )  # fmt: skip
