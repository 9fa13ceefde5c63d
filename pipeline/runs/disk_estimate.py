"""How much disk a run will need, and whether that much is free: said at its start, before anything is full.

Everything is an upper bound from the configuration and the headers of the model's files; nothing is loaded. Free bytes
and inodes are those of the filesystem as `statvfs` gives them: a user's or a project's **quota is not visible** there.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pekoe.pipeline.config.check import context_limit
from pekoe.pipeline.config.paths import model_context_limit
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.tasks import is_supervised
from pekoe.pipeline.run_directory import RunDirectory

logger = logging.getLogger(__name__)

TOKEN_BYTES = 17
"""A token in a shard: id, loss mask, log-prob, version, turn."""
EXTRA_BYTES = 4
"""A token's reward of its turn, or log-prob of a teacher."""
ONE_TURN = ("rlvr",)
"""Workflows whose rows are a prompt and one completion."""
ROW_BYTES = 200
"""A row of a shard beside its tokens: numbers, name of the example, info."""
SHARD_FILE_BYTES = 12_000
"""What HDF5 and the seal add to a file (measured)."""
CHECKPOINT_TENSOR_BYTES = 9_500
"""What a distributed checkpoint adds per parameter: three records and their entries in the index (measured)."""
RNG_BYTES = 12_000
CODE_BYTES, CODE_FILES = 2_000_000, 250
"""The snapshot of the code, logs and other small files."""
BLOCK_BYTES = 4096
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
WEIGHTS_VERSIONS = 3
"""Of the disk transport: two complete ones and the one being written."""
UNBOUNDED_STEPS = 4
"""Batches in flight where staleness has no bound."""


@dataclass(frozen=True)
class ModelFacts:
    """What the headers of a model folder say."""

    num_parameters: int
    num_tensors: int
    other_bytes: int = 0
    """Tokenizer and configuration files, which exports carry along."""


@dataclass(frozen=True)
class Item:
    """One kind of file at its peak."""

    name: str
    bytes: int
    files: int
    why: str
    """How it comes about, for people."""


@dataclass(frozen=True)
class DiskEstimate:
    """What a run needs at its peak."""

    items: tuple[Item, ...]
    num_steps: int | None
    """Steps that were counted with; None: not known, and what grows with them is given for one step or one export."""

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def files(self) -> int:
        return sum(item.files for item in self.items)

    def item(self, name: str) -> Item:
        return next(item for item in self.items if item.name == name)

    def sentence(self) -> str:
        """For people, in one line."""
        parts = ", ".join(f"{item.name} {amount(item.bytes)} ({item.why})" for item in self.items)
        return f"the run may need {amount(self.bytes)} in {self.files} files: {parts}"


@dataclass(frozen=True)
class FreeSpace:
    """Of the filesystem under a path."""

    bytes: int
    inodes: int | None
    """None where the filesystem does not count them."""


def model_facts(folder: Path) -> ModelFacts:
    """Reads the headers of the safetensors files; raises ValueError where there are none, OSError as the disk says."""
    from safetensors import safe_open

    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"actor.path: {folder} holds no safetensors file")
    num_parameters = num_tensors = 0
    for path in weights:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118
                num_parameters += math.prod(file.get_slice(name).get_shape())
                num_tensors += 1
    others = (path for path in folder.iterdir() if path.is_file() and path.suffix in (".json", ".jinja", ".model"))
    return ModelFacts(num_parameters, num_tensors, sum(path.stat().st_size for path in others))


def free_space(path: Path) -> FreeSpace:
    """Free bytes and inodes for ordinary users, of the nearest folder that exists."""
    while not path.exists():
        path = path.parent
    facts = os.statvfs(path)
    return FreeSpace(facts.f_bavail * facts.f_frsize, facts.f_favail if facts.f_files > 0 else None)


