"""Asks ranks what their threads are doing, from any thread of any rank.

asker ── ShowStacks ──► rank: its main thread answers
  └── no answer within half of the time: ShowStacks(of=rank) ──► a neighbour on the rank's host, which sends it a
      signal and reads what it wrote into its log (a main thread that stands still cannot hold that up)
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pekoe.launch.rank_log import log_path
from pekoe.pipeline.messages import STACKS_LIMIT, ShowStacks, Stacks
from pekoe.pipeline.observe import stacks as stacks_of_threads

if TYPE_CHECKING:
    from pekoe.launch.world import World

NEIGHBOUR_SECONDS = stacks_of_threads.DUMP_SECONDS + 3.0
"""For a neighbour to hear of it, which may be busy, to signal the rank and to read what it wrote."""
MAX_RANKS = 64
"""Asked at once; the rest is left out, with a word."""


class StackRequests:
    """One per world and rank; `serve` is driven by the main thread."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._inbox = world.post.inbox(ShowStacks, Stacks)
        self._numbers = itertools.count()
        self._open: dict[int, dict[int, str]] = {}
        """Answers so far, per question."""
        self._changed = threading.Condition()

    def own(self) -> str:
        """The stacks of this process' threads, without touching a file on the calling thread but for source lines."""
        return self._describe(stacks_of_threads.capture(self._doing()))

    def ask(self, ranks: Sequence[int], seconds: float) -> dict[int, str]:
        """The stacks of these ranks, or why they are not known. Takes at most about `seconds`; where a neighbour has to
        help, what that needs."""
        world = self._world
        wanted = list(dict.fromkeys(ranks))
        answers = dict.fromkeys(wanted[MAX_RANKS:], f"not asked: more than {MAX_RANKS} ranks")
        wanted = wanted[:MAX_RANKS]
        if world.rank in wanted:
            answers[world.rank] = self.own()
        others = [rank for rank in wanted if rank != world.rank]
        with self._changed:
            number = next(self._numbers)
            heard = self._open[number] = {}
        began = time.monotonic()
        for rank in others:
            world.post.send(rank, ShowStacks(number))
        self._wait(heard, others, began + seconds / 2)
        silent = [rank for rank in others if rank not in heard]
        reachable = [rank for rank in silent if self._ask_neighbour(number, rank)]
        self._wait(heard, reachable, max(began + seconds, time.monotonic() + NEIGHBOUR_SECONDS))
        with self._changed:
            del self._open[number]
            answers.update(heard)
        for rank in silent:
            last = world.last_words(rank)
            answers[rank] = f"rank {rank}: no answer within {seconds:g} s; {last}\n{answers.get(rank, '')}".strip()
        return {rank: stacks_of_threads.cut(answers[rank], STACKS_LIMIT) for rank in sorted(answers)}

    def serve(self) -> None:
        """Answers questions, takes answers. Main thread."""
        while not self._inbox.empty():
            source, message = self._inbox.get()
            if isinstance(message, Stacks):
                with self._changed:
                    if message.number in self._open:
                        self._open[message.number][source if message.of < 0 else message.of] = message.text
                        self._changed.notify_all()
            elif isinstance(message, ShowStacks):
                self._answer(source, message)

    def _answer(self, source: int, question: ShowStacks) -> None:
        """The main thread only takes note of the stacks; files are read by a thread of their own."""
        world = self._world
        captured = stacks_of_threads.capture(self._doing()) if question.of < 0 else []

        def work() -> None:
            text = self._describe(captured) if question.of < 0 else self._dump(question.of)
            world.post.send(source, Stacks(question.number, text, question.of))

        threading.Thread(target=work, name="stacks", daemon=True).start()

    def _ask_neighbour(self, number: int, rank: int) -> bool:
        """False where the rank is alone on its host."""
        world = self._world
        host = world.hosts[rank]
        here = [other for other, its_host in enumerate(world.hosts) if its_host == host and other != rank]
        if world.state.run is None or not here:
            return False
        world.post.send(world.rank if world.rank in here else here[0], ShowStacks(number, rank))
        return True

    def _dump(self, rank: int) -> str:
        run = self._world.state.run
        if run is None:
            return "this rank knows of no run directory yet"
        return stacks_of_threads.dump_by_signal(
            self._world.pids[rank], log_path(run, self._world.attempt, rank), stacks_of_threads.DUMP_SECONDS
        )

    def _wait(self, heard: dict[int, str], ranks: Iterable[int], deadline: float) -> None:
        """The main thread pumps meanwhile: it is the one that answers come through."""
        missing = set(ranks)
        pumps = threading.current_thread() is threading.main_thread()
        while time.monotonic() < deadline:
            with self._changed:
                if missing <= heard.keys():
                    return
                if not pumps:
                    self._changed.wait(max(0.0, deadline - time.monotonic()))
            if pumps:
                self._world.pump()
                self.serve()
                time.sleep(0.002)

    def _doing(self) -> dict[str, str]:
        return {thread.who: thread.phase for thread in self._world.state.threads.now()}

    def _describe(self, captured: list[stacks_of_threads.ThreadStack]) -> str:
        state = self._world.state
        head = f"rank {state.rank} ({state.role or 'no role yet'}, {state.host}): {len(captured)} threads\n"
        return stacks_of_threads.cut(head + stacks_of_threads.describe(captured, self._doing()), STACKS_LIMIT)
