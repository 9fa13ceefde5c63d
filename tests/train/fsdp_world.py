"""One rank of a small trainer world, run as a script: builds engines, runs scenarios, saves what they found.

usage: fsdp_world.py FOLDER RANK SIZE SCENARIO...      FOLDER holds the models and gets `SCENARIO-SIZE.pt` from rank 0
"""

from __future__ import annotations

import copy
import importlib.machinery
import itertools
import sys
import threading
import traceback
import types
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from pekoe.pipeline.algorithm.objective import PolicyObjective
from pekoe.pipeline.algorithm.token_logprobs import token_logprobs
from pekoe.pipeline.config.actor import ActorConfig, FsdpConfig
from pekoe.pipeline.config.optimizer import OptimizerConfig
from pekoe.pipeline.devices.cpu_device import CpuDevice
from pekoe.pipeline.records import Finish, Trajectory, pack
from pekoe.pipeline.train.engines import packed_attention
from pekoe.pipeline.train.engines.fsdp_engine import FsdpEngine

TEMPERATURE = 0.8
LENGTHS = (7, 3, 12, 5, 9)
CUTS = {
    "one": [[0, 1, 2, 3, 4]],
    "each": [[0], [1], [2], [3], [4]],
    "uneven": [[0, 1, 2], [], [3, 4]],
    "reversed": [[4, 3], [2, 1, 0]],
}


def exact_rms_norm(self, hidden):
    """Transformers' norms compute in float32; in float64 they can be compared to rounding."""
    return self.weight * torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], eps=self.variance_epsilon)


