"""The workflow protocol: user code that turns one example into trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pekoe.pipeline.records import Example, Trajectory
from pekoe.pipeline.rollout.engine import GenerationRequest, Response, SamplingParameters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EpisodeEngine(Protocol):
    """What a workflow sees of an engine: bound to its episode, so seed, group and minimum version are filled in."""

    async def generate(self, request: GenerationRequest) -> Response: ...


class Judge(Protocol):
    """Scores a completion with the run's reward function, in the pool of killable processes."""

    async def __call__(
        self,
        prompt: str,
        completion: str,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        data: dict[str, Any],
    ) -> float: ...


class RejectEpisode(Exception):
    """Raised by a workflow: this example cannot be used; the group is rejected at once, without another try."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        """See `messages.Rejected.reason`."""
        self.detail = detail


@dataclass(frozen=True)
class WorkflowContext:
    """What every workflow is built with."""

    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingParameters
    judge: Judge
    context_limit: int
    """Most tokens of prompt plus completion."""


class Workflow(Protocol):
    """Built once per rank as `cls(context, **workflow.args)`; runs many episodes at once on one asyncio loop."""

    async def arun_episode(self, engine: EpisodeEngine, example: Example) -> Trajectory | list[Trajectory] | None:
        """One episode. None and `RejectEpisode` reject the group; another exception is retried, then rejects it."""
        ...
