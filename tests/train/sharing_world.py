"""One rank of a small trainer world whose engines share prefixes, or do not.

usage: sharing_world.py FOLDER RANK SIZE SCENARIO...      as `fsdp_world.py`
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import fsdp_world as world  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from pekoe.pipeline.algorithm.token_values import token_values  # noqa: E402
from pekoe.pipeline.devices.cpu_device import CpuDevice  # noqa: E402
from pekoe.pipeline.train.engines.isolation import pack_tokens  # noqa: E402

RESPONSES = {
    1: (6, (5, 1, 14)),
    2: (6, (7,)),
    3: (6, (1, 1)),
    4: (9, (4, 4, 80)),
}
"""Groups: tokens of the prompt and of each response. 1 and 3 begin alike by chance."""


def rows():
    """(group, tokens, loss_mask) of each row; group 5 has equal rows, group 6 turns, of which the first are equal."""
    rng = np.random.default_rng(11)

    def draw(length):
        return rng.integers(3, 61, length, dtype=np.int32)

    made, prompts = [], {}
    for group, (length, responses) in RESPONSES.items():
        prompts[group] = prompts[1] if group == 3 else draw(length)
        made += [(group, np.concatenate([prompts[group], draw(n)]), None) for n in responses]
    made += [(5, np.concatenate([prompts[4], prompts[1]]), None)] * 3
    turn, mask = draw(12), np.array([0] * 5 + [1] * 4 + [0] * 3 + [1] * 6, np.uint8)
    made += [(6, np.concatenate([turn, draw(6)]), mask) for _ in range(3)]
    made += [(6, draw(9), None)]
    return made


def batch_of(chosen):
    """Rows by number, with masks: a prompt's tokens, and those between turns, are given."""
    found = [rows()[number] for number in chosen]
    batch = pack_tokens([tokens for _, tokens, _ in found])
    batch.groups[:] = [group for group, _, _ in found]
    for start, (group, tokens, mask) in zip(batch.cu_seqlens, found, strict=False):
        given = RESPONSES.get(group, (1, ()))[0]
        batch.loss_mask[start : start + given] = 0
        if mask is not None:
            batch.loss_mask[start : start + len(tokens)] = mask
    return batch


def cut(rank, size):
    """This rank's micro-batches: groups together, one group torn, an empty one where ranks have fewer."""
    parts = [[0, 1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11], [12, 13, 14, 15], []]
    mine = parts[rank::size]
    return [batch_of(part) for part in mine + [[]] * (-(-len(parts) // size) - len(mine))]


class Mixed:
    """A loss in which every log-prob and entropy has a weight of its own, by its place in its row."""

    needs_entropy_gradient = True

    def __call__(self, logprobs, entropy, batch):
        weight = (batch["position_ids"] * 1.3 + batch["tokens"]).cos()
        return (logprobs * weight + entropy * weight.roll(1)).sum(), {"seen": (logprobs.detach() * weight).sum()}


class MixedValues:
    """The same of values and scores."""

    def __call__(self, values, scores, batch):
        weight = (batch["position_ids"] * 1.3 + batch["tokens"]).cos()
        return (values.square() * weight).sum() + scores.square().sum(), {"seen": scores.detach().sum()}


def engine(folder, kind, share, head="lm", **more):
    config = world.actor(folder, kind, lr=0.0, **more)
    functions = {"token_logprobs": world.token_logprobs} if head == "lm" else {"token_values": token_values}
    return world.FsdpEngine(
        config, head=head, **functions, share_prefixes=share, device=CpuDevice(), weight_dtype="float64", seed=1
    )


def computed(made):
    """A list that gets the number of tokens that the model runs on, pass by pass."""
    sizes = []
    made.model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].numel()))
    return sizes


def update(made, loss):
    """(statistics, gradients, tokens run on) of one update on everything."""
    gradients, sizes = {}, computed(made)
    made.optimizer.step = lambda: gradients.update(
        {name: p.grad.full_tensor().clone() for name, p in made.model.named_parameters()}
    )
    stats = made.train_batch(cut(made.data_parallel_rank, made.data_parallel_size), loss, world.TEMPERATURE)
    return stats, gradients, sizes


def scenario_sharing(folder, rank, size):
    """Both ways of every model: (log-probs, (statistics, gradients, tokens run on))."""
    options = {"qwen3": {}, "llama": {"gradient_checkpointing": True}, "window": {}}
    found = {}
    for kind, more in options.items():
        for share in (False, True):
            made = engine(folder, kind, share, **more)
            logprobs = made.forward(cut(rank, size), world.TEMPERATURE)
            found[kind, share] = (logprobs, update(made, Mixed()))
    for share in (False, True):
        made = engine(folder, "value", share, head="value")
        values = [torch.cat(pair) for pair in made.forward_values(cut(rank, size))]
        found["value", share] = (values, update(made, MixedValues()))
    return found


if __name__ == "__main__":
    from transformers.models.mistral.modeling_mistral import MistralRMSNorm

    MistralRMSNorm.forward = world.exact_rms_norm
    world.scenario_sharing = scenario_sharing
    world.run_as_program()
