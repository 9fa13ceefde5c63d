"""Bodies of OpenAI's chat completions and completions, read into prompts and sampling parameters.

What is understood beside OpenAI's own fields: `top_k`, `min_tokens`, `ignore_eos`, `stop_token_ids`, `return_token_ids`
and `chat_template_kwargs`, as vLLM's server names them. A field with the value null is absent. A field that would
change the answer and is not served is refused by name; those in IGNORED change nothing here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pekoe.pipeline.prompts import prompt_ids
from pekoe.pipeline.rollout.engine import SamplingParameters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_N = 256
MAX_STOPS = 16
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; a chat's default is the rest of the context."""

SHARED_FIELDS = frozenset(
    {
        "model", "n", "max_tokens", "temperature", "top_p", "top_k", "min_tokens", "ignore_eos", "stop",
        "stop_token_ids", "seed", "frequency_penalty", "logit_bias", "logprobs", "return_token_ids",
    }
)  # fmt: skip
CHAT_FIELDS = SHARED_FIELDS | {"messages", "max_completion_tokens", "chat_template_kwargs", "top_logprobs"}
COMPLETION_FIELDS = SHARED_FIELDS | {"prompt"}
IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options",
        "parallel_tool_calls", "tool_choice", "function_call",
    }
)  # fmt: skip
ONLY_DEFAULT: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "presence_penalty": (0,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "modalities": (["text"],),
}
"""Fields that are understood with the values that ask for nothing, and refused with any other."""


