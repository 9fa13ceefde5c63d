"""What `pekoe shards` prints: a list of shards and archives, episodes as text; verdicts are in `shard_verdict.py`."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence

import numpy as np

from pekoe.pipeline.records import TEACHER_LOGPROBS, TURN_REWARDS, Group, Trajectory, epoch_and_position
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.trajectory.archive import archive_files
from pekoe.pipeline.trajectory.shard import BadShard, Shard
from pekoe.pipeline.trajectory.shard_verdict import show_leftovers, verify_shards
from pekoe.pipeline.trajectory.store import Store

Decode = Callable[[Sequence[int]], str]


def run_action(args: argparse.Namespace) -> int:
    """Runs `args.action`; gives the exit code (1 = a shard is damaged, 2 = wrong use)."""
    run = RunDirectory(args.run)
    if not run.shards.is_dir():
        print(f"{args.run}: not a run directory (no shards/)", file=sys.stderr)
        return 2
    known = [*Store(run).paths(), *(run.relative(path) for path in archive_files(run))]
    wanted = args.shards if args.action != "show" else [args.shard] if args.shard else newest(run, known)
    names = [name if name.startswith(("shards/", "archive/")) else f"shards/{name}" for name in wanted or known]
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"{unknown[0]}: no such shard; `pekoe shards ls {args.run}` lists {len(known)}", file=sys.stderr)
        return 2
    if not names:
        kept = "consumed ones are deleted after a checkpoint; rollout.keep_trajectories=shards or =archive keeps them"
        print(f"no shards in {run.shards} ({kept})")
        if args.action == "verify":
            show_leftovers(run)
        return 0
    if args.action == "ls":
        return list_shards(run, names)
    if args.action == "verify":
        code = verify_shards(run, names)
        if not wanted:
            show_leftovers(run)
        return code
    return show_shard(run, names[0], args)


def newest(run: RunDirectory, names: Sequence[str]) -> list[str]:
    return sorted(names, key=lambda name: (run.path / name).stat().st_mtime_ns)[-1:]


def list_shards(run: RunDirectory, names: Sequence[str]) -> int:
    """One line per shard; exit code 1 when one cannot be read."""
    print(f"{'shard':<32} {'groups':>6} {'rows':>6} {'tokens':>9} {'versions':>10} {'reward':>8} {'MiB':>8}")
    code = 0
    for name in names:
        try:
            with Shard(run.path / name) as shard:
                rows = [row for group in shard.notice() for row in group.rows]
                groups, tokens = len(set(shard.group_numbers())), shard.num_tokens
            size = (run.path / name).stat().st_size / 2**20
        except BadShard as error:
            print(f"{name.removeprefix('shards/'):<32} damaged: {error.reason}")
            code = 1
            continue
        except FileNotFoundError:
            continue
        versions = f"{min(row.min_version for row in rows)}-{max(row.max_version for row in rows)}"
        reward = float(np.mean([row.reward for row in rows]))
        short = name.removeprefix("shards/")
        print(f"{short:<32} {groups:>6} {len(rows):>6} {tokens:>9} {versions:>10} {reward:>8.3f} {size:>8.2f}")
    return code


def show_shard(run: RunDirectory, name: str, args: argparse.Namespace) -> int:
    """Prints the chosen rows; exit code 1 when the shard is damaged, 2 when it has no such row."""
    try:
        with Shard(run.path / name) as shard:
            groups, attributes = shard.groups(), shard.attributes
    except BadShard as error:
        print(f"DAMAGED {name}: {error.reason}", file=sys.stderr)
        return 1
    numbered = enumerate((group, trajectory) for group in groups for trajectory in group.trajectories)
    chosen = [
        (row, group, trajectory)
        for row, (group, trajectory) in numbered
        if args.group in (None, group.number) and args.row in (None, row)
    ]
    if not chosen:
        print(f"{name}: no row with group {args.group}, row {args.row}", file=sys.stderr)
        return 2
    decode = None if args.ids else find_decoder(run)
    shown = chosen[: args.limit] if args.limit > 0 else chosen
    origin = f"run {attributes.run}, attempt {attributes.attempt}, {attributes.writer}"
    print(f"{name}: {origin}, temperature {attributes.temperature}")
    for row, group, trajectory in shown:
        print(f"\n{episode_text(row, group, trajectory, decode)}")
    if len(shown) < len(chosen):
        print(f"\n… {len(chosen) - len(shown)} more rows (--limit 0 prints all)")
    return 0


def find_decoder(run: RunDirectory) -> Decode | None:
    """The tokenizer that the run's configuration names; None, with a reason on stderr, when it cannot be had."""
    from omegaconf import OmegaConf

    try:
        config = OmegaConf.load(run.config)
        path = OmegaConf.select(config, "tokenizer_path") or OmegaConf.select(config, "actor.path")
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:
        print(f"(token ids only: no tokenizer: {str(error).splitlines()[0]})", file=sys.stderr)
        return None

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))

    return decode


