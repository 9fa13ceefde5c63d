"""Attached worlds: where the dispatcher puts groups, when weights go to disk, and what a foreman makes of its files."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pekoe.pipeline.config.load import from_yaml_text
from pekoe.pipeline.control.attached_worlds import BOARD, AttachedWorlds, NoRolloutWorld
from pekoe.pipeline.control.disk_watch import DiskWatch
from pekoe.pipeline.control.dispatcher import Dispatcher
from pekoe.pipeline.control.foreman import AttachedWorldError, Foreman, ForemanParts
from pekoe.pipeline.control.shared_weights import MAX_TRIES, SharedWeights, SharedWeightsError
from pekoe.pipeline.data.cursor import Cursor
from pekoe.pipeline.messages import (
    Assign,
    Cancel,
    EngineFailed,
    EngineRestored,
    Finished,
    Flush,
    Follow,
    Hello,
    LoadWeights,
    Message,
    PrepareWeights,
    Published,
    PublishedGroup,
    Rejected,
    Row,
    ShareWeights,
    StopRollout,
    WeightsLoaded,
    WeightsReady,
    WeightsShared,
)


@dataclass
class SentMessages:
    """A post that keeps what is sent."""

    rank: int = 0
    size: int = 4
    sent: list[tuple[int, Message]] = field(default_factory=list)

    def send(self, to: int, message: Message) -> None:
        self.sent.append((to, message))

    def inbox(self, *kinds: type[Message]) -> Any:
        return queue.SimpleQueue()


@dataclass
class Board:
    """The board as the dispatcher uses it."""

    room: int = 0
    ranks: int = 0
    offers: list[Assign] = field(default_factory=list)
    withdrawn: list[tuple[int, int]] = field(default_factory=list)
    starving: bool = False
    left_alone: list[tuple[int, int]] = field(default_factory=list)

    def stranded(self) -> list[tuple[int, int]]:
        return self.left_alone

    def offer(self, assign: Assign) -> None:
        self.offers.append(assign)
        self.room -= 1

    def withdraw(self, group: int, try_number: int) -> None:
        self.withdrawn.append((group, try_number))

    def capacity(self) -> int:
        return self.room

    def num_ranks(self) -> int:
        return self.ranks

    def starve(self, is_starving: bool) -> None:
        self.starving = is_starving


def dispatcher(board: Board, ranks: list[int], **overrides: Any) -> tuple[Dispatcher, SentMessages]:
    given = {"train_dataset.batch_size": 4, "rollout.max_head_offpolicyness": 1, **overrides}
    config = from_yaml_text("", [f"{key}={value}" for key, value in given.items()])
    post = SentMessages()
    return Dispatcher(config, post, Cursor(100, 1, False, 1), ranks, 50, board), post


def published(path: str, group: int, version: int = 0) -> Published:
    row = Row(0, 0, 8, 4, 1.0, version, version, False)
    return Published(path, (PublishedGroup(group, 0, (row,)),))


def test_without_rollout_ranks_nothing_is_admitted_until_a_world_attaches() -> None:
    board = Board()
    made, post = dispatcher(board, [])
    made.admit_all()
    assert not board.offers
    assert made.admission.running == 0
    board.room, board.ranks = 3, 1
    made.admit_all()
    assert [offer.group for offer in board.offers] == [0, 1, 2]
    assert not post.sent
    board.room = 100
    made.admit_all()
    assert made.admission.running == 8 == made.on_board, "the bound of admission holds, whatever the board could take"
    made.on_published(published("shards/0-w/0.h5", 0))
    assert (made.admission.running, made.on_board) == (7, 7)
    made.on_rejected(Rejected(1, 0, "none"))
    assert (made.admission.running, made.on_board) == (7 - 1, 6)


def test_groups_are_spread_over_own_ranks_and_attached_ones_by_their_load() -> None:
    board = Board(room=100, ranks=2)
    made, post = dispatcher(board, [1, 2], **{"rollout.max_head_offpolicyness": 4})
    made.admit_all()
    own = [to for to, message in post.sent if isinstance(message, Assign)]
    assert len(own) + len(board.offers) == 20
    assert abs(own.count(1) - own.count(2)) <= 1
    assert abs(len(board.offers) - len(own)) <= 2, "two ranks here, two there"
    assert {group.rank for group in made.table.groups.values()} == {1, 2, BOARD}


def test_a_group_that_is_dropped_is_withdrawn_from_the_board() -> None:
    board = Board(room=100, ranks=1)
    made, post = dispatcher(board, [], **{"rollout.stale_wait_seconds": 0.001})
    made.admit_all()
    time.sleep(0.01)
    made.drop_stale(0, 1.0)
    assert sorted(board.withdrawn) == [(group, 0) for group in range(4)], "those that hold up the batch"
    assert made.on_board == 4
    assert not [message for _, message in post.sent if isinstance(message, Cancel)]
    made.admit_all()
    assert {offer.try_number for offer in board.offers[8:]} == {1}
    assert made.on_board == 8


def test_groups_that_no_world_is_left_for_are_sampled_here() -> None:
    board = Board(room=100, ranks=2)
    made, post = dispatcher(board, [1], **{"rollout.max_head_offpolicyness": 4})
    made.admit_all()
    board.left_alone = [(offer.group, 0) for offer in board.offers]
    num_offers = len(board.offers)
    assert num_offers
    board.room = board.ranks = 0
    made.admit_all()
    assert made.on_board == 0
    assert sorted(board.withdrawn) == board.left_alone
    assigned = [message for _, message in post.sent if isinstance(message, Assign)]
    assert sorted(assign.group for assign in assigned) == list(range(20))
    assert {assign.try_number for assign in assigned} == {0}, "a recovery is no new draw"
    assert made.admission.running == 20
    made.admit_all()
    assert len(board.withdrawn) == num_offers, "once each"


def test_the_time_without_any_world_does_not_make_groups_late() -> None:
    board = Board(room=100, ranks=1)
    made, _ = dispatcher(board, [], **{"rollout.stale_wait_seconds": 0.05})
    made.admit_all()
    board.room, board.ranks, board.left_alone = -8, 0, [(offer.group, 0) for offer in board.offers]
    time.sleep(0.06)
    made.admit_all()
    made.drop_stale(0, 1.0)
    assert not board.withdrawn
    board.left_alone, board.ranks = [], 1
    time.sleep(0.06)
    made.drop_stale(0, 1.0)
    assert len(board.withdrawn) == 4, "from then on it counts"


def test_a_run_alone_waits_for_worlds_and_not_for_ever() -> None:
    board = Board()
    worlds = AttachedWorlds(board, SharedWeights(SentMessages(), [0], lambda message: None), "RUN", 0.05, False)
    assert worlds.is_alone()
    board.ranks = 1
    assert not worlds.is_alone()
    board.ranks = 0
    assert worlds.is_alone()
    time.sleep(0.06)
    with pytest.raises(NoRolloutWorld, match=r"rollout_array.wait_seconds is 0.05"):
        worlds.is_alone()
    assert not replace(worlds, has_others=True).is_alone()


def test_one_version_is_written_at_a_time_and_a_full_disk_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    post, told = SentMessages(), []
    weights = SharedWeights(post, [0, 1], told.append)
    disk = DiskWatch(100.0)
    clock = itertools.count(10.0, 5.0)
    monkeypatch.setattr("pekoe.pipeline.control.shared_weights.time.monotonic", lambda: next(clock))
    weights.bring(3)
    weights.bring(4)
    assert post.sent == [(0, ShareWeights(3)), (1, ShareWeights(3))]
    weights.on_shared(WeightsShared(3, 0.1, "token"), disk)
    assert [message.version for message in told] == [3]
    weights.bring(3)
    assert len(post.sent) == 2
    weights.bring(5)
    weights.on_shared(WeightsShared(5, 0.1, "", "no room", disk_is_full=True), disk)
    assert disk.is_full
    weights.bring(5)
    weights.on_shared(WeightsShared(5, 0.1, "token"), disk)
    assert not disk.is_full
    assert weights.written == 5
    for number in range(MAX_TRIES):
        weights.bring(6)
        message = WeightsShared(6, 0.1, "", "broken")
        if number + 1 < MAX_TRIES:
            weights.on_shared(message, disk)
    with pytest.raises(SharedWeightsError, match="version 6 could not be written for attached worlds: broken"):
        weights.on_shared(message, disk)


@dataclass(frozen=True)
class Weights:
    version: int
    token: str = "t"


@dataclass(frozen=True)
class State:
    """What the head says."""

    attempt: int = 0
    weights: Weights | None = None
    config_hash: str = "hash"
    starving: bool = False
    outcome: str = ""
    seconds_unchanged: float = 0.0


@dataclass
class Files:
    """The lease files, from a world's side."""

    state: State | None = None
    offers: list[Assign] = field(default_factory=list)
    given_up: list[tuple[int, int]] = field(default_factory=list)
    told: list[Message] = field(default_factory=list)
    followed: list[int] = field(default_factory=list)
    claims: list[tuple[int, int]] = field(default_factory=list)
    has_left: bool = False

    def look(self) -> State | None:
        return self.state

    def claim(self, limit: int, version: int) -> list[Assign]:
        self.claims.append((limit, version))
        taken, self.offers = self.offers[:limit], self.offers[limit:]
        return taken

    def follow(self, attempt: int) -> list[tuple[int, int]]:
        self.followed.append(attempt)
        return []

    def cancelled(self) -> list[tuple[int, int]]:
        taken, self.given_up = self.given_up, []
        return taken

    def tell(self, messages: Any) -> None:
        self.told += messages

    def beat(self, version: int) -> None: ...

    def leave(self) -> None:
        self.has_left = True