def estimate(
    config: RunConfig, model: ModelFacts, *, num_trainers: int = 1, num_rollouts: int = 1, num_steps: int | None = None
) -> DiskEstimate:
    """Bytes and files at the peak. `num_steps`: of the whole run; None takes `total_train_steps`, if that is set."""
    steps = num_steps if num_steps is not None else config.total_train_steps
    items = [
        _checkpoints(config, model, num_trainers, steps),
        _exports(config, model, steps),
    ]
    if not is_supervised(config):
        items.append(_shards(config, num_rollouts, steps))
    if config.actor.weight_update_mode == "disk":
        size = model.num_parameters * ITEM_BYTES[config.rollout.dtype]
        files = WEIGHTS_VERSIONS * (2 + size // (16 * config.weights.bucket_mib << 20))
        items.append(Item("weights", WEIGHTS_VERSIONS * size, files, f"{WEIGHTS_VERSIONS} versions"))
    ranks = num_trainers + num_rollouts
    items.append(Item("code, logs", CODE_BYTES, CODE_FILES + 2 * ranks + 2 * (steps or 0), "small files"))
    return DiskEstimate(tuple(items), steps)


def checkpoint_bytes(config: RunConfig, model: ModelFacts, num_trainers: int = 1) -> int:
    """One checkpoint: of actor and critic master weights and two moments in float32 (float64 for float64), and the
    state of each rank."""
    size = _state_bytes(config.actor.dtype, model) + RNG_BYTES * num_trainers
    if config.critic is None:
        return size
    critic = model_facts(Path(config.critic.path)) if config.critic.path else model
    return size + _state_bytes(config.critic.dtype, critic)


def _state_bytes(dtype: str, model: ModelFacts) -> int:
    master = ITEM_BYTES["float64" if dtype == "float64" else "float32"]
    return 3 * master * model.num_parameters + CHECKPOINT_TENSOR_BYTES * model.num_tensors


def row_tokens(config: RunConfig) -> int:
    """Longest row: a prompt (`train_dataset.max_length`, else as long as the completion) and a full completion; of a
    workflow with more turns the context limit, where there is one."""
    prompt = config.train_dataset.max_length or config.gconfig.max_new_tokens
    longest = prompt + config.gconfig.max_new_tokens
    folder = Path(config.actor.path)
    limit = context_limit(config, model_context_limit(folder) if folder.is_dir() else None)
    if limit is None:
        return longest
    return min(longest, limit) if config.workflow.name in ONE_TURN else limit


def token_bytes(config: RunConfig) -> int:
    """Of a token in a shard, with the columns that only some runs have."""
    has_turns = config.workflow.name not in ONE_TURN
    has_teacher = config.teacher is not None and config.teacher.place == "engine"
    return TOKEN_BYTES + EXTRA_BYTES * (has_turns + has_teacher)


def step_bytes(config: RunConfig, num_rollouts: int = 1) -> tuple[int, int]:
    """(bytes, files) of the shards of one training step."""
    batch, samples = config.train_dataset.batch_size, config.gconfig.n_samples
    files = min(batch, max(num_rollouts, math.ceil(batch / config.rollout.shard_max_groups)))
    rows = batch * samples * (token_bytes(config) * row_tokens(config) + ROW_BYTES)
    return rows + files * (SHARD_FILE_BYTES + BLOCK_BYTES // 2), files


def _checkpoints(config: RunConfig, model: ModelFacts, num_trainers: int, steps: int | None) -> Item:
    """The kept ones and the one being written; before any is pruned, no more than are ever written."""
    size = checkpoint_bytes(config, model, num_trainers)
    every, count = config.recover.freq_steps, config.recover.keep + 1
    written = 1 if every is None else None if steps is None else math.ceil(steps / every)
    count = count if written is None else min(count, written)
    why = f"{count} x {amount(size)}"
    files = 4 + 2 * num_trainers + (0 if config.critic is None else 1 + num_trainers)
    return Item("checkpoints", count * size, count * files, why)


def _exports(config: RunConfig, model: ModelFacts, steps: int | None) -> Item:
    """All are kept."""
    size = model.num_parameters * ITEM_BYTES[config.rollout.dtype] + model.other_bytes
    every = config.saver.freq_steps
    count = 0 if every is None else 1 if steps is None else steps // every
    count += config.saver.at_end and not (every is not None and steps is not None and steps % every == 0)
    why = f"{count} x {amount(size)}" + (
        "" if every is None or steps is not None else f", and more every {every} steps"
    )
    return Item("exports", count * size, count * 8, why)


def _shards(config: RunConfig, num_rollouts: int, steps: int | None) -> Item:
    """Those of the steps that no checkpoint covers yet and of the batches in flight; all of them when they are
    kept."""
    size, files = step_bytes(config, num_rollouts)
    eta = config.rollout.max_head_offpolicyness
    in_flight = UNBOUNDED_STEPS if eta is None else eta + 1
    keep = config.rollout.keep_trajectories
    every = config.recover.freq_steps
    if keep != "none":
        count, why = steps, f"kept: {keep}"
    elif every is None:
        count, why = steps, "deleted after a checkpoint, but recover.freq_steps is null"
    else:
        count = every + in_flight if steps is None else min(every + in_flight, steps)
        why = "until a checkpoint covers them"
    if count is None:
        return Item("shards", size, files, f"for each step, {why}")
    return Item("shards", count * size, count * files, f"{count} steps x {amount(size)}, {why}")


def log_estimate(
    run: RunDirectory, config: RunConfig, *, num_trainers: int, num_rollouts: int, num_steps: int | None = None
) -> DiskEstimate | None:
    """One line at the start of an attempt; a warning when less is free than the whole run may need, an error line when
    not even one more checkpoint fits. None, and a line that says why, where the model cannot be read."""
    try:
        model = model_facts(Path(config.actor.path))
        made = estimate(config, model, num_trainers=num_trainers, num_rollouts=num_rollouts, num_steps=num_steps)
    except (ValueError, OSError) as error:
        logger.info("disk: no estimate: %s", error)
        return None
    shortage = shortage_of(run, made, checkpoint_bytes(config, model, num_trainers))
    level = logging.INFO if shortage is None else shortage.level
    text = made.sentence() if shortage is None else f"{made.sentence()}. {shortage.sentence}"
    free = free_space(run.path)
    logger.log(level, "disk: %s; free: %s (a quota is not visible here)", text, amount(free.bytes))
    return made


@dataclass(frozen=True)
class Shortage:
    """Less is free than needed."""

    level: int
    """logging.ERROR: the next checkpoint does not fit; logging.WARNING: the run as a whole does not."""
    sentence: str


def shortage_of(run: RunDirectory, made: DiskEstimate, one_checkpoint: int) -> Shortage | None:
    """Compares what is still to come (the estimate without what lies there already) with what is free."""
    free = free_space(run.path)
    used_bytes, used_files = used(run)
    more_bytes, more_files = max(0, made.bytes - used_bytes), max(0, made.files - used_files)
    if free.bytes < min(one_checkpoint, more_bytes):
        return Shortage(
            logging.ERROR,
            f"Not even one more checkpoint ({amount(one_checkpoint)}) fits into the {amount(free.bytes)} that are "
            "free: free space now; until then the run pauses when the disk is full",
        )
    if free.bytes < more_bytes:
        return Shortage(
            logging.WARNING,
            f"{amount(more_bytes)} more may be needed and {amount(free.bytes)} are free: free space, keep less "
            "(recover.keep, rollout.keep_trajectories, saver.freq_steps), or the run will pause when the disk is full",
        )
    if free.inodes is not None and free.inodes < more_files:
        return Shortage(
            logging.WARNING, f"{more_files} more files may be needed and {free.inodes} inodes are free: remove files"
        )
    return None


def used(run: RunDirectory) -> tuple[int, int]:
    """(bytes, files) of what the estimate speaks of and lies in the run already."""
    sizes = [
        size
        for folder in (run.checkpoints, run.exports, run.shards, run.archive, run.weights, run.code)
        for size in _sizes(folder)
    ]
    return sum(sizes), len(sizes)


def _sizes(folder: Path) -> Iterator[int]:
    """Of every file below; what vanishes meanwhile is left out."""
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.stat(os.path.join(parent, name)).st_size
            except OSError:
                continue


def amount(count: float) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    raise AssertionError
