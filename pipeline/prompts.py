"""How chat messages become prompt tokens: one function, so that filtering by length and sampling count the same
tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt, ready for the model's answer.

    With a chat template: the rendered messages and the opening of the answer; `template_args` go to the template
    (`enable_thinking`, …). Without one: the contents joined by blank lines, with the tokenizer's own special tokens.
    """
    if not tokenizer.chat_template:
        return list(tokenizer.encode("\n\n".join(message["content"] for message in messages)))
    rendered: Any = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **(template_args or {}),
    )
    return [int(token) for token in rendered["input_ids"]]
