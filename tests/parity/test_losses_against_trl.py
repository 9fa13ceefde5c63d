"""Pekoe against TRL's own trainers on a real model: the loss and the gradient of every weight.

TRL computes on left-padded prompts and right-padded completions; Pekoe on the same sequences laid end to end. Both
start from the weights of one tiny model in float64, so packing, masks, the shift, aggregation and the loss are
compared at once.
"""

from __future__ import annotations

import copy

import pytest
import torch
from random_batches import RandomBatch
from transformers import AutoModelForCausalLM

from pekoe.kernels.logprob.logprob import logits_logprobs
from pekoe.pipeline.algorithm.objective import PolicyObjective
from pekoe.pipeline.algorithm.segments import segment_sum, sequence_index
from pekoe.pipeline.algorithm.supervised.dpo import DpoLoss
from pekoe.pipeline.algorithm.token_logprobs import token_logprobs
from pekoe.pipeline.config.actor import ActorConfig
from pekoe.pipeline.config.companions import DpoConfig

pytestmark = pytest.mark.slow

PAD, VOCABULARY = 0, 16
MAX_NEW_TOKENS = 12
TRAINER = {
    "report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True,
    "save_strategy": "no", "max_steps": 1, "gradient_accumulation_steps": 1,
}  # fmt: skip


def plain_logprobs(logits, tokens, cu_seqlens, mask):
    """[M] of the active tokens, by logits [M, V]."""

    def logprobs_at(positions, targets):
        return logits_logprobs(logits[positions], targets, with_entropy=False)

    return token_logprobs(logprobs_at, tokens, cu_seqlens, mask)[0]


@pytest.fixture
def model(tiny_model):
    """Weights far from uniform predictions, in float64."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(3.0)
    return model


class Sequences:
    """Token ids of a random batch in both layouts. Legend: B rows, P and L columns of prompts and completions."""

    def __init__(self, batch: RandomBatch) -> None:
        self.batch = batch
        rows, width = batch.num_rows, max(batch.prompts)
        self.prompt_ids = torch.randint(3, VOCABULARY, (rows, width), generator=batch.random)
        lengths = torch.tensor(batch.prompts)[:, None]
        self.prompt_mask = (torch.arange(width)[None] >= width - lengths).long()
        self.prompt_ids[self.prompt_mask == 0] = PAD
        self.completion_ids = torch.randint(3, VOCABULARY, (rows, batch.columns), generator=batch.random)
        self.completion_mask = (torch.arange(batch.columns)[None] < batch.lengths[:, None]).long()
        self.completion_ids[self.completion_mask == 0] = PAD

    def packed_logprobs(self, model) -> torch.Tensor:
        """[M] by one forward pass a sequence."""
        rows = []
        for row in range(self.batch.num_rows):
            prompt = self.prompt_ids[row][self.prompt_mask[row] == 1]
            rows.append(torch.cat([prompt, self.completion_ids[row][self.completion_mask[row] == 1]]))
        logits = torch.cat([model(input_ids=row[None]).logits[0] for row in rows])
        mask = self.batch.packed_mask()
        return plain_logprobs(logits, torch.cat(rows), self.batch.cu_seqlens, mask)

    def packed(self, **columns) -> dict[str, torch.Tensor]:
        """What Pekoe's losses read; `columns` [B, L]."""
        mask = self.batch.packed_mask()
        return {
            "cu_seqlens": self.batch.cu_seqlens,
            "loss_mask": mask.to(torch.uint8),
            "versions": torch.where(mask, 0, -1),
            "truncated": torch.zeros(self.batch.num_rows, dtype=torch.uint8),
        } | {name: self.batch.pack(column) for name, column in columns.items()}

    def near(self, model, scale: float = 0.3) -> torch.Tensor:
        """[B, L] log-probs of a policy near the model's."""
        with torch.no_grad():
            return self.batch.near(self.batch.unpack(self.packed_logprobs(model)), scale) * self.batch.mask


