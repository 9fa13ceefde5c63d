"""Who waits, who is in the batch, and what each of them has got; known to the leader of an instance alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from pekoe.pipeline.rollout.engine import Response
from pekoe.pipeline.rollout.engines.sequence_state import SequenceState
from pekoe.pipeline.rollout.engines.vllm.commands import Add, Command, Remove


class RequestBook:
    """Requests in order of arrival. Its users hold a lock."""

    def __init__(self, max_slots: int, deterministic: bool) -> None:
        self.waiting: deque[SequenceState] = deque()
        self.active: dict[int, SequenceState] = {}
        """In the batch, by number."""
        self.any_cancelled = False
        self._removed: list[int] = []
        """To be taken out of the batch."""
        self._next_number = 0
        self._max_slots = 1 if deterministic else max_slots
        self._deterministic = deterministic

    @property
    def gathers(self) -> bool:
        """True when more requests may still come before an idle engine starts."""
        return not self.active and len(self.waiting) < self._max_slots

    def has_work(self, version: int) -> bool:
        """True when the batch is to be changed or computed."""
        if self.active or self._removed:
            return True
        return any(sequence.request.min_version <= version and not sequence.cancelled for sequence in self.waiting)

    def changes(self, version: int, *, admit: bool = True) -> list[Command]:
        """What is to be done to the batch before the next step: the ended and cancelled leave, others enter."""
        if self.any_cancelled:
            self._sweep()
        commands: list[Command] = []
        if self._removed:
            commands.append(Remove(tuple(self._removed)))
            self._removed.clear()
        if admit and self.waiting and len(self.active) < self._max_slots:
            commands += self._admit(version)
        return commands

    def book(
        self, sampled: Iterable[tuple[int, int, float]], version_of: Callable[[str], int]
    ) -> list[tuple[SequenceState, Response]]:
        """Gives every sequence its token, with the version of its adapter; those that end with it, and their
        responses."""
        ended = []
        for number, token, logprob in sampled:
            sequence = self.active[number]
            sequence.append(token, logprob, version_of(sequence.request.adapter))
            if sequence.finish is not None:
                ended.append((sequence, sequence.response()))
                self._removed.append(number)
                del self.active[number]
        return ended

    def give_up(self, make_error: Callable[[], BaseException]) -> None:
        """Fails every request that has no answer yet."""
        orphans = [*self.active.values(), *self.waiting]
        self.active.clear()
        self.waiting.clear()
        for sequence in orphans:
            sequence.deliver(make_error())

    def _sweep(self) -> None:
        self.any_cancelled = False
        for number in [number for number, sequence in self.active.items() if sequence.cancelled]:
            self._removed.append(number)
            del self.active[number]
        self.waiting = deque(sequence for sequence in self.waiting if not sequence.cancelled)

    def _admit(self, version: int) -> list[Command]:
        """Those whose minimum version is reached, in order of arrival; deterministic: of group and sample."""
        if self._deterministic:
            by_group = sorted(self.waiting, key=lambda sequence: (sequence.request.group, sequence.request.sample))
            self.waiting = deque(by_group)
        commands: list[Command] = []
        early = []
        while self.waiting and len(self.active) < self._max_slots:
            sequence = self.waiting.popleft()
            if sequence.request.min_version <= version:
                commands.append(self._enter(sequence))
            else:
                early.append(sequence)
        self.waiting.extendleft(reversed(early))
        return commands

    def _enter(self, sequence: SequenceState) -> Add:
        self._next_number += 1
        self.active[self._next_number] = sequence
        stop = sequence.stop
        return Add(self._next_number, sequence.request, tuple(sorted(stop.token_ids)), stop.max_new)