def episode_text(row: int, group: Group, trajectory: Trajectory, decode: Decode | None) -> str:
    """One sequence for people: what is known of it, then its text with marks where speaker or version change."""
    epoch, position = epoch_and_position(group.number)
    active = trajectory.loss_mask.astype(bool)
    sampled = trajectory.versions[active]
    mean = float(trajectory.logprobs[active].mean())
    admission = f"group {group.number} (epoch {epoch}, position {position}, try {group.try_number})"
    facts = [
        f"reward {trajectory.reward:.4g}",
        trajectory.finish.name.lower(),
        f"{trajectory.prompt_length} prompt tokens, {len(sampled)} sampled",
        f"versions {sampled.min()}-{sampled.max()}",
        f"mean log-prob {mean:.3f}",
        f"seed {trajectory.seed}",
    ]
    head = f"── row {row} · {admission} · {group.example} · sample {trajectory.sample}\n   {' · '.join(facts)}"
    facts_of_extra = [*turn_reward_facts(trajectory), *teacher_facts(trajectory)]
    if facts_of_extra:
        head += f"\n   {' · '.join(facts_of_extra)}"
    if trajectory.info:
        head += f"\n   info {trajectory.info}"
    return f"{head}\n{marked_text(trajectory, decode)}"


def turn_reward_facts(trajectory: Trajectory) -> list[str]:
    """Rewards that turns have earned of their own: `turn rewards 0: -1, 2: 0.5`."""
    rewards = trajectory.extra.get(TURN_REWARDS)
    if rewards is None:
        return []
    earned = [f"{trajectory.turns[at]}: {rewards[at]:.4g}" for at in np.flatnonzero(rewards)]
    return [f"turn rewards {', '.join(earned) or 'all 0'}"]


def teacher_facts(trajectory: Trajectory) -> list[str]:
    """How likely the teacher finds what was sampled."""
    logprobs = trajectory.extra.get(TEACHER_LOGPROBS)
    return [] if logprobs is None else [f"teacher's mean log-prob {logprobs[trajectory.loss_mask != 0].mean():.3f}"]


def marked_text(trajectory: Trajectory, decode: Decode | None) -> str:
    """The tokens as text, else as ids; marks where the version changes: `⟦given⟧…⟦turn 0, version 3⟧…⟦version 4⟧…`."""
    labels = list(zip(trajectory.turns.tolist(), trajectory.versions.tolist(), strict=True))
    starts = [0, *(t for t in range(1, len(labels)) if labels[t] != labels[t - 1]), len(labels)]
    pieces = []
    for start, end in itertools.pairwise(starts):
        turn, version = labels[start]
        same_turn = start > 0 and labels[start - 1][0] == turn
        mark = "given" if version < 0 else f"version {version}" if same_turn else f"turn {turn}, version {version}"
        ids = trajectory.tokens[start:end].tolist()
        pieces.append(f"⟦{mark}⟧{decode(ids) if decode else ' '.join(map(str, ids))}")
    return "".join(pieces) if decode else "\n".join(pieces)
