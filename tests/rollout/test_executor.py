from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from pekoe.pipeline.messages import Assign, AssignEvaluation, Evaluated, Rejected
from pekoe.pipeline.records import Example, Finish, Group, Trajectory, sampling_seed
from pekoe.pipeline.rollout.engine import GenerationRequest, Response, SamplingParameters
from pekoe.pipeline.rollout.episode import BoundEngine, EpisodeIdentity
from pekoe.pipeline.rollout.executor import EpisodeSource, Executor, ExecutorSettings
from pekoe.pipeline.rollout.workflow import EpisodeEngine, RejectEpisode
from pekoe.pipeline.rollout.workflows.rlvr_workflow import single_turn

RUN_SEED = 7


class SeededEngine:
    """Decodes a token a turn of the loop; the completion is a function of (prompt, seed). Counts slots."""

    def __init__(self) -> None:
        self.version = 3
        self.requests: list[GenerationRequest] = []
        self.num_running = 0
        self.most_running = 0
        self.num_cancelled = 0

    async def generate(self, request: GenerationRequest) -> Response:
        self.requests.append(request)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        random = np.random.default_rng([request.seed, *request.tokens])
        tokens: list[int] = []
        try:
            while self.version < request.min_version:
                await asyncio.sleep(0.001)
            for _ in range(1 + int(random.integers(request.sampling.max_new_tokens))):
                tokens.append(int(random.integers(100)))
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        count = len(tokens)
        return Response(
            np.array(tokens, np.int32),
            np.full(count, -0.5, np.float32),
            np.full(count, self.version, np.int32),
            Finish.LENGTH if count == request.sampling.max_new_tokens else Finish.STOP,
        )