@dataclass
class Ranks:
    """Two rollout ranks that answer at once."""

    inbox: Any = field(default_factory=queue.SimpleQueue)
    rank: int = 0
    size: int = 2
    sent: list[tuple[int, Message]] = field(default_factory=list)
    load_error: str = ""
    silent: set[int] = field(default_factory=set)
    """Ranks that do not answer Prepare, or whose engine is away."""

    def send(self, to: int, message: Message) -> None:
        self.sent.append((to, message))
        if isinstance(message, PrepareWeights) and to not in self.silent:
            self.inbox.put((to, WeightsReady(message.version, message.epoch)))
        if isinstance(message, LoadWeights) and to not in self.silent:
            self.inbox.put((to, WeightsLoaded(message.version, 0.1, (), self.load_error)))

    def of(self, kind: type[Message]) -> list[tuple[int, Any]]:
        return [(to, message) for to, message in self.sent if isinstance(message, kind)]


def foreman(
    files: Files,
    ranks: Ranks,
    stop: threading.Event | None = None,
    limit: float = 5.0,
    followers: dict[int, tuple[int, ...]] | None = None,
) -> Foreman:
    for rank in (0, 1):
        ranks.inbox.put((rank, Hello("rollout", -1)))
    made: Any = ranks
    parts = ForemanParts(
        post=made, inbox=ranks.inbox, ranks=(0,) if followers else (0, 1), leases=files, slots=3, config_hash="hash",
        poll_seconds=0.01, orphan_seconds=10.0, ready_seconds=limit, setup_seconds=5.0, load_seconds=limit,
        away_seconds=20.0, grace_seconds=2.0, stop_requested=(stop or threading.Event()).is_set,
        set_phase=lambda phase, **facts: None,
    )  # fmt: skip
    return Foreman(replace(parts, followers=followers or {}))


