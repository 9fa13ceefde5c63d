"""Before an attempt samples anything: what engines sample, what they score and what the trainer scores must agree.

head -> trainer ranks, engines   CheckLogprobs, CheckEngine
trainer rank 0 -> head           log-probs of the check sequences
engine -> head                   the same, and those of a short completion, as recorded while sampling and as scored
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pekoe.pipeline.control.logprob_gap import EnginesDisagreeError, Gap, GapLimit
from pekoe.pipeline.control.pump import Pump
from pekoe.pipeline.messages import CheckEngine, CheckLogprobs, LogprobsChecked, Post

logger = logging.getLogger(__name__)

SHOWN_RANKS = 8


@dataclass
class StartCheck:
    """No weights move. Costs a forward pass of the check sequences on each side, and a few decoded tokens."""

    post: Post
    trainer_ranks: Sequence[int]
    leaders: Sequence[int]
    """Ranks that lead an engine."""
    limit: GapLimit
    seconds: float
    """`cluster.setup_seconds`: an engine may still compile."""
    available: Callable[[], Sequence[int]] | None = None
    """Ranks whose engines stand; the others are not waited for (they are compared when they get weights)."""
    version: int = -1
    by_trainer: LogprobsChecked | None = None
    by_engine: dict[int, LogprobsChecked] = field(default_factory=dict)

    def run(self, version: int, pump: Pump, may_give_up: Callable[[], bool]) -> Gap:
        """Between engines and trainer; EnginesDisagreeError above the limit."""
        self.version, self.by_trainer = version, None
        self.by_engine.clear()
        pump.handlers[LogprobsChecked] = self.on_checked
        for rank in self.trainer_ranks:
            self.post.send(rank, CheckLogprobs(version))
        for rank in self.leaders:
            self.post.send(rank, CheckEngine(version))
        pump.wait(
            lambda: (self.is_over or may_give_up()) or None,
            "engines and trainer to compare log-probs",
            self.seconds,
            self.unanswered,
            key="cluster.setup_seconds",
        )
        return self.judge() if self.is_over else Gap()

    def on_checked(self, source: int, message: LogprobsChecked) -> None:
        """An engine's answer has what it sampled."""
        if message.version != self.version:
            return
        if message.sampled:
            self.by_engine[source] = message
        else:
            self.by_trainer = message

    @property
    def is_over(self) -> bool:
        return self.by_trainer is not None and not self._lacking()

    def unanswered(self) -> list[int]:
        """Who has not answered yet."""
        trainer = [self.trainer_ranks[0]] if self.by_trainer is None else []
        return trainer + self._lacking()

    def _lacking(self) -> list[int]:
        present = set(self.leaders if self.available is None else self.available())
        return [rank for rank in self.leaders if rank not in self.by_engine and rank in present]

    def judge(self) -> Gap:
        """Each engine with itself, then all with the trainer."""
        assert self.by_trainer is not None
        for rank, message in sorted(self.by_engine.items()):
            try:
                self.limit.judge(self.version, message.scored, {rank: message.sampled})
            except EnginesDisagreeError as error:
                raise EnginesDisagreeError(
                    f"the engine of rank {rank} scores a completion otherwise than it has sampled it: log-probs must "
                    f"be of the full distribution at gconfig.temperature, whatever is cut or penalised. {error}"
                ) from error
        lacking = sorted(set(self.leaders) - set(self.by_engine))
        if lacking:
            ranks = ", ".join(map(str, lacking[:SHOWN_RANKS])) + (", …" if len(lacking) > SHOWN_RANKS else "")
            logger.warning("not compared yet: engines of ranks %s, which are built anew", ranks)
        if not self.by_engine:
            return Gap()
        checks = {rank: message.check for rank, message in self.by_engine.items()}
        gap = self.limit.judge(self.version, self.by_trainer.check, checks)
        logger.info(
            "%s agree at version %d: mean |log-prob gap| %.3g, largest %.3g (limit %.3g)",
            self.limit.between, self.version, gap.mean, gap.largest, self.limit.limit,
        )  # fmt: skip
        return gap
