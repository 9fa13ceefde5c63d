"""What the ranks of the post office's tests run: `python post_program.py WHAT`; each line of output is JSON."""

from __future__ import annotations

import json
import sys
import time

import mpi4py

mpi4py.rc.thread_level = "funneled"

from mpi4py import MPI  # noqa: E402

from pekoe.launch.postoffice import (  # noqa: E402
    MessageTooLargeError,
    OutboxFullError,
    PostLimits,
    PostOffice,
    UnopenedInboxError,
)
from pekoe.pipeline.messages import (  # noqa: E402
    Assign,
    Cancel,
    Flush,
    Hello,
    Published,
    PublishedGroup,
    Rejected,
    Row,
    StopRollout,
)

NUM_NOTICES = 4000


def say(**facts: object) -> None:
    sys.stdout.write(json.dumps({"rank": MPI.COMM_WORLD.rank, **facts}) + "\n")
    sys.stdout.flush()


def pump_until(post: PostOffice, over: object, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not over():  # type: ignore[operator]
        if not post.pump():
            time.sleep(1e-4)
        if time.monotonic() > deadline:
            raise TimeoutError("the post office did not finish")


def notice(number: int, groups: int = 1) -> Published:
    rows = tuple(Row(row, row, 100, 80, 0.5, 3, 4, False) for row in range(8))
    return Published(f"shards/rank-1/{number:06}.h5", tuple(PublishedGroup(number + i, 0, rows) for i in range(groups)))


def order(post: PostOffice) -> None:
    """Small and large messages to one peer, and to oneself, arrive in order; kinds without an inbox are held."""
    if post.rank == 0:
        pump_until(post, lambda: len(post._held) == 2 * (post.size - 1) * 500 + 3)
        box = post.inbox(Hello, Rejected)
        other = post.inbox(Assign)
        got: dict[int, list[str]] = {}
        while not box.empty():
            source, message = box.get()
            text = message.role if isinstance(message, Hello) else message.reason  # type: ignore[union-attr]
            got.setdefault(source, []).append(text)
        expected = [str(number) for number in range(1000)]
        say(ordered=all(got[source] == expected for source in range(1, post.size)), own=got[0], other=other.empty())
        return
    for number in range(0, 1000, 2):
        post.send(0, Hello(str(number), 0))
        post.send(0, Rejected(0, 0, str(number + 1), detail="x" * (50_000 if number % 100 == 0 else 10)))
    post.drain(30)


def main(what: str) -> None:
    world = MPI.COMM_WORLD
    limits = PostLimits(outbox_messages=200, held_messages=5) if what == "bounds" else None
    post = PostOffice(world, limits)
    if what == "order":
        if post.rank == 0:
            for number in range(3):
                post.send(0, Hello(f"own {number}", 0))
        order(post)
    elif what == "large":
        if post.rank == 1:
            try:
                post.send(0, Rejected(0, 0, "error", "x" * (1 << 20)))
            except MessageTooLargeError as error:
                say(error=str(error))
            post.send(0, Rejected(0, 0, "fits", "x" * ((1 << 20) - 100)))
            post.drain(30)
        else:
            box = post.inbox(Rejected)
            pump_until(post, lambda: not box.empty())
            say(received=box.get()[1].reason)  # type: ignore[union-attr]
    elif what == "bounds":
        if post.rank == 1:
            try:
                for number in range(300):
                    post.send(0, Cancel(number, 0))
            except OutboxFullError as error:
                say(error=str(error))
        else:
            try:
                for _ in range(10):
                    post.send(0, Flush())
            except UnopenedInboxError as error:
                say(error=str(error))
            box = post.inbox(StopRollout)
            for call in (lambda: post.inbox(StopRollout), lambda: post.send(7, Flush())):
                try:
                    call()
                except ValueError as error:
                    say(error=str(error))
            say(empty=box.empty())
    elif what == "stalled":
        stalled_peer(post)
    elif what == "speed":
        speed(post)
    elif what == "part":
        part(post)
    world.Barrier()


def stalled_peer(post: PostOffice) -> None:
    """Rank 2 takes nothing for a while; rank 1 gets its messages from rank 0 all the same."""
    if post.rank == 0:
        for number in range(2000):
            post.send(2, Rejected(number, 0, "error", "x" * 20_000))
        for number in range(100):
            post.send(1, Cancel(number, 0))
        pump_until(post, lambda: post.num_unsent == 0)
    elif post.rank == 1:
        box = post.inbox(Cancel)
        began = time.monotonic()
        pump_until(post, lambda: box.qsize() == 100)
        say(seconds=time.monotonic() - began)
    else:
        box = post.inbox(Rejected)
        time.sleep(2)
        pump_until(post, lambda: box.qsize() == 2000)
        say(in_order=[box.get()[1].group for _ in range(2000)] == list(range(2000)))  # type: ignore[union-attr]


def part(post: PostOffice) -> None:
    """The others send large messages at the end, and later than rank 0, which has nothing to send."""
    box = post.inbox(Rejected)
    if post.rank:
        time.sleep(0.5 * post.rank)
        post.send(0, Rejected(post.rank, 0, "error", "x" * 1_000_000))
    began = time.monotonic()
    post.part(20)
    say(seconds=time.monotonic() - began, taken=box.qsize())


def speed(post: PostOffice) -> None:
    """All others send notices to rank 0; the rate it takes them at."""
    if post.rank == 0:
        box = post.inbox(Published)
        MPI.COMM_WORLD.Barrier()
        began = time.perf_counter()
        total = NUM_NOTICES * (post.size - 1)
        pump_until(post, lambda: box.qsize() == total, 60)
        say(notices=total, seconds=time.perf_counter() - began)
        return
    messages = [notice(number) for number in range(NUM_NOTICES)]
    MPI.COMM_WORLD.Barrier()
    for message in messages:
        post.send(0, message)
    post.drain(60)


if __name__ == "__main__":
    main(sys.argv[1])
