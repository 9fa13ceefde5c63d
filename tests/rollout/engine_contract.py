"""What every inference engine does with a request, as checks that take a running engine: engines are interchangeable.

A test writes the model (`write_contract_model`), builds an engine with a context of `CONTEXT` tokens over it, wraps it
with `served` and runs `check(…)` for each of `CHECKS`. Log-probs are held against one plain forward pass of the same
weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pekoe.pipeline.records import Finish
from pekoe.pipeline.rollout.engine import GenerationRequest, InferenceEngine, Response, SamplingParameters

CONTEXT = 512
SECONDS = 120.0
NAMES = set(SamplingParameters.__slots__)
SPECIAL = ("<pad>", "<eos>", "<end>", "<unk>")
END_IDS = (1, 2)
VOCABULARY = 96


def write_contract_model(folder: Path, seed: int = 0) -> Path:
    """A random Qwen3 of two layers in float32, tied embeddings, two end tokens; the tokenizer's tokens are words of
    one to four letters."""
    words = [word for size in (1, 2, 3, 4) for word in _words(size)][: VOCABULARY - len(SPECIAL)]
    core = Tokenizer(BPE(vocab={token: i for i, token in enumerate([*SPECIAL, *words])}, merges=[], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        eos_token_id=list(END_IDS), pad_token_id=0, bos_token_id=None, dtype="float32",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(12)
    model.save_pretrained(folder)
    return folder


def _words(size: int) -> list[str]:
    """Some words of that many letters, no two alike."""
    return ["".join(chr(97 + (7 * i + 3 * k + i // 5 * k) % 26) for k in range(size)) for i in range(23)]


def served(engine: InferenceEngine, folder: Path, tolerance: float = 2e-4) -> Served:
    """An engine over the folder of `write_contract_model`, ready for the checks."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return Served(engine, model, AutoTokenizer.from_pretrained(folder), END_IDS, tolerance)


@dataclass
class Served:
    """A running engine and what is known of its model."""

    engine: InferenceEngine
    model: PreTrainedModel
    """The same weights, for plain forward passes."""
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]
    """The model's own end tokens; the engine reads them from the model's folder."""
    tolerance: float
    """Largest gap of a log-prob."""
    prompt: tuple[int, ...] = field(default=(5, 9, 12, 7, 3, 11, 6))

    def request(self, prompt: Sequence[int] | None = None, **fields: Any) -> GenerationRequest:
        sampling = {name: value for name, value in fields.items() if name in NAMES}
        rest = {name: value for name, value in fields.items() if name not in NAMES}
        tokens = self.prompt if prompt is None else tuple(prompt)
        return GenerationRequest(tokens, SamplingParameters(**{"max_new_tokens": 24} | sampling), **rest)

    def generate(self, *requests: GenerationRequest) -> list[Response]:
        """All at once; every answer is well formed."""

        async def work() -> list[Response]:
            return list(await asyncio.gather(*(self.engine.generate(request) for request in requests)))

        answers = asyncio.run(asyncio.wait_for(work(), SECONDS))
        for request, answer in zip(requests, answers, strict=True):
            self.judge(request, answer)
        return answers

    def one(self, prompt: Sequence[int] | None = None, **fields: Any) -> Response:
        return self.generate(self.request(prompt, **fields))[0]

    def judge(self, request: GenerationRequest, answer: Response) -> None:
        """Lengths, types, and log-probs of the full distribution at the request's temperature."""
        count = len(answer.tokens)
        assert len(answer.logprobs) == len(answer.versions) == count
        assert count <= request.sampling.max_new_tokens
        assert len(request.tokens) + count <= CONTEXT or count == 0
        assert answer.tokens.dtype == answer.versions.dtype == np.int32
        assert answer.logprobs.dtype == np.float32
        wanted = self.logprobs([*request.tokens, *answer.tokens.tolist()], request.sampling.temperature)
        np.testing.assert_allclose(answer.logprobs, wanted[len(request.tokens) :], atol=self.tolerance)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[T, V] of one plain forward pass, float64."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0].double()
        return logits

    def logprobs(self, tokens: Sequence[int], temperature: float) -> np.ndarray:
        table = torch.log_softmax(self.logits(tokens)[:-1] / temperature, -1)
        picked = table.gather(1, torch.tensor(list(tokens))[1:, None])[:, 0]
        return np.concatenate([[0.0], picked.numpy()])

    def free(self, length: int = 24) -> list[int]:
        """The greedy completion that nothing ends."""
        return self.one(greedy=True, ignore_eos=True, max_new_tokens=length).tokens.tolist()