class RequestError(ValueError):
    """A request that is refused: what OpenAI's error object and status say about it."""

    def __init__(self, message: str, field: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """What a body asks for: `n` completions of each prompt."""

    prompts: tuple[tuple[int, ...], ...]
    n: int
    sampling: SamplingParameters
    seed: int | None
    logprobs: bool
    return_token_ids: bool


class RequestReader:
    """Reads bodies for one model. `max_new_tokens` is what a chat gets that names no number."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: str, max_new_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._max_new_tokens = max_new_tokens

    def chat(self, body: bytes) -> CompletionRequest:
        fields = Fields(body, CHAT_FIELDS, self._model)
        messages = _messages(fields.raw("messages"))
        arguments = fields.raw("chat_template_kwargs") or {}
        if not isinstance(arguments, dict):
            raise RequestError("chat_template_kwargs: an object is needed", "chat_template_kwargs")
        try:
            prompt = tuple(prompt_ids(self._tokenizer, messages, arguments))
        except Exception as error:  # a template raises what its author and jinja chose
            raise RequestError(f"messages: the chat template refuses them: {error}", "messages") from error
        if fields.integer("top_logprobs", 0, 0, 20) != 0:
            raise RequestError("top_logprobs: only that of the sampled token is given; allowed: 0", "top_logprobs")
        limit = fields.integer("max_tokens", self._max_new_tokens, 1)
        return self._request(
            fields, (prompt,), fields.integer("max_completion_tokens", limit, 1), fields.boolean("logprobs")
        )

    def completion(self, body: bytes) -> CompletionRequest:
        fields = Fields(body, COMPLETION_FIELDS, self._model)
        prompts = _prompts(fields.raw("prompt"), lambda text: tuple(self._tokenizer.encode(text)))
        if fields.raw("logprobs") not in (None, False, True, 0, 1):
            raise RequestError("logprobs: only those of the sampled tokens are given; allowed: 0 or 1", "logprobs")
        limit = fields.integer("max_tokens", DEFAULT_COMPLETION_TOKENS, 1)
        wanted = fields.raw("logprobs")
        return self._request(fields, prompts, limit, wanted is not None and wanted is not False)

    def _request(
        self, fields: Fields, prompts: tuple[tuple[int, ...], ...], max_new_tokens: int, logprobs: bool
    ) -> CompletionRequest:
        if any(not prompt for prompt in prompts):
            raise RequestError("the prompt has no tokens", "prompt" if fields.raw("messages") is None else "messages")
        temperature = fields.number("temperature", 1.0, 0.0, 2.0)
        sampling = SamplingParameters(
            max_new_tokens=max_new_tokens,
            min_new_tokens=fields.integer("min_tokens", 0, 0, max_new_tokens),
            temperature=temperature or 1.0,
            greedy=temperature == 0,
            top_p=fields.number("top_p", 1.0, 1e-6, 1.0),
            top_k=max(0, fields.integer("top_k", 0, -1)),
            stop=fields.strings("stop"),
            stop_token_ids=fields.integers("stop_token_ids"),
            ignore_eos=fields.boolean("ignore_eos"),
            frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
            logit_bias=fields.biases("logit_bias"),
        )
        seed = fields.raw("seed")
        return CompletionRequest(
            prompts=prompts,
            n=fields.integer("n", 1, 1, MAX_N),
            sampling=sampling,
            seed=None if seed is None else fields.integer("seed", 0),
            logprobs=logprobs,
            return_token_ids=fields.boolean("return_token_ids"),
        )


class Fields:
    """The fields of a body, each checked as it is read: a RequestError names field, value and what is allowed."""

    def __init__(self, body: bytes, known: frozenset[str], model: str) -> None:
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is no JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise RequestError("the body is no JSON object")
        self._fields = {name: value for name, value in parsed.items() if value is not None}
        for name, value in self._fields.items():
            if name in known or name in IGNORED:
                continue
            if name not in ONLY_DEFAULT:
                raise RequestError(f"{name}: this field is not known here", name, code="unknown_parameter")
            if value not in ONLY_DEFAULT[name]:
                allowed = " or ".join(json.dumps(default) for default in ONLY_DEFAULT[name])
                raise RequestError(f"{name}: not served here; allowed: {allowed}", name, code="unsupported_value")
        asked = self._fields.get("model", model)
        if asked != model:
            message = f"model: {_short(asked)} is not served here; allowed: {model!r}"
            raise RequestError(message, "model", status=404, code="model_not_found")

    def raw(self, name: str) -> Any:
        return self._fields.get(name)

    def boolean(self, name: str) -> bool:
        value = self._fields.get(name, False)
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value

    def integer(self, name: str, default: int, lowest: int = -(1 << 63), highest: int = (1 << 63) - 1) -> int:
        value = self._fields.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
            raise _wrong(name, value, f"an integer from {lowest} to {highest}")
        return value

    def number(self, name: str, default: float, lowest: float, highest: float) -> float:
        value = self._fields.get(name, default)
        if not _is_number(value) or not lowest <= value <= highest:
            raise _wrong(name, value, f"a number from {lowest} to {highest}")
        return float(value)

    def strings(self, name: str) -> tuple[str, ...]:
        """One string or a list of them."""
        value = self._fields.get(name, [])
        found = [value] if isinstance(value, str) else value
        is_fit = isinstance(found, list) and len(found) <= MAX_STOPS and all(isinstance(s, str) and s for s in found)
        if not is_fit:
            raise _wrong(name, value, f"a string or up to {MAX_STOPS} of them, none of them empty")
        return tuple(found)

    def integers(self, name: str) -> tuple[int, ...]:
        value = self._fields.get(name, [])
        if not isinstance(value, list) or not all(_is_token(token) for token in value):
            raise _wrong(name, value, "a list of token ids")
        return tuple(value)

    def biases(self, name: str) -> tuple[tuple[int, float], ...]:
        """An object from token ids, as strings, to numbers."""
        value = self._fields.get(name, {})
        allowed = "an object from token ids to numbers from -100 to 100"
        if not isinstance(value, dict):
            raise _wrong(name, value, allowed)
        found = []
        for token, bias in value.items():
            if not (token.isascii() and token.isdigit()) or not _is_number(bias) or not -100 <= bias <= 100:
                raise _wrong(name, {token: bias}, allowed)
            found.append((int(token), float(bias)))
        return tuple(found)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _wrong(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{name}: {_short(value)}; allowed: {allowed}", name, code="invalid_value")


def _messages(value: object) -> list[dict[str, str]]:
    """Role and text of each message; text comes as a string or as parts of the type text."""
    if not isinstance(value, list) or not value:
        raise RequestError("messages: a list of at least one message is needed", "messages")
    read = []
    for i, message in enumerate(value):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"{where}: an object with a role is needed", where)
        content = message.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
                raise RequestError(f"{where}.content: a part is no text; allowed: text", f"{where}.content")
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(content, str):
            raise RequestError(f"{where}.content: {_short(content)}; allowed: text", f"{where}.content")
        for name in ("tool_calls", "function_call"):
            if message.get(name):
                raise RequestError(f"{where}.{name}: not served here", f"{where}.{name}", code="unsupported_value")
        read.append({"role": message["role"], "content": content})
    return read


def _prompts(value: object, encode: Callable[[str], Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """A text, a list of token ids, or a list of either."""
    one_prompt = isinstance(value, str) or (isinstance(value, list) and bool(value) and _is_token(value[0]))
    prompts = [value] if one_prompt else value
    if not isinstance(prompts, list) or not 0 < len(prompts) <= MAX_N:
        raise _wrong("prompt", value, f"a text, a list of token ids, or 1 to {MAX_N} of either")
    read: list[tuple[int, ...]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            read.append(tuple(encode(prompt)))
        elif isinstance(prompt, list) and all(_is_token(token) for token in prompt):
            read.append(tuple(prompt))
        else:
            raise _wrong("prompt", prompt, "a text or a list of token ids")
    return tuple(read)