def offer(group: int, version: int = 0) -> Assign:
    return Assign(group, 0, group, 4, version)


def test_a_foreman_loads_before_it_claims_and_spreads_what_it_gets() -> None:
    files, ranks = Files(State(weights=Weights(2)), offers=[offer(n, 2) for n in range(5)]), Ranks()
    made = foreman(files, ranks)
    assert made.turn() == ""
    kinds = [type(message) for _, message in ranks.sent]
    assert kinds == [*2 * [Follow], *2 * [PrepareWeights], *2 * [LoadWeights], *3 * [Assign]]
    assert files.claims == [(3, 2)]
    assert sorted(to for to, _ in ranks.of(Assign)) in ([0, 0, 1], [0, 1, 1])
    assert made.turn() == ""
    assert len(ranks.of(Assign)) == 3, "no slot is free"
    assert len(ranks.of(PrepareWeights)) == 2, "the version is served already"
    ranks.inbox.put((0, published("shards/0-w-rank-0/1.h5", 0)))
    made.turn()
    made.turn()
    assert [type(message) for message in files.told] == [Published]
    assert len(ranks.of(Assign)) == 4


def test_a_foreman_has_shards_published_when_the_head_starves_and_once_for_what_lies_there() -> None:
    files, ranks = Files(State(weights=Weights(0)), offers=[offer(0)]), Ranks()
    made = foreman(files, ranks)
    made.turn()
    ((holder, _),) = ranks.of(Assign)
    ranks.inbox.put((holder, Finished(0, 0)))
    made.turn()
    made.turn()
    assert not ranks.of(Flush)
    files.state = State(weights=Weights(0), starving=True)
    made.turn()
    made.turn()
    assert ranks.of(Flush) == [(holder, Flush())]