class Events:
    """An outlet that remembers."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Group | Rejected | Evaluated] = queue.SimpleQueue()
        self.on_group = self.on_rejected = self.on_evaluated = self.queue.put

    def take(self) -> Any:
        return self.queue.get(timeout=60)

    def is_empty(self) -> bool:
        return self.queue.empty()


Episode = Callable[[EpisodeEngine, Example], Any]


class Scripted:
    """A workflow that is an async function."""

    def __init__(self, episode: Episode) -> None:
        self.arun_episode = episode


async def sample_once(engine: EpisodeEngine, example: Example, max_new_tokens: int = 6) -> Trajectory:
    prompt = [1, 2, example.index + 3]
    sampling = SamplingParameters(max_new_tokens=max_new_tokens)
    response = await engine.generate(GenerationRequest(tuple(prompt), sampling))
    return single_turn(prompt, response, float(response.tokens[0]))


def example_at(index: int) -> Example:
    if index >= 1000:
        raise IndexError(f"example {index} of 1000")
    return Example(index, f"row/{index}", ({"role": "user", "content": "?"},), {})


class Rig:
    def __init__(self, episode: Episode, **settings: Any) -> None:
        self.engine = SeededEngine()
        self.events = Events()
        self.error: BaseException | None = None
        values = {"episode_seconds": 10.0, "episode_retries": 1, "max_running_episodes": 64, **settings}
        source = EpisodeSource(Scripted(episode), example_at)
        self.executor = Executor(
            ExecutorSettings(run_seed=RUN_SEED, **values), self.engine, source, source, self.events
        )
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        try:
            self.executor.run()
        except BaseException as error:
            self.error = error


@contextmanager
def rig(episode: Episode = sample_once, **settings: Any) -> Iterator[Rig]:
    one = Rig(episode, **settings)
    one.thread.start()
    yield one
    one.executor.stop()
    one.thread.join(60)
    assert not one.thread.is_alive()


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_group_holds_its_samples_in_order_with_their_seeds() -> None:
    with rig() as one:
        one.executor.submit(Assign(5, 2, 9, 4, 1))
        group = one.events.take()
        requests = one.engine.requests
    assert (group.number, group.try_number, group.example) == (5, 2, "row/9")
    assert [t.sample for t in group.trajectories] == [0, 1, 2, 3]
    assert [t.seed for t in group.trajectories] == [sampling_seed(RUN_SEED, 5, 2, sample) for sample in range(4)]
    assert {(r.group, r.group_size, r.min_version) for r in requests} == {(5, 4, 1)}
    assert sorted((r.sample, r.seed) for r in requests) == [(t.sample, t.seed) for t in group.trajectories]
    assert one.executor.gauges() == {
        "episodes": 0.0, "groups_waiting": 0.0, "oldest_seconds": 0.0, "done": 1.0, "failed": 0.0,
    }  # fmt: skip


def test_the_same_assignment_gives_the_same_tokens_whatever_runs_beside_it() -> None:
    def tokens_of(*numbers: int) -> dict[int, list[list[int]]]:
        with rig(max_running_episodes=8) as one:
            for number in numbers:
                one.executor.submit(Assign(number, 0, number, 3, 0))
            groups = [one.events.take() for _ in numbers]
        return {g.number: [t.tokens.tolist() for t in g.trajectories] for g in groups}

    alone, together = tokens_of(4), tokens_of(9, 4, 7, 1)
    assert alone[4] == together[4]
    assert len({str(rows) for rows in together.values()}) == 4


def test_each_call_of_an_episode_has_its_own_seed_and_a_retry_has_the_same() -> None:
    failures = {"left": 1}

    async def two_calls(engine: EpisodeEngine, example: Example) -> list[Trajectory]:
        first, second = await sample_once(engine, example), await sample_once(engine, example)
        if failures["left"]:
            failures["left"] -= 1
            raise ConnectionError("the tool is away")
        return [first, second]

    with rig(two_calls) as one:
        one.executor.submit(Assign(1, 0, 0, 1, 0))
        group = one.events.take()
    expected = [sampling_seed(RUN_SEED, 1, 0, 0, call) for call in (0, 1)]
    assert [r.seed for r in one.engine.requests] == expected * 2
    assert [t.sample for t in group.trajectories] == [0, 0]


def test_a_minimum_version_of_the_workflow_is_kept_when_it_is_stricter() -> None:
    identity = EpisodeIdentity(1, 2, 2, 0, 0, 1, 2)
    engine = SeededEngine()

    async def ask() -> None:
        for version in (0, 3):
            await BoundEngine(engine, identity).generate(GenerationRequest((1,), min_version=version))

    asyncio.run(ask())
    assert [r.min_version for r in engine.requests] == [2, 3]


def test_an_episode_that_always_raises_rejects_its_group_with_the_traceback() -> None:
    tries: list[int] = []

    async def broken(engine: EpisodeEngine, example: Example) -> Trajectory:
        tries.append(1)
        raise KeyError("no such tool")

    with rig(broken, episode_retries=2) as one:
        one.executor.submit(Assign(1, 0, 5, 1, 0))
        rejected = one.events.take()
    assert isinstance(rejected, Rejected)
    assert (rejected.group, rejected.reason, len(tries)) == (1, "error", 3)
    assert "row/5, sample 0" in rejected.detail
    assert "no such tool" in rejected.detail
    assert "in broken" in rejected.detail
    assert len(rejected.detail) <= 3000


def test_one_lost_episode_rejects_the_group_and_frees_the_slots_of_the_others() -> None:
    calls = itertools.count()

    async def one_of_four(engine: EpisodeEngine, example: Example) -> Trajectory | None:
        if next(calls) == 2:
            await sample_once(engine, example)
            return None
        return await sample_once(engine, example, max_new_tokens=10**9)

    with rig(one_of_four) as one:
        one.executor.submit(Assign(1, 0, 0, 4, 0))
        rejected = one.events.take()
        assert (rejected.reason, rejected.detail) == ("none", "the workflow returned no trajectory")
        assert eventually(lambda: one.engine.num_running == 0)
        one.executor.submit(Assign(2, 0, 0, 1, 0))
        assert eventually(lambda: one.engine.num_running == 1), "the executor stopped working after a rejection"
        assert one.events.is_empty()


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_every_assignment_ends_in_exactly_one_word(share: float) -> None:
    async def filtering(engine: EpisodeEngine, example: Example) -> Trajectory | None:
        trajectory = await sample_once(engine, example)
        return None if example.index % 4 < 4 * share else trajectory

    with rig(filtering, max_running_episodes=10) as one:
        for number in range(40):
            one.executor.submit(Assign(number, 0, number, 3, 0))
        ends = [one.events.take() for _ in range(40)]
        assert one.events.is_empty()
    numbers = [end.number if isinstance(end, Group) else end.group for end in ends]
    assert sorted(numbers) == list(range(40))
    assert sum(isinstance(end, Rejected) for end in ends) == 40 * share
    assert one.executor.gauges()["failed"] == 40 * share


def test_a_workflow_names_its_own_reason_and_is_not_tried_again() -> None:
    tries: list[int] = []

    async def too_long(engine: EpisodeEngine, example: Example) -> Trajectory:
        tries.append(1)
        raise RejectEpisode("too_long", "600 tokens")

    with rig(too_long, episode_retries=5) as one:
        one.executor.submit(Assign(1, 0, 0, 1, 0))
        rejected = one.events.take()
    assert (rejected.reason, rejected.detail, len(tries)) == ("too_long", "600 tokens", 1)


def test_an_episode_that_never_ends_is_cancelled_in_time_and_says_where_it_was() -> None:
    async def endless(engine: EpisodeEngine, example: Example) -> Trajectory:
        return await sample_once(engine, example, max_new_tokens=10**9)

    with rig(endless, episode_seconds=0.3, episode_retries=3) as one:
        one.executor.submit(Assign(1, 0, 0, 2, 0))
        rejected = one.events.take()
        assert eventually(lambda: one.engine.num_running == 0)
    assert rejected.reason == "timeout"
    assert "over 0.3 s" in rejected.detail
    assert "SeededEngine.generate" in rejected.detail
    assert one.engine.num_cancelled == 2


def test_a_workflow_that_swallows_its_cancellation_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pekoe.pipeline.rollout.episode.CANCEL_SECONDS", 0.2)

    async def stubborn(engine: EpisodeEngine, example: Example) -> Trajectory:
        while example.index == 0:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue
        return await sample_once(engine, example)

    with rig(stubborn, episode_seconds=0.2, max_running_episodes=1) as one:
        one.executor.submit(Assign(1, 0, 0, 1, 0))
        one.executor.submit(Assign(2, 0, 1, 1, 0))
        assert one.events.take().reason == "timeout"
        assert one.events.take().number == 2


def test_a_workflow_that_cancels_itself_is_an_error_not_a_silence() -> None:
    async def suicidal(engine: EpisodeEngine, example: Example) -> Trajectory:
        raise asyncio.CancelledError

    with rig(suicidal) as one:
        one.executor.submit(Assign(1, 0, 0, 1, 0))
        rejected = one.events.take()
    assert rejected.reason == "error"
    assert "cancelled from inside" in rejected.detail


def test_wrong_trajectories_are_errors() -> None:
    async def wrong(engine: EpisodeEngine, example: Example) -> Trajectory:
        trajectory = await sample_once(engine, example)
        trajectory.logprobs = trajectory.logprobs[1:]
        return trajectory

    with rig(wrong) as one:
        one.executor.submit(Assign(1, 0, 0, 1, 0))
        rejected = one.events.take()
    assert rejected.reason == "error"
    assert "logprobs has" in rejected.detail


def test_an_example_that_cannot_be_had_rejects_its_group() -> None:
    with rig() as one:
        one.executor.submit(Assign(1, 0, 1000, 2, 0))
        rejected = one.events.take()
        one.executor.evaluate(AssignEvaluation(0, 1000, 2))
        assert one.events.take().rewards == ()
    assert rejected.reason == "error"
    assert "example 1000 of 1000" in rejected.detail


def test_cancelled_groups_say_nothing_and_free_their_slots() -> None:
    async def endless(engine: EpisodeEngine, example: Example) -> Trajectory:
        return await sample_once(engine, example, max_new_tokens=10**9 if example.index < 2 else 3)

    with rig(endless, max_running_episodes=4) as one:
        for number in range(3):
            one.executor.submit(Assign(number, 1, number, 4, 0))
        assert eventually(lambda: one.engine.num_running == 4)
        assert eventually(lambda: one.executor.gauges()["groups_waiting"] == 2)
        one.executor.cancel(1, 1)
        one.executor.cancel(0, 0)
        one.executor.cancel(99, 1)
        time.sleep(0.1)
        assert one.engine.num_running == 4
        one.executor.cancel(0, 1)
        assert one.events.take().number == 2
        assert one.events.is_empty()
    assert one.engine.num_cancelled == 4


def test_episodes_are_bounded_by_whole_groups() -> None:
    with rig(max_running_episodes=10) as one:
        for number in range(30):
            one.executor.submit(Assign(number, 0, number, 4, 0))
        for _ in range(30):
            one.events.take()
        assert one.engine.most_running == 8
        one.executor.submit(Assign(99, 0, 0, 25, 0))
        assert len(one.events.take().trajectories) == 25


def test_evaluations_have_their_own_places_and_repeat_themselves() -> None:
    async def training_is_stuck(engine: EpisodeEngine, example: Example) -> Trajectory:
        return await sample_once(engine, example, max_new_tokens=10**9 if example.index == 0 else 50)

    with rig(training_is_stuck, max_running_episodes=1) as one:
        one.executor.submit(Assign(1, 0, 0, 1, 0))
        for evaluation in (2, 2, 3):
            one.executor.evaluate(AssignEvaluation(evaluation, 8, 3))
        results = [one.events.take() for _ in range(3)]
    assert [(r.evaluation, r.example) for r in results] == [(2, 8), (2, 8), (3, 8)]
    assert results[0] == results[1]
    assert results[0].rewards == results[2].rewards
    assert (results[0].min_version, results[0].max_version) == (3, 3)
    requests = [r for r in one.engine.requests if r.group < 0]
    assert {r.min_version for r in requests} == {2, 3}
    assert len({r.group for r in requests}) == 2
    assert [r.seed for r in requests[:3]] == [r.seed for r in requests[6:]]


def test_lost_evaluation_samples_are_left_out() -> None:
    calls = itertools.count()

    async def sometimes(engine: EpisodeEngine, example: Example) -> Trajectory:
        if next(calls) == 1:
            raise ConnectionError("away")
        return await sample_once(engine, example)

    with rig(sometimes, episode_retries=0) as one:
        one.executor.evaluate(AssignEvaluation(0, 4, 3))
        result = one.events.take()
    assert len(result.rewards) == len(result.lengths) == len(result.truncated) == 2
    assert one.executor.gauges()["failed"] == 0


class BrokenRunError(Exception):
    pass


def test_a_fatal_error_ends_the_run_at_once() -> None:
    async def fatal(engine: EpisodeEngine, example: Example) -> Trajectory:
        raise BrokenRunError("most reward calls fail")

    with rig(fatal, fatal=(BrokenRunError,), episode_retries=5) as one:
        one.executor.submit(Assign(1, 0, 0, 3, 0))
        one.thread.join(60)
        assert isinstance(one.error, BrokenRunError)
        one.executor.submit(Assign(2, 0, 0, 3, 0))
    assert one.events.is_empty()


def test_a_failing_outlet_ends_the_run() -> None:
    with rig() as one:

        def full(_: object) -> None:
            raise OSError("no space left on device")

        one.events.on_group = full
        one.executor.submit(Assign(1, 0, 0, 1, 0))
        one.thread.join(60)
    assert isinstance(one.error, OSError)


def test_stop_cancels_what_runs_and_what_waits() -> None:
    async def endless(engine: EpisodeEngine, example: Example) -> Trajectory:
        return await sample_once(engine, example, max_new_tokens=10**9)

    with rig(endless, max_running_episodes=2) as one:
        for number in range(5):
            one.executor.submit(Assign(number, 0, 0, 2, 0))
        assert eventually(lambda: one.engine.num_running == 2)
        one.executor.stop()
        one.thread.join(90)
        assert not one.thread.is_alive()
    assert one.error is None
    assert one.engine.num_running == 0
    assert one.events.is_empty()


def test_work_given_before_the_start_is_done() -> None:
    one = Rig(sample_once)
    one.executor.submit(Assign(1, 0, 0, 1, 0))
    one.thread.start()
    assert one.events.take().number == 1
    one.executor.stop()
    one.thread.join(60)
    assert not one.thread.is_alive()


def test_evaluation_without_validation_data_is_refused() -> None:
    settings = ExecutorSettings(1, 1.0, 0, 1)
    executor = Executor(settings, SeededEngine(), EpisodeSource(Scripted(sample_once), example_at), None, Events())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="valid_dataset"):
        executor.evaluate(AssignEvaluation(0, 0, 1))


@pytest.mark.parametrize(("drop_equal", "is_equal"), [(True, True), (True, False), (False, True)])
def test_a_group_with_equal_rewards_is_rejected_only_where_the_head_says_so(drop_equal: bool, is_equal: bool) -> None:
    async def episode(engine: EpisodeEngine, example: Example) -> Trajectory:
        trajectory = await sample_once(engine, example)
        trajectory.reward = 1.0 if is_equal else trajectory.reward + len(trajectory.tokens)
        return trajectory

    with rig(episode) as one:
        one.executor.submit(Assign(5, 2, 9, 4, 1, drop_equal))
        outcome = one.events.take()
    if drop_equal and is_equal:
        assert outcome == Rejected(5, 2, "equal_rewards")
    else:
        assert len(outcome.trajectories) == 4
