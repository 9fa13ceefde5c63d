"""How chat messages become prompt tokens: one function, so that filtering by length and sampling count the same
tokens; and how a conversation goes on after tokens that were sampled, which are never written as text and back."""

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


PLACE = "PEKOE-ANSWER"
"""Stands for the model's answer while a template is rendered: the text behind it is what follows any answer."""


def follow_up_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    reply: Mapping[str, str],
    end_token: int | None,
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids between an answer that was sampled and the next one: the answer's closing, `reply`, the next opening.

    `messages` are the conversation before the answer. `end_token` is the one with which the model ended it, if it did:
    where it is the template's closing token, that is not there a second time. A tokenizer without a chat template
    separates by blank lines. ValueError for a template that shows no answers, or shows them altered.
    """
    if not tokenizer.chat_template:
        return _plain_ids(tokenizer, f"\n\n{reply['content']}\n\n")
    rendered = tokenizer.apply_chat_template(
        [*(dict(message) for message in messages), {"role": "assistant", "content": PLACE}, dict(reply)],
        add_generation_prompt=True,
        tokenize=False,
        **(template_args or {}),
    )
    before, place, behind = str(rendered).rpartition(PLACE)
    if not place:
        raise ValueError(f"tokenizer: its chat template does not show an answer ({PLACE}) as it is: {before[-200:]!r}")
    ids = _plain_ids(tokenizer, behind)
    return ids[1:] if ids[:1] == [end_token] else ids


def _plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
