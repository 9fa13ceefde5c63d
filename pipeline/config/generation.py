"""`gconfig`: how completions are sampled."""

from __future__ import annotations

from dataclasses import dataclass

from pekoe.pipeline.config.fields import setting


@dataclass
class GenerationConfig:
    """Sampling of one prompt; AReaL's names."""

    n_samples: int = setting(8, "completions per prompt (the group size)", minimum=1)
    max_new_tokens: int = setting(512, "most tokens sampled in one completion", minimum=1)
    min_new_tokens: int = setting(0, "fewest tokens before a stop token may be sampled", minimum=0)
    max_tokens: int | None = setting(None, "context limit: prompt plus completion; null = the model's", minimum=2)
    temperature: float = setting(
        1.0, "softmax temperature; log-probs are recorded at it, over the whole vocabulary", above=0
    )
    top_p: float = setting(1.0, "nucleus sampling mass", above=0, maximum=1)
    top_k: int = setting(0, "sample among the k likeliest tokens; 0 = all", minimum=0)
    greedy: bool = setting(False, "take the likeliest token instead of sampling")
    stop_token_ids: list[int] = setting(list, "token ids that end a completion, beside the model's own end tokens")
    ignore_eos: bool = setting(False, "the model's own end tokens do not end a completion")
    frequency_penalty: float = setting(
        0.0,
        "taken from a token's logit for each time that it was sampled in the completion; log-probs are recorded "
        "without it",
        minimum=-2,
        maximum=2,
    )
    logit_bias: dict[int, float] = setting(
        dict,
        "token id: what is added to its logit, -100 (forbidden) to 100; log-probs are recorded without it",
    )
    stop: list[str] = setting(list, "strings that end a completion; the token that completes one is kept")