def test_a_foreman_forgets_the_attempt_before_and_tells_nothing_of_it() -> None:
    files, ranks = Files(State(weights=Weights(3)), offers=[offer(0, 3), offer(1, 3)]), Ranks()
    made = foreman(files, ranks)
    made.turn()
    files.state = State(attempt=1, weights=Weights(1, "other"))
    ranks.inbox.put((0, published("shards/0-w-rank-0/1.h5", 0, 3)))
    made.turn()
    made.turn()
    assert files.followed == [0, 1]
    assert not made.holders
    assert made.version == 1
    assert [message.attempt for _, message in ranks.of(Follow)] == [0, 0, 1, 1]
    ranks.inbox.put((1, published("shards/0-w-rank-1/1.h5", 1, 3)))
    made.turn()
    made.turn()
    assert not files.told


def test_a_foreman_gives_up_what_the_head_does_not_want_any_more() -> None:
    files, ranks = Files(State(weights=Weights(0)), offers=[offer(0), offer(1)]), Ranks()
    made = foreman(files, ranks)
    made.turn()
    files.given_up = [(1, 0), (7, 0)]
    made.turn()
    assert [message for _, message in ranks.of(Cancel)] == [Cancel(1, 0)]
    assert set(made.holders) == {(0, 0)}


@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        (State(outcome="finished"), "finished"),
        (State(weights=Weights(0), seconds_unchanged=11.0), "finished"),
        (None, "stopped"),
        (State(weights=Weights(0)), "stopped"),
    ],
)
def test_how_an_attached_world_ends(state: State | None, outcome: str) -> None:
    files, ranks, stop = Files(state), Ranks(), threading.Event()
    if outcome == "stopped":
        stop.set()
    assert foreman(files, ranks, stop).run() == outcome
    assert files.has_left
    assert ranks.of(StopRollout) == [(0, StopRollout(outcome)), (1, StopRollout(outcome))]


def test_a_run_that_never_begins_is_not_waited_for_without_end() -> None:
    files, ranks = Files(None), Ranks()
    made = foreman(files, ranks)
    made.parts.orphan_seconds = 0.1
    assert made.turn() == ""
    began = time.monotonic()
    assert made.run() == "finished"
    assert time.monotonic() - began < 15.0
    assert files.has_left


def test_a_shard_that_was_thrown_away_with_its_attempt_is_not_waited_for() -> None:
    files, ranks = Files(State(weights=Weights(0), starving=True), offers=[offer(0)]), Ranks()
    made = foreman(files, ranks)
    made.turn()
    ranks.inbox.put((0, Finished(0, 0)))
    made.turn()
    made.turn()
    assert len(ranks.of(Flush)) == 1, "the disk had no room: nothing is published"
    files.state, files.offers = State(attempt=1, weights=Weights(0, "other"), starving=True), [offer(1)]
    made.turn()
    ranks.inbox.put((made.holders[(1, 0)], Finished(1, 0)))
    made.turn()
    made.turn()
    assert len(ranks.of(Flush)) == 2


def test_what_is_done_is_published_before_a_world_leaves() -> None:
    files, ranks, stop = Files(State(weights=Weights(0)), offers=[offer(0)]), Ranks(), threading.Event()
    made = foreman(files, ranks, stop)
    made.turn()
    ((holder, _),) = ranks.of(Assign)
    ranks.inbox.put((holder, Finished(0, 0)))
    made.turn()
    stop.set()
    answer = threading.Timer(0.3, lambda: ranks.inbox.put((holder, published("shards/0-w-rank-0/1.h5", 0))))
    answer.start()
    assert made.run() == "stopped"
    assert [type(message) for message in files.told] == [Published]
    assert files.has_left


