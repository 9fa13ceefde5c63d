"""Processes of the tests that kill: `python lease_processes.py racer|world|head ARGS`.

A world writes each shard that it tells of as a line of `told`; a head writes what came to it in `heard`, and begins the
next attempt with the groups that did not.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from pekoe.pipeline.leases.lease_board import LeaseBoard
from pekoe.pipeline.leases.lease_holder import LeaseHolder
from pekoe.pipeline.leases.lease_records import SharedWeights
from pekoe.pipeline.messages import Assign, Published, PublishedGroup
from pekoe.pipeline.run_directory import RunDirectory

POLL_SECONDS = 0.02
LEASE_SECONDS = 1.0
SLOTS = 4


def write_line(path: Path, *words: object) -> None:
    """Whole or not at all, for other processes."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, (" ".join(map(str, words)) + "\n").encode())
    os.close(descriptor)


def race(run: RunDirectory, name: str, go: Path) -> None:
    """Claims as fast as it can until nothing is left."""
    holder = LeaseHolder(run, name, num_ranks=1, slots=10**6)
    while (state := holder.look()) is None:
        time.sleep(0.001)
    write_line(run.path / "at-the-start", name)
    while not go.exists():
        time.sleep(0.001)
    holder.follow(state.attempt)
    num_empty = 0
    while num_empty < 20:
        claimed = holder.claim(7, 0)
        num_empty = 0 if claimed else num_empty + 1
        for assign in claimed:
            write_line(run.path / "claimed", name, assign.group)


def serve(run: RunDirectory, name: str) -> None:
    """A foreman whose groups take no time; ends when the run is finished."""
    rng = random.Random(name)
    holder = LeaseHolder(run, name, num_ranks=1, slots=SLOTS)
    running: list[tuple[int, int]] = []
    number = 0
    while True:
        time.sleep(5 * POLL_SECONDS * rng.random())
        state = holder.look()
        if state is None:
            continue
        if state.outcome == "finished":
            holder.leave()
            return
        if state.attempt != holder.attempt:
            holder.follow(state.attempt)
            running.clear()
        gone = set(holder.cancelled())
        running = [key for key in running if key not in gone]
        running += [(assign.group, assign.try_number) for assign in holder.claim(SLOTS - len(running), 0)]
        holder.beat(0)
        if running and rng.random() < 0.7:
            number += 1
            count = rng.randint(1, len(running))
            path = f"shards/{state.attempt}-{name}/{number}.h5"
            write_line(run.path / "told", path, *(group for group, _ in running[:count]))
            holder.tell([Published(path, tuple(PublishedGroup(*key, ()) for key in running[:count]))])
            del running[:count]


def lead(run: RunDirectory, attempt: int, num_groups: int) -> None:
    """Offers what no earlier attempt has heard of, never more than there is capacity for."""
    heard = run.path / "heard"
    lines = heard.read_text().splitlines() if heard.exists() else []
    done = {int(group) for line in lines for group in line.split()[1:]}
    board = LeaseBoard(run, attempt, "hash", poll_seconds=POLL_SECONDS, lease_seconds=LEASE_SECONDS)
    board.open()
    board.announce(0, SharedWeights(0, "weights/shared/v-0", "token"))
    waiting = [group for group in range(num_groups) if group not in done]
    while len(done) < num_groups:
        while waiting and board.capacity() > 0:
            group = waiting.pop(0)
            board.offer(Assign(group, 0, group, 1, 0))
        for message in board.poll():
            assert isinstance(message, Published)
            groups = [group.group for group in message.groups]
            write_line(heard, message.path, *groups)
            done.update(groups)
        time.sleep(POLL_SECONDS)
    board.finish("finished")
    board.poll()


if __name__ == "__main__":
    kind, folder, *rest = sys.argv[1:]
    directory = RunDirectory(Path(folder))
    if kind == "racer":
        race(directory, rest[0], Path(rest[1]))
    elif kind == "world":
        serve(directory, rest[0])
    else:
        lead(directory, int(rest[0]), int(rest[1]))