def check_samples_of_one_prompt_differ_by_seed(served: Served) -> None:
    requests = [served.request(seed=i, sample=i, group_size=6, ignore_eos=True) for i in range(6)]
    first = [tuple(answer.tokens.tolist()) for answer in served.generate(*requests)]
    assert len(set(first)) == 6
    alone = served.one(seed=3, sample=3, group_size=6, ignore_eos=True)
    assert tuple(alone.tokens.tolist()) == first[3]


def check_temperature(served: Served) -> None:
    """Log-probs are at the temperature, which also decides what is drawn: cold is likelier."""
    means = []
    for temperature in (0.6, 1.0, 1.3):
        answers = served.generate(*(served.request(seed=i, temperature=temperature, ignore_eos=True) for i in range(6)))
        raw = [
            served.logprobs([*served.prompt, *answer.tokens.tolist()], 1.0)[len(served.prompt) :] for answer in answers
        ]
        means.append(float(np.concatenate(raw).mean()))
    assert means[0] > means[2]


def check_top_k_and_top_p(served: Served) -> None:
    for fields in ({"top_k": 3}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.8, "temperature": 0.7}):
        for answer in served.generate(*(served.request(seed=i, ignore_eos=True, **fields) for i in range(4))):
            tokens = answer.tokens.tolist()
            table = served.logits([*served.prompt, *tokens])[len(served.prompt) - 1 : -1]
            weights = torch.softmax(table / fields.get("temperature", 1.0), -1)
            for row, token in zip(weights, tokens, strict=True):
                likelier = row[row > row[token] * (1 + 1e-4)]
                assert len(likelier) < fields.get("top_k", len(row))
                total = row.topk(fields["top_k"]).values.sum() if "top_k" in fields else 1.0
                assert likelier.sum() / total < fields.get("top_p", 2.0) + 1e-3


def check_min_new_tokens(served: Served) -> None:
    """No end token before; after it, log-probs are still of the full distribution (see `judge`)."""
    stops = tuple(set(served.free()[:12]))
    answer = served.one(greedy=True, stop_token_ids=stops, min_new_tokens=6)
    assert not set(answer.tokens[:6].tolist()) & {*stops, *served.end_ids}
    assert len(answer.tokens) > 6


def check_stop_token_ids(served: Served) -> None:
    free = served.free()
    target = next(i for i in range(1, len(free)) if free[i] not in free[:i] and free[i] not in served.end_ids)
    end = next((i for i, token in enumerate(free) if token in served.end_ids), len(free))
    answer = served.one(greedy=True, stop_token_ids=(free[target], served.end_ids[0]))
    assert answer.tokens.tolist() == free[: min(target, end) + 1]
    assert answer.finish == Finish.STOP


def check_end_tokens_end_once(served: Served) -> None:
    """Each of the model's end tokens ends the completion and is kept once; `ignore_eos` goes on over it."""
    for token in served.end_ids:
        bias = ((token, 100.0),)
        answer = served.one(logit_bias=bias, seed=4)
        assert answer.tokens.tolist() == [token]
        assert answer.finish == Finish.STOP
        ignored = served.one(logit_bias=bias, seed=4, ignore_eos=True, max_new_tokens=5)
        assert ignored.tokens.tolist() == [token] * 5
        assert ignored.finish == Finish.LENGTH
        asked = served.one(logit_bias=bias, seed=4, ignore_eos=True, stop_token_ids=(token,))
        assert asked.tokens.tolist() == [token]


def check_stop_strings(served: Served) -> None:
    """The token that completes a stop string ends the completion and is kept whole, also where the string ends within
    it."""
    free = served.free(40)
    texts = [served.tokenizer.decode(free[:i], clean_up_tokenization_spaces=False) for i in range(len(free) + 1)]
    tried = 0
    for i in range(2, len(free)):
        added = texts[i][len(texts[i - 1]) :] if texts[i].startswith(texts[i - 1]) else ""
        for string in {added, added[:-1], texts[i - 1][-1:] + added[:1]} - {""}:
            if "\ufffd" in string or not string.strip() or string in texts[i - 1]:
                continue
            tried += 1
            answer = served.one(greedy=True, ignore_eos=True, max_new_tokens=40, stop=("never to be seen", string))
            assert answer.tokens.tolist() == free[:i], string
            assert answer.finish == Finish.STOP
        if tried >= 6:
            break
    assert tried >= 2


