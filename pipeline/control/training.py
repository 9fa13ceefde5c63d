"""One training step: plan -> every trainer rank reads its rows -> commit, or damaged groups are replaced -> done.

Nothing collective happens before the commit; after it the step finishes, whatever signal comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.control.group_table import OutstandingGroup
from pekoe.pipeline.control.parts import ControllerParts
from pekoe.pipeline.control.pump import Pump
from pekoe.pipeline.control.step import StepRows, make_plans, rows_of
from pekoe.pipeline.messages import Commit, Message, Phase, PhaseReached, Replan, RowsRead, StepDone, Wake


class Training:
    """Belongs to the controller; keeps what the trainer ranks have answered."""

    def __init__(self, config: RunConfig, parts: ControllerParts, pump: Pump) -> None:
        self.config, self.parts, self.pump = config, parts, pump
        self.version = 0
        self.round = 0
        self.rows_read: dict[int, RowsRead] = {}
        self.steps_done: dict[int, StepDone] = {}
        self.phase_reached: set[int] = set()
        self.engines_rest = False
        """Colocated: the device is the trainer's."""
        pump.handlers.update(
            {
                RowsRead: self._on_rows_read,
                StepDone: self.steps_done.__setitem__,
                PhaseReached: lambda source, message: self.phase_reached.add(source),
            }
        )

    def step(self, batch: list[OutstandingGroup], version: int) -> StepRows | None:
        """The step at `version`, of a batch that may be empty. None: some rows were damaged or a stop was asked for;
        nothing was trained, and damaged groups are issued again."""
        self.version = version
        self.engines_rest = self.parts.colocated
        if self.parts.colocated:
            self._rest_engines()
        rows = rows_of(batch, self.parts.choose_rows)
        self._check_staleness(batch)
        self.rows_read.clear()
        self.steps_done.clear()
        plans = make_plans(rows, self.parts.plan_rows, version, self.round)
        for rank, plan in zip(self.parts.trainer_ranks, plans, strict=True):
            self.parts.post.send(rank, plan)
        self._wait_for(self.rows_read, "trainer ranks to read rows")
        bad = [entry for message in self.rows_read.values() for entry in message.bad]
        if bad or self.parts.stop.requested():
            self._call_off(bad)
            return None
        self._tell_trainers(Commit(version, self.round))
        self._wait_for(self.steps_done, "the training step")
        self.round, self.engines_rest = 0, False
        return rows

    def stats(self) -> dict[str, float]:
        """Of the last step; equal on all trainer ranks."""
        return self.steps_done[self.parts.trainer_ranks[0]].stats

    def describe(self) -> str:
        """Who has answered, for logs and errors."""
        return (
            f"of {len(self.parts.trainer_ranks)} trainer ranks {len(self.rows_read)} have read their rows and "
            f"{len(self.steps_done)} have done the step"
        )

    def _wait_for(self, answers: dict[int, Any], reason: str) -> None:
        ranks = self.parts.trainer_ranks
        self.pump.wait(
            lambda: len(answers) == len(ranks) or None,
            reason,
            on=lambda: [rank for rank in ranks if rank not in answers],
        )

    def _on_rows_read(self, source: int, message: RowsRead) -> None:
        if (message.version, message.round) == (self.version, self.round):
            self.rows_read[source] = message

    def _rest_engines(self) -> None:
        """Colocated: the engines stop at a token and give their devices to the trainer."""
        self.phase_reached.clear()
        ranks = self.parts.rollout_ranks
        for rank in ranks:
            self.parts.post.send(rank, Phase(self.version))
        self.pump.wait(
            lambda: len(self.phase_reached) == len(ranks) or None,
            "engines to rest",
            on=lambda: [rank for rank in ranks if rank not in self.phase_reached],
        )

    def _call_off(self, bad: Sequence[tuple[str, int, str]]) -> None:
        """Before the commit nothing has happened yet: damaged shards are set aside, the plan is forgotten."""
        for shard, reason in {shard: reason for shard, _, reason in bad}.items():
            self._set_aside(shard, reason)
        self._tell_trainers(Replan(self.version, self.round))
        self.round += 1
        self.engines_rest = False
        if self.parts.colocated:
            for rank in self.parts.rollout_ranks:
                self.parts.post.send(rank, Wake(self.version))

    def _set_aside(self, shard: str, reason: str) -> None:
        self.pump.durably(f"the reason why {shard} is set aside", lambda: self.parts.quarantine(shard, reason))
        self.parts.dispatcher.replace_shard(shard)

    def _check_staleness(self, batch: Sequence[OutstandingGroup]) -> None:
        eta = self.config.rollout.max_head_offpolicyness
        if eta is None:
            return
        oldest = min((row.min_version for group in batch for row in group.rows), default=self.version)
        if self.version - oldest > eta:
            raise AssertionError(f"a token of version {oldest} reached the step at {self.version}; eta is {eta}")

    def _tell_trainers(self, message: Message) -> None:
        for rank in self.parts.trainer_ranks:
            self.parts.post.send(rank, message)
