"""Completions written as OpenAI's answers, and refusals as its error objects."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pekoe.pipeline.records import Finish

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pekoe.pipeline.agents.openai_requests import CompletionRequest
    from pekoe.pipeline.rollout.engine import Response

FINISH_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort"}


def error_object(message: str, kind: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def model_list(model: str, created: int) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": model, "object": "model", "created": created, "owned_by": "pekoe"}]}


@dataclass(frozen=True, slots=True)
class AnswerWriter:
    """Writes the answers of one model. Responses come prompt by prompt, `n` for each."""

    tokenizer: PreTrainedTokenizerBase
    model: str

    def chat(self, request: CompletionRequest, responses: Sequence[Response]) -> dict[str, Any]:
        choices = []
        for i, response in enumerate(responses):
            choice: dict[str, Any] = {
                "index": i,
                "message": {"role": "assistant", "content": self._text(request, response)},
                "finish_reason": FINISH_REASONS[response.finish],
                "logprobs": {"content": self._token_entries(response)} if request.logprobs else None,
            }
            choices.append(choice | self._ids(request, response))
        answer = self._answer("chatcmpl", "chat.completion", request, responses, choices)
        if request.return_token_ids:
            answer["prompt_token_ids"] = list(request.prompts[0])
        return answer

    def completion(self, request: CompletionRequest, responses: Sequence[Response]) -> dict[str, Any]:
        choices = []
        for i, response in enumerate(responses):
            choice: dict[str, Any] = {
                "index": i,
                "text": self._text(request, response),
                "finish_reason": FINISH_REASONS[response.finish],
                "logprobs": self._token_columns(response) if request.logprobs else None,
            }
            choice |= self._ids(request, response)
            if request.return_token_ids:
                choice["prompt_token_ids"] = list(request.prompts[i // request.n])
            choices.append(choice)
        return self._answer("cmpl", "text_completion", request, responses, choices)

    def _answer(
        self, prefix: str, kind: str, request: CompletionRequest, responses: Sequence[Response],
        choices: list[dict[str, Any]],
    ) -> dict[str, Any]:  # fmt: skip
        num_prompt = sum(len(prompt) for prompt in request.prompts)
        num_completion = sum(len(response.tokens) for response in responses)
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_completion,
                "total_tokens": num_prompt + num_completion,
            },
        }

    def _text(self, request: CompletionRequest, response: Response) -> str:
        """Without special tokens, and without the stop string that the last token completed and what is behind it."""
        tokens = response.tokens.tolist()
        text = self._decode(tokens, skip_special=True)
        stops = request.sampling.stop
        if response.finish is not Finish.STOP or not stops:
            return text
        before = len(self._decode(tokens[:-1], skip_special=True))
        found = [at for stop in stops if (at := text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        return text[: min(found)] if found else text

    def _ids(self, request: CompletionRequest, response: Response) -> dict[str, Any]:
        """What a trainer needs of a completion, beside its text: the ids, and the version that sampled each."""
        if not request.return_token_ids:
            return {}
        return {"token_ids": response.tokens.tolist(), "weight_versions": response.versions.tolist()}

    def _token_entries(self, response: Response) -> list[dict[str, Any]]:
        entries = []
        for token, logprob in zip(response.tokens.tolist(), response.logprobs.tolist(), strict=True):
            text = self._decode([token])
            entry = {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            entries.append(entry)
        return entries

    def _token_columns(self, response: Response) -> dict[str, Any]:
        texts = [self._decode([token]) for token in response.tokens.tolist()]
        offsets, at = [], 0
        for text in texts:
            offsets.append(at)
            at += len(text)
        return {
            "tokens": texts,
            "token_logprobs": response.logprobs.tolist(),
            "top_logprobs": None,
            "text_offset": offsets,
        }

    def _decode(self, tokens: list[int], skip_special: bool = False) -> str:
        text = self.tokenizer.decode(tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