def use_exact_norms():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    for kind in (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
        kind.forward = exact_rms_norm


def trajectories(vocab=61):
    """Five sequences with prompts, gaps in the mask, mixed versions; behaviour log-probs near the uniform ones."""
    rng = np.random.default_rng(3)
    made = []
    for number, n in enumerate(LENGTHS):
        mask = np.ones(n, np.uint8)
        mask[: 1 + number % 2] = 0
        if n > 6:
            mask[4] = 0
        active = mask == 1
        trajectory = Trajectory(
            tokens=rng.integers(0, vocab, n, dtype=np.int32),
            loss_mask=mask,
            logprobs=np.where(active, -4.1 + rng.normal(0, 0.2, n), 0).astype(np.float32),
            versions=np.where(active, rng.integers(1, 4, n), -1).astype(np.int32),
            turns=np.where(active, 0, -1).astype(np.int32),
            prompt_length=1,
            reward=float(number % 2),
            finish=Finish.STOP,
        )
        trajectory.check()
        made.append(trajectory)
    return made


def extras():
    """(advantages, prox_logprobs) of each sequence, float64."""
    rng = np.random.default_rng(4)
    return [(rng.normal(0, 1, n), -4.1 + rng.normal(0, 0.2, n)) for n in LENGTHS]


def make_batch(rows):
    made, more = trajectories(), extras()
    batch = pack([(row, made[row]) for row in rows])
    for index, name in enumerate(("advantages", "prox_logprobs")):
        parts = [more[row][index] for row in rows]
        batch.extra[name] = np.concatenate(parts) if parts else np.zeros(0)
    return batch


def share_of(cut, rank, size):
    """Micro-batches of a rank; ranks have equal numbers, empty ones fill up."""
    mine = cut[rank::size]
    return [make_batch(rows) for rows in mine + [[]] * (-(-len(cut) // size) - len(mine))]


def actor(folder, kind="qwen3", dtype="float64", lr=1e-2, **more):
    optimizer = OptimizerConfig(lr=lr, weight_decay=0.1, gradient_clipping=more.pop("clipping", 1e9))
    return ActorConfig(path=str(folder / kind), dtype=dtype, optimizer=optimizer, entropy_coef=0.01, **more)


def build(config, weight_dtype=None):
    return FsdpEngine(
        config,
        token_logprobs=token_logprobs,
        device=CpuDevice(),
        weight_dtype=weight_dtype or ("float64" if config.dtype == "float64" else "float32"),
        total_steps=10,
        seed=1,
    )


def objective(config):
    num_active = sum(int(t.loss_mask.sum()) for t in trajectories())
    return PolicyObjective(config, num_active=num_active, num_sequences=len(LENGTHS), max_new_tokens=12, version=4)


def train(engine, cut="one", loss=None):
    """(statistics, full gradients after clipping) of one update."""
    gradients = {}
    step = engine.optimizer.step

    def spy():
        gradients.update({name: p.grad.full_tensor() for name, p in engine.model.named_parameters()})
        step()

    engine.optimizer.step = spy
    batches = share_of(CUTS[cut], engine.data_parallel_rank, engine.data_parallel_size)
    stats = engine.train_batch(batches, loss or objective(engine.config), TEMPERATURE)
    engine.optimizer.step = step
    return stats, gradients


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.weights()}


class InfiniteOnLastRank:
    """A loss whose gradient is infinite on the last rank only."""

    needs_entropy_gradient = False

    def __call__(self, logprobs, entropy, batch):
        last = dist.get_rank() == dist.get_world_size() - 1
        factor = torch.inf if last else 1.0
        return (logprobs * factor).sum(), {"tokens": batch["loss_mask"].sum()}


class NothingToLearn(InfiniteOnLastRank):
    """A loss without any gradient: every group was equal, or every token was left out."""

    def __call__(self, logprobs, entropy, batch):
        return (logprobs * 0).sum(), {"tokens": batch["loss_mask"].sum()}


def scenario_gradients(folder, rank, size):
    """Loss and gradients of every model, aggregation and cut; lr 0, so that one engine serves them all."""
    found = {}
    for kind in ("qwen3", "qwen2", "llama"):
        for aggregation in ("token_mean", "sequence_mean", "constant") if kind == "qwen3" else ("token_mean",):
            engine = build(actor(folder, kind, lr=0.0, loss_aggregation=aggregation))
            for cut in CUTS:
                found[kind, aggregation, cut] = train(engine, cut)
    return found


def scenario_forward(folder, rank, size):
    engine = build(actor(folder))
    batches = [make_batch([0, 1, 2]), make_batch([]), make_batch([4, 3])]
    return {
        "logprobs": engine.forward(batches, TEMPERATURE),
        "weights": weights(engine),
        "specs": engine.weight_specs(),
    }


def scenario_variants(folder, rank, size):
    """The same two updates with each option; and with clipping."""
    found = {}
    options = {
        "plain": {},
        "offload": {"fsdp": FsdpConfig(offload_params=True)},
        "checkpointing": {"gradient_checkpointing": True},
        "clipped": {"clipping": 0.01},
    }
    for name, option in options.items():
        engine = build(actor(folder, **option))
        stats = [train(engine, "uneven") for _ in range(2)]
        found[name] = (stats, weights(engine))
    return found


def scenario_bfloat16(folder, rank, size):
    engine = build(actor(folder, dtype="bfloat16", lr=1e-3), weight_dtype="bfloat16")
    batches = share_of(CUTS["reversed"], rank, size)
    for batch, logprobs in zip(batches, engine.forward(batches, TEMPERATURE), strict=True):
        batch.extra["prox_logprobs"] = logprobs.numpy()
    before = {name: p.full_tensor().clone() for name, p in engine.model.named_parameters()}
    stats = engine.train_batch(batches, objective(engine.config), TEMPERATURE)
    after = {name: p.full_tensor() for name, p in engine.model.named_parameters()}
    return {"stats": stats, "before": before, "after": after, "weights": weights(engine)}


def scenario_skip(folder, rank, size):
    engine = build(actor(folder, dtype="float32"))
    train(engine)
    before = (weights(engine), copy.deepcopy(engine.optimizer.state_dict()["state"]))
    stats, _ = train(engine, "each", InfiniteOnLastRank())
    same = [torch.equal(a, b) for a, b in zip(before[0].values(), weights(engine).values(), strict=True)]
    states = engine.optimizer.state_dict()["state"]
    for index, state in before[1].items():
        same += [torch.equal(_local(state[key]), _local(states[index][key])) for key in state]
    empty, _ = train(engine, "each", NothingToLearn())
    same += [torch.equal(a, b) for a, b in zip(before[0].values(), weights(engine).values(), strict=True)]
    told = [None] * size
    dist.all_gather_object(told, (stats["update_skipped"], empty["update_skipped"], all(same)))
    after, _ = train(engine)
    return {"told": told, "after": after}


def scenario_save(folder, rank, size):
    """Two updates, checkpoint, export, a third update."""
    engine = build(actor(folder, lr=1e-3))
    for step in range(2):
        engine.set_progress(step / 10)
        train(engine)
    engine.stage().write(folder / f"checkpoint-{size}")
    engine.export_hf(folder / f"export-{size}")
    saved = weights(engine)
    engine.set_progress(0.2)
    stats, _ = train(engine)
    return {"saved": saved, "stats": stats, "final": weights(engine)}


def scenario_load(folder, rank, size):
    """Continues the two-rank checkpoint, with another schedule in the configuration."""
    engine = build(actor(folder, lr=1e-3))
    engine.load(folder / "checkpoint-2")
    loaded = weights(engine)
    engine.set_progress(0.2)
    stats, _ = train(engine)
    other = build(actor(folder, lr=5e-4))
    other.load(folder / "checkpoint-2")
    return {"loaded": loaded, "stats": stats, "final": weights(engine), "lr": other.optimizer.param_groups[0]["lr"]}


def scenario_flash(folder, rank, size):
    """The path of flash-attn's variable-length kernel, on a stand-in that keeps what it was called with."""
    calls = install_flash_stand_in()
    found = {}
    for attention in ("sdpa", "flash"):
        engine = build(actor(folder, dtype="bfloat16", lr=0.0, fsdp=FsdpConfig(attention=attention)))
        calls.clear()
        logprobs = engine.forward([make_batch([0, 1, 2])], TEMPERATURE)
        found[attention] = (logprobs, list(calls), train(engine, "reversed"))
    return found


def install_flash_stand_in():
    """A module `flash_attn` whose one function is exact attention per sequence; returns the list of its calls."""
    calls = []

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        calls.append((q.shape, k.shape, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size))
        bounds, out = cu_seqlens_q.tolist(), []
        for start, end in itertools.pairwise(bounds):
            q1, k1, v1 = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
            one = torch.nn.functional.scaled_dot_product_attention(
                q1, k1, v1, is_causal=causal, scale=softmax_scale, enable_gqa=True
            )
            out.append(one[0].transpose(0, 1))
        return torch.cat(out)

    module = types.ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    module.flash_attn_varlen_func = flash_attn_varlen_func
    sys.modules["flash_attn"] = module
    return calls


def scenario_leak(folder, rank, size):
    """An attention that looks over the boundaries must not get past the start."""
    exact = packed_attention.sdpa_attention

    def leaky(module, query, key, value, attention_mask, packed_sequences=None, **options):
        whole = packed_attention.PackedSequences.of((0, query.shape[2]), query.device)
        return exact(module, query, key, value, attention_mask, packed_sequences=whole, **options)

    packed_attention.sdpa_attention = leaky
    try:
        build(actor(folder))
    except RuntimeError as error:
        return str(error)
    finally:
        packed_attention.sdpa_attention = exact
    return "built"


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def main():
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    use_exact_norms()
    if size == 2:
        # One rank pads short sequences, two take them one by one: the results are compared.
        packed_attention.SHORT = 4
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{size}", rank=rank, world_size=size)
    for name in sys.argv[4:]:
        found = globals()[f"scenario_{name}"](folder, rank, size)
        if rank == 0:
            torch.save(found, folder / f"{name}-{size}.pt")
    dist.barrier()


def run_as_program():
    """Not in the main thread: trainer loops are worker threads."""
    failure = []

    def run():
        try:
            main()
        except BaseException:
            failure.append(traceback.format_exc())

    worker = threading.Thread(target=run)
    worker.start()
    worker.join()
    if failure:
        print(failure[0], file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    run_as_program()
