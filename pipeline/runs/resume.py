"""The way back: what earlier attempts left beyond the start point of this one is set aside, the rest is handed on.

    head, before any role of this attempt starts     ledger read ─► later records, metrics, exports, weights, archives,
                                                     evaluations and shards set aside ─► Past
    controller, once the roles are there             Past: cursor, counters, open groups, shards whose groups it adopts

So no role can ever see the abandoned future. Each move is one rename with its reason beside it: after a crash in the
middle the next attempt does the rest.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pekoe.pipeline import files
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.data.cursor import Cursor
from pekoe.pipeline.messages import Published
from pekoe.pipeline.observe.metrics import MetricsWriter, read_metrics
from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.runs.start import RunData, StartPoint
from pekoe.pipeline.runs.transports import SHARED
from pekoe.pipeline.train.checkpoint import CONTROLLER_STATE
from pekoe.pipeline.trajectory.archive import Archive
from pekoe.pipeline.trajectory.ledger import Ledger
from pekoe.pipeline.trajectory.store import Store

logger = logging.getLogger(__name__)

EXPORTS_ASIDE = 4
"""Exports of abandoned futures that are kept, besides those of the last one."""

EVALUATED = frozenset({"eval/accuracy", "eval/loss"})
"""Figures of an evaluation, one of which there is when any example could be used."""
VERSION = re.compile(r"(?:step|v)-(\d+)(?:\.[\w.]*)?")
"""Name of something that was made at a version."""


@dataclass(frozen=True)
class Past:
    """What earlier attempts left for the controller of this one."""

    state: dict[str, Any] = field(default_factory=dict)
    """Its snapshot in the checkpoint; empty without one."""
    notices: tuple[Published, ...] = ()
    """Valid shards with open groups and no token newer than the start point."""
    consumed: frozenset[str] = frozenset()
    """Shards on disk that were trained on, whole or in part."""
    spent: tuple[str, ...] = ()
    """Shards whose groups had ended at the start point: still there, unless trajectories are not kept."""
    done: frozenset[str] = frozenset()
    """Which of `export` and `evaluation` exist at the start point."""


def training_cursor(config: RunConfig, data: RunData) -> Cursor:
    """The order of the training examples, at its beginning."""
    return Cursor(len(data.training), config.seed, config.train_dataset.shuffle, config.total_train_epochs)


def go_back(run: RunDirectory, config: RunConfig, attempt: int, start: StartPoint, data: RunData) -> Past:
    """Head only, of an attempt after the first. ValueError when the ledger does not reach the start point."""
    version = start.version
    ledger = Ledger(run)
    consumed = {entry.shard for record in ledger.scan(version) for entry in record.consumed}
    state = read_state(Path(start.checkpoint)) if start.checkpoint else {}
    ledger.set_aside_after(version)
    set_results_aside(run, config, attempt, version)
    cursor = training_cursor(config, data)
    if state:
        cursor.restore(state["cursor"])
    Archive(run).set_aside_after(consumed)
    store = Store(run)
    found = store.adoptable(version, lambda group: not cursor.is_closed(group))
    kept = {notice.path for notice in found.notices}
    trained = consumed.intersection(store.paths())
    spent = trained - kept
    if config.rollout.keep_trajectories == "none":
        store.collect(sorted(spent.union(found.spent)))
    store.set_aside_unknown(attempt, kept | consumed)
    store.close()
    logger.info("attempt %d goes on from version %d; %d shards hold open groups", attempt, version, len(kept))
    return Past(state, tuple(found.notices), frozenset(trained & kept), tuple(sorted(spent)), done_at(run, version))


def set_results_aside(run: RunDirectory, config: RunConfig, attempt: int, version: int) -> None:
    """Figures, exports, evaluations and weights of later versions leave the run; moves that were cut off are ended."""
    with MetricsWriter(run, attempt, tensorboard=config.stats_logger.tensorboard) as metrics:
        metrics.truncate_after(version)
    shared = run.weights / SHARED
    for folder in (run.path, run.ledger, run.metrics, run.set_aside, run.exports, run.eval, run.weights, shared):
        _finish_moves(folder)
    _make_room_aside(run, version)
    for folder in (run.exports, run.eval, run.weights, shared):
        for path in sorted(made_after(folder, version)):
            run.put_aside(path, f"the run went on from version {version}")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The controller's snapshot in a checkpoint."""
    state: dict[str, Any] = msgspec.msgpack.decode(files.read_bytes(checkpoint / CONTROLLER_STATE))
    return state


def made_after(folder: Path, version: int) -> Iterator[Path]:
    """What lies in a folder under the name of a later version (`step-N…`, `v-N…`)."""
    for path in folder.iterdir() if folder.is_dir() else ():
        match = VERSION.fullmatch(path.name)
        if match and int(match[1]) > version:
            yield path


def done_at(run: RunDirectory, version: int) -> frozenset[str]:
    """What an earlier attempt has finished at the version that this one begins at."""
    done = set()
    if (run.exports / f"step-{version}").is_dir():
        done.add("export")
    if any(line.step == version and not EVALUATED.isdisjoint(line.values) for line in read_metrics(run)):
        done.add("evaluation")
    return frozenset(done)


def _make_room_aside(run: RunDirectory, version: int) -> None:
    """What is as large as the model stays set aside in a bounded number: of weights those of the last abandoned future,
    of exports the newest."""
    for folder, name in ((run.weights, "weights__v-*"), (run.weights / SHARED, f"weights__{SHARED}__v-*")):
        if any(path.is_dir() for path in made_after(folder, version)):
            for path in run.set_aside.glob(name):
                if path.is_dir():
                    files.put_away(path)
    exports = [path for path in run.set_aside.glob(f"{run.exports.name}__*") if path.is_dir()]
    for path in sorted(exports, key=lambda path: path.stat().st_ctime_ns)[:-EXPORTS_ASIDE]:
        files.put_away(path)


def _finish_moves(folder: Path) -> None:
    """Removes what was being written or removed when its writer died; a folder that was being replaced comes back."""
    for path in folder.glob("*") if folder.is_dir() else ():
        if path.name.endswith(files.PREVIOUS):
            files.restore_folder(path.with_suffix(""))
        if path.name.endswith((files.PART, files.DISCARDED, files.PREVIOUS)):
            if path.is_dir():
                files.put_away(path)
            else:
                files.remove(path)