def weight_gradients(loss, model) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [weight for weight in model.parameters() if weight.requires_grad]))


def assert_equal_on_all_weights(ours, theirs, model, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    mine, others = weight_gradients(ours, model), weight_gradients(theirs, model)
    assert max(float(other.abs().max()) for other in others) > 1e-3
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max() + 1e-3))


def length_reward(completions, **_):
    return [float(len(text)) for text in completions]


@pytest.fixture
def grpo_trainer(trl, model, tiny_model, tmp_path):
    def make(**settings):
        from datasets import Dataset
        from transformers import AutoTokenizer

        arguments = trl.GRPOConfig(
            output_dir=str(tmp_path), num_generations=2, per_device_train_batch_size=10, steps_per_generation=1,
            max_completion_length=MAX_NEW_TOKENS, **TRAINER, **settings,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=model, reward_funcs=length_reward, args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "1+1="}] * 20),
            processing_class=AutoTokenizer.from_pretrained(tiny_model),
        )  # fmt: skip
        trainer.current_gradient_accumulation_steps = 1
        return trainer

    return make


EPSILON = {"epsilon": 0.2, "epsilon_high": 0.28}
CLIPS = {"eps_clip": 0.2, "eps_clip_higher": 0.28, "use_decoupled_loss": False}
CASES = {
    "grpo": ({"loss_type": "grpo", **EPSILON}, {"loss_aggregation": "sequence_mean", **CLIPS}),
    "dapo": ({"loss_type": "dapo", **EPSILON}, {"loss_aggregation": "token_mean", **CLIPS}),
    "drgrpo": ({"loss_type": "dr_grpo", **EPSILON}, {"loss_aggregation": "constant", **CLIPS}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.12},
        {"loss_aggregation": "sequence_mean", "importance_sampling_level": "sequence", "use_decoupled_loss": False,
         "eps_clip": 0.1, "eps_clip_higher": 0.12},
    ),
    "grpo-kl": (
        {"loss_type": "grpo", "beta": 0.05, "use_bias_correction_kl": False, **EPSILON},
        {"loss_aggregation": "sequence_mean", "kl_loss_coef": 0.05, "kl_loss_estimator": "k3", **CLIPS},
    ),
    "sapo": (
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
        {"objective": "sapo", "loss_aggregation": "sequence_mean", "use_decoupled_loss": False},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.3},
        {"objective": "cispo", "eps_clip": 1.0, "eps_clip_higher": 0.3, "use_decoupled_loss": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_tools", [False, True], ids=["single_turn", "tools"])
def test_policy_losses(grpo_trainer, model, name, with_tools):
    theirs, ours = CASES[name]
    trainer = grpo_trainer(**theirs)
    sequences = Sequences(RandomBatch(5, with_tools=with_tools))
    batch, advantages = sequences.batch, sequences.batch.rewards
    old, ref = sequences.near(model), sequences.near(model)
    inputs = {
        "prompt_ids": sequences.prompt_ids, "prompt_mask": sequences.prompt_mask,
        "completion_ids": sequences.completion_ids, "completion_mask": sequences.completion_mask,
        "tool_mask": batch.mask, "advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": ref,
        "num_items_in_batch": torch.tensor(float(batch.num_active)),
    }  # fmt: skip
    objective = PolicyObjective(
        ActorConfig(**ours), num_active=batch.num_active, num_sequences=batch.num_rows, max_new_tokens=MAX_NEW_TOKENS,
        version=0,
    )  # fmt: skip
    spread = advantages[:, None].expand_as(batch.mask)
    packed = sequences.packed(logprobs=old, advantages=spread, ref_logprobs=ref)
    loss, _ = objective(sequences.packed_logprobs(model), None, packed)
    assert_equal_on_all_weights(loss, trainer._compute_loss(model, inputs), model)


def test_rloo_at_its_first_update(trl, model, tiny_model, tmp_path):
    """TRL's ratio is that of whole sequences, ours a token's: at ratio 1 they have the same gradient, a mean over
    sequences of sums over tokens, which is our `constant` aggregation times max_new_tokens."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    arguments = trl.RLOOConfig(
        output_dir=str(tmp_path), num_generations=2, per_device_train_batch_size=10, steps_per_generation=1, beta=0.0,
        max_completion_length=MAX_NEW_TOKENS, **TRAINER,
    )  # fmt: skip
    trainer = trl.RLOOTrainer(
        model=model, reward_funcs=length_reward, args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "1+1="}] * 20),
        processing_class=AutoTokenizer.from_pretrained(tiny_model),
    )  # fmt: skip
    sequences = Sequences(RandomBatch(6, with_tools=False))
    batch = sequences.batch
    with torch.no_grad():
        old = sequences.packed_logprobs(model)
    index = sequence_index(batch.cu_seqlens)
    inputs = {
        "prompt_ids": sequences.prompt_ids, "prompt_mask": sequences.prompt_mask,
        "completion_ids": sequences.completion_ids, "completion_mask": sequences.completion_mask,
        "advantages": batch.rewards, "old_logps": segment_sum(old, index, batch.num_rows),
    }  # fmt: skip
    objective = PolicyObjective(
        ActorConfig(loss_aggregation="constant", use_decoupled_loss=False), num_active=batch.num_active,
        num_sequences=batch.num_rows, max_new_tokens=MAX_NEW_TOKENS, version=0,
    )  # fmt: skip
    packed = sequences.packed(advantages=batch.rewards[:, None].expand_as(batch.mask)) | {"logprobs": old}
    ours, _ = objective(sequences.packed_logprobs(model), None, packed)
    mine = weight_gradients(ours * MAX_NEW_TOKENS, model)
    others = weight_gradients(trainer._compute_loss(model, inputs), model)
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 * float(other.abs().max() + 1e-3))


@pytest.mark.parametrize(("loss_type", "beta"), [("sigmoid", 0.1), ("ipo", 0.2)])
def test_preference_losses(trl, model, tiny_model, tmp_path, loss_type, beta):
    from datasets import Dataset
    from transformers import AutoTokenizer

    reference = copy.deepcopy(model)
    with torch.no_grad():
        for weight in reference.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    rows = [
        {"prompt": "12+3=", "chosen": "15", "rejected": "144"},
        {"prompt": "7+8=", "chosen": "15 ", "rejected": "1"},
        {"prompt": "1+90=", "chosen": "91", "rejected": "9 1 0"},
    ]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=len(rows), beta=beta, loss_type=[loss_type],
        max_length=64, **TRAINER,
    )  # fmt: skip
    trainer = trl.DPOTrainer(
        model=model, ref_model=reference, args=arguments, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )  # fmt: skip
    inputs = next(iter(trainer.get_train_dataloader()))
    theirs = trainer._compute_loss(model, inputs, return_outputs=False)
    order = [row for pair in range(len(rows)) for row in (pair, pair + len(rows))]
    ids = [inputs["input_ids"][row][inputs["attention_mask"][row] == 1] for row in order]
    labels = [inputs["completion_mask"][row][inputs["attention_mask"][row] == 1] for row in order]
    cu_seqlens = torch.tensor([0] + [len(row) for row in ids]).cumsum(0)

    def logprobs(of):
        logits = torch.cat([of(input_ids=row[None]).logits[0] for row in ids])
        return plain_logprobs(logits, torch.cat(ids), cu_seqlens, torch.cat(labels))

    with torch.no_grad():
        ref_logprobs = logprobs(reference)
    packed = {"cu_seqlens": cu_seqlens, "loss_mask": torch.cat(labels), "ref_logprobs": ref_logprobs}
    ours, _ = DpoLoss(DpoConfig(beta=beta, loss_type=loss_type), num_pairs=len(rows))(logprobs(model), None, packed)
    # Its fused head computes log-probs in float32.
    assert_equal_on_all_weights(ours, theirs.double(), model, tolerance=1e-5)