def test_a_world_whose_configuration_is_not_the_runs_ends() -> None:
    with pytest.raises(AttachedWorldError, match="another configuration"):
        foreman(Files(State(config_hash="other")), Ranks()).turn()


def test_a_version_that_does_not_load_is_tried_again_and_not_for_ever() -> None:
    files, ranks = Files(State(weights=Weights(0)), offers=[offer(0)]), Ranks(load_error="damaged")
    made = foreman(files, ranks)
    made.turn()
    assert not ranks.of(Assign), "nothing is sampled with weights that are not there"
    files.state = State(weights=Weights(1))
    for _ in range(4):
        made.turn()
    with pytest.raises(AttachedWorldError, match="version 1 did not load 5 times: rank 0: damaged"):
        made.turn()


def test_a_foreman_goes_on_without_an_engine_that_failed_and_loads_it_when_it_stands_again() -> None:
    files, ranks = Files(State(weights=Weights(2)), offers=[offer(n, 2) for n in range(9)]), Ranks()
    made = foreman(files, ranks)
    made.turn()
    assert files.claims == [(3, 2)]
    ranks.inbox.put((1, EngineFailed("planted", 1)))
    made.turn()
    held = {rank: len(load.held) for rank, load in made.loads.items()}
    for group in list(made.loads[0].held):
        ranks.inbox.put((0, published("shards/0-w-rank-0/1.h5", group[0])))
    made.turn()
    files.state = State(weights=Weights(3))
    made.turn()
    assert [to for to, m in ranks.of(PrepareWeights) if m.version == 3] == [0]
    assert made.loaded == (0, 3, "t")
    assert len(made.loads[1].held) == held[1], "they stay while it is built anew, and no new ones come"
    assert len(made.holders) <= 3 // 2 + held[1]
    ranks.inbox.put((1, EngineRestored()))
    made.turn()
    made.turn()
    assert [to for to, m in ranks.of(PrepareWeights) if m.version == 3] == [0, 1], "alone; the other one goes on"
    assert [to for to, m in ranks.of(LoadWeights) if m.version == 3] == [0, 1]
    for group in [*made.loads[0].held, *made.loads[1].held]:
        ranks.inbox.put((made.holders[group], published("shards/0-w-rank-0/2.h5", group[0])))
    made.turn()
    made.turn()
    assert made.loads[1].held, "it takes part again"


def test_a_rank_that_lends_its_device_hears_of_weights_and_of_the_end_alone() -> None:
    files, ranks = Files(State(weights=Weights(2)), offers=[offer(n, 2) for n in range(4)]), Ranks()
    made = foreman(files, ranks, followers={0: (1,)})
    made.turn()
    ranks.inbox.put((1, WeightsLoaded(2, 0.1)))
    made.turn()
    assert [type(message) for to, message in ranks.sent if to == 1] == [PrepareWeights, LoadWeights]
    assert made.loaded == (0, 2, "t")
    assert {to for to, _ in ranks.of(Assign)} == {0}
    files.state = State(weights=Weights(2), outcome="finished")
    assert made.run() == "finished"
    assert [to for to, _ in ranks.of(StopRollout)] == [0, 1]


def test_a_foreman_leaves_out_who_is_silent_and_not_for_ever() -> None:
    files, ranks = Files(State(weights=Weights(2)), offers=[offer(n, 2) for n in range(9)]), Ranks(silent={1})
    made = foreman(files, ranks, limit=0.1)
    made.turn()
    assert made.loaded == (0, 2, "t")
    assert {to for to, _ in ranks.of(Assign)} == {0}
    assert [to for to, _ in ranks.of(LoadWeights)] == [0]
    made.parts.away_seconds = 0.01
    time.sleep(0.02)
    with pytest.raises(AttachedWorldError, match=r"the engine of rank 1 is away .*waited 0\.1 s for engines to stop"):
        made.turn()
    made.parts.away_seconds = 20.0
    ranks.silent.clear()
    ranks.inbox.put((1, WeightsReady(2, 1)))
    made.turn()
    made.turn()
    assert [to for to, _ in ranks.of(LoadWeights)] == [0, 1]
