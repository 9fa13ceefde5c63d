"""What the controller is given: the other stages, as plain functions and objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pekoe.pipeline.control.attached_worlds import AttachedWorlds
from pekoe.pipeline.control.checkpoint_saves import CheckpointFiles
from pekoe.pipeline.control.dispatcher import Dispatcher, Losses
from pekoe.pipeline.control.start_check import StartCheck
from pekoe.pipeline.control.step import ChooseRows, PlanRows, StepRows
from pekoe.pipeline.control.step_report import StepReport
from pekoe.pipeline.control.stop_watch import StopWatch
from pekoe.pipeline.control.weight_update import WeightUpdates
from pekoe.pipeline.messages import Inbox, Post
from pekoe.pipeline.observe.phases import SetPhase


@dataclass
class ControllerParts:
    """What `runs/rl_head.py` passes in: the other stages, as plain functions and objects."""

    post: Post
    inbox: Inbox
    trainer_ranks: Sequence[int]
    rollout_ranks: Sequence[int]
    rollout_leaders: Sequence[int]
    """Of these, the ranks that run workflows: one an engine."""
    colocated: bool
    dispatcher: Dispatcher
    weights: WeightUpdates
    attached: AttachedWorlds | None
    """None: worlds may not attach to this run."""
    choose_rows: ChooseRows
    plan_rows: PlanRows
    num_validation: int
    record_step: Callable[[int, StepRows, Losses], None]
    """Writes the ledger: what the step that made this version consumed, and what was lost since the last one."""
    record_end: Callable[[int, Losses], None]
    """Writes the ledger: what was lost after the last step."""
    done_before: frozenset[str]
    """Of a resumed run: which of `export` and `evaluation` exist at the version it begins at."""
    quarantine: Callable[[str, str], None]
    checkpoints: CheckpointFiles
    report: StepReport
    stop: StopWatch
    peer_failed: Callable[[], bool]
    """Whether another rank of this attempt has failed already: then nothing collective may begin."""
    stacks_of: Callable[[Sequence[int]], dict[int, str]]
    set_phase: SetPhase
    start_check: StartCheck | None = None
    """Before anything is sampled; None where there is no engine to be compared."""