def check_frequency_penalty(served: Served) -> None:
    """Counts the completion only, and comes before the temperature; log-probs are without it (see `judge`)."""
    penalty, temperature = 1.5, 0.7
    answer = served.one(greedy=True, ignore_eos=True, frequency_penalty=penalty, temperature=temperature)
    tokens = answer.tokens.tolist()
    table = served.logits([*served.prompt, *tokens])[len(served.prompt) - 1 : -1]
    for i, token in enumerate(tokens):
        counts = torch.bincount(torch.tensor(tokens[:i], dtype=torch.long), minlength=table.shape[1])
        changed = table[i] - penalty * counts
        assert changed[token] >= changed.max() - 1e-3, i
    forced = served.one(seed=1, ignore_eos=True, max_new_tokens=60, frequency_penalty=2.0, logit_bias=((8, 60.0),))
    run = next((i for i, token in enumerate(forced.tokens.tolist()) if token != 8), 60)
    assert 15 <= run < 60  # 60 of bias lasts for some 30 penalties of 2


def check_logit_bias(served: Served) -> None:
    """-100 forbids, 100 forces; log-probs are without it (see `judge`)."""
    free = served.free(8)
    forbidden = tuple((token, -100.0) for token in sorted(set(free)))
    answers = [served.one(greedy=True, ignore_eos=True, logit_bias=forbidden)]
    answers += served.generate(*(served.request(seed=i, ignore_eos=True, logit_bias=forbidden) for i in range(4)))
    for answer in answers:
        assert not set(answer.tokens.tolist()) & set(free)
    assert set(served.one(seed=2, ignore_eos=True, logit_bias=((8, 100.0),)).tokens.tolist()) == {8}


def check_greedy(served: Served) -> None:
    tokens = served.free()
    table = served.logits([*served.prompt, *tokens])[len(served.prompt) - 1 : -1]
    for row, token in zip(table, tokens, strict=True):
        assert row[token] >= row.max() - 1e-3
    again = served.one(greedy=True, ignore_eos=True, seed=99, top_k=2, top_p=0.3, temperature=1.3)
    assert again.tokens.tolist() == tokens


def check_room_in_the_context(served: Served) -> None:
    """A completion fits into what is left; without room the answer is empty, and nobody else is harmed."""
    crowded = served.one([5] * 480, max_new_tokens=400, ignore_eos=True, seed=1)
    assert len(crowded.tokens) == CONTEXT - 480
    assert crowded.finish == Finish.LENGTH
    for length, most in ((511, 400), (480, 1)):
        answer = served.one([5] * length, max_new_tokens=most, ignore_eos=True, seed=1)
        assert len(answer.tokens) == 1
        assert answer.finish == Finish.LENGTH
    for length, most in ((512, 400), (600, 400), (7, 0)):
        answer = served.one([5] * length, max_new_tokens=most)
        assert len(answer.tokens) == 0
        assert answer.finish == Finish.LENGTH


def check_scores_equal_what_was_sampled(served: Served) -> None:
    """`logprobs` of a completion, at the temperature, are the ones that it was sampled with."""
    for temperature in (0.6, 1.0, 1.3):
        fields = {"top_p": 0.8, "top_k": 20, "frequency_penalty": 0.5, "logit_bias": ((8, 2.0),)}
        answer = served.one(seed=5, temperature=temperature, ignore_eos=True, **fields)
        served.engine.pause()
        ids = np.array([*served.prompt, *answer.tokens.tolist()], dtype=np.int32)
        (scored,) = served.engine.logprobs([ids], temperature)
        served.engine.resume()
        assert scored.shape == ids.shape
        assert scored[0] == 0
        np.testing.assert_allclose(scored[len(served.prompt) :], answer.logprobs, atol=served.tolerance)
        np.testing.assert_allclose(scored, served.logprobs(ids.tolist(), temperature), atol=served.tolerance)


def check_wrong_requests_are_refused(served: Served) -> None:
    size = served.model.get_input_embeddings().weight.shape[0]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompt": ()}, "request.tokens"),
        ({"prompt": (1, size)}, "request.tokens"),
        ({"temperature": 0.0}, "gconfig.temperature"),
        ({"top_p": 0.0}, "gconfig.top_p"),
        ({"top_k": -1}, "gconfig.top_k"),
        ({"frequency_penalty": 2.5}, "gconfig.frequency_penalty"),
        ({"logit_bias": ((size, 1.0),)}, "gconfig.logit_bias"),
        ({"logit_bias": ((3, -101.0),)}, "gconfig.logit_bias"),
    ]
    for fields, key in wrong:
        with pytest.raises(ValueError, match=key):
            served.one(**fields)
    assert len(served.one(max_new_tokens=3, ignore_eos=True).tokens) == 3


CHECKS: tuple[Callable[[Served], None], ...] = (
    check_samples_of_one_prompt_differ_by_seed,
    check_temperature,
    check_top_k_and_top_p,
    check_min_new_tokens,
    check_stop_token_ids,
    check_end_tokens_end_once,
    check_stop_strings,
    check_frequency_penalty,
    check_logit_bias,
    check_greedy,
    check_room_in_the_context,
    check_scores_equal_what_was_sampled,
    check_wrong_requests_are_refused,
)
