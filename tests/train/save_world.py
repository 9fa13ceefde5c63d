"""One rank of a small trainer world that saves while it trains, on disks that are slow or refuse.

usage: save_world.py FOLDER RANK SIZE SCENARIO...      as `fsdp_world.py`
"""

from __future__ import annotations

import errno
import logging
import queue
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import fsdp_world as world  # noqa: E402
from checkpoint_process import LocalPost, start_thread  # noqa: E402

from pekoe.pipeline import files  # noqa: E402
from pekoe.pipeline.config.run import RunConfig  # noqa: E402
from pekoe.pipeline.messages import RollCall, Save, StopTrainer  # noqa: E402
from pekoe.pipeline.runs.step_setup import build_step  # noqa: E402
from pekoe.pipeline.train.checkpoint import ENGINE  # noqa: E402
from pekoe.pipeline.train.companions import Companions  # noqa: E402
from pekoe.pipeline.train.head_orders import HeadOrders, OrderParts  # noqa: E402
from pekoe.pipeline.train.learner import Learner, LearnerParts  # noqa: E402

GROUP_SECONDS = 6.0
SLOW_SECONDS = 9.0


class Slow(files.Disk):
    """Files are made `seconds` late; keeps who was at work when."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.events: list[tuple[float, str, str]] = []

    def create(self, path):
        self.events.append((time.monotonic(), "create", str(path)))
        time.sleep(self.seconds)
        return super().create(path)

    def sync_folder(self, folder):
        super().sync_folder(folder)
        self.events.append((time.monotonic(), "sync_folder", str(folder)))


class Refusing(files.Disk):
    """Raises at the `countdown`-th call of an operation (0: never)."""

    def __init__(self, operation: str, error: BaseException, countdown: int = 1) -> None:
        self.operation, self.error, self.countdown = operation, error, countdown
        for name in ("create", "write", "sync", "rename", "make_folder", "sync_folder"):
            setattr(self, name, self._guarded(name, getattr(super(), name)))

    def _guarded(self, name, real):
        def call(*arguments):
            if name == self.operation:
                self.countdown -= 1
                if self.countdown == 0:
                    raise self.error
            return real(*arguments)

        return call


def full(code=errno.ENOSPC):
    return OSError(code, "planted")


def state_of(engine):
    """Every parameter and moment, whole."""
    found = {"w." + name: p.full_tensor().clone() for name, p in engine.model.named_parameters()}
    names = {parameter: name for name, parameter in engine.model.named_parameters()}
    for parameter, state in engine.optimizer.state.items():
        for key, value in state.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{key}.{names[parameter]}"] = whole.clone()
    return found


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def in_thread(work):
    """(thread, what it gave or raised)."""
    outcome = []

    def run():
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def scenario_beside(folder, rank, size):
    """The first rank's disk takes much longer than the trainer group's collectives may; all train on."""
    engine = world.build(world.actor(folder, lr=1e-3))
    world.train(engine)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=GROUP_SECONDS), dist.group.WORLD)
    found = {"equal": [], "steps": [], "pointers": []}
    target = folder / f"beside-{size}"
    for number in range(2):
        expected = state_of(engine)
        files.disk = Slow(SLOW_SECONDS if rank == 0 and number == 0 else 0.0)
        staged = engine.stage()
        found["pointers"].append([b.data_ptr() for b in engine._host_copy._buffers.values()])
        thread, outcome = in_thread(lambda staged=staged, number=number: staged.write(target / str(number)))
        refused = None
        if number == 0:
            try:
                engine.stage()
            except AssertionError as error:
                refused = str(error)
        steps = 0
        while True:
            over = torch.tensor([float(not thread.is_alive())])
            dist.all_reduce(over)
            if over == size:
                break
            world.train(engine)
            steps += 1
        thread.join()
        files.disk = files.Disk()
        assert isinstance(outcome[0], tuple), outcome
        found["steps"].append(steps)
        found.setdefault("refused", refused)
        moved = not equal(expected, state_of(engine))
        other = world.build(world.actor(folder, lr=1e-3))
        other.load(target / str(number))
        found["equal"].append((moved, equal(expected, state_of(other))))
    told = [None] * size
    dist.all_gather_object(told, {**found, "files": outcome[0]})
    return {"told": told, "bytes": engine._host_copy.num_bytes}


REFUSALS = {
    "create": (1, "create", full(), 1),
    "first write": (1, "write", full(), 1),
    "write inside a tensor": (1, "write", full(errno.EDQUOT), 9),
    "sync": (1, "sync", OSError(errno.EIO, "planted"), 1),
    "metadata": (0, "rename", full(), 1),
    "bug": (1, "write", KeyError("planted"), 3),
}


def scenario_refused(folder, rank, size):
    """Whatever one rank's disk refuses, all ranks hear of it, and the next save works."""
    engine = world.build(world.actor(folder, lr=1e-3))
    world.train(engine)
    found = {}
    for name, (where, operation, error, countdown) in REFUSALS.items():
        target = folder / f"refused-{name}"
        if rank == where:
            files.disk = Refusing(operation, error, countdown)
        outcome = None
        try:
            engine.stage().write(target / "engine")
        except Exception as failure:
            outcome = (type(failure).__name__, getattr(failure, "errno", None), str(failure))
        files.disk = files.Disk()
        told = [None] * size
        dist.all_gather_object(told, outcome)
        found[name] = told
    expected = state_of(engine)
    engine.stage().write(folder / "after-refusals")
    other = world.build(world.actor(folder, lr=1e-3))
    other.load(folder / "after-refusals")
    return {**found, "after": equal(expected, state_of(other))}


def vocabulary_of_seven():
    world.trajectories = lambda vocab=7, original=world.trajectories: original(vocab)


def seven_steps(engine, steps):
    rates = []
    for step in steps:
        engine.set_progress(step / 10)
        stats, _ = world.train(engine)
        rates.append((stats["lr"], stats["loss"]))
    return rates


def seven_actor(folder):
    config = world.actor(folder, "seven", lr=1e-3)
    config.optimizer.warmup_steps_proportion = 0.4
    config.optimizer.lr_scheduler_type = "cosine"
    return config


def scenario_seven(folder, rank, size):
    """Ten steps of a model with a vocabulary of 7, saved after five."""
    vocabulary_of_seven()
    engine = world.build(seven_actor(folder))
    rates = seven_steps(engine, range(5))
    engine.stage().write(folder / f"seven-{size}")
    saved = state_of(engine)
    rates += seven_steps(engine, range(5, 10))
    return {"saved": saved, "rates": rates, "final": state_of(engine)}


def scenario_seven_resumed(folder, rank, size):
    """The last five of them, from what worlds of other sizes saved."""
    vocabulary_of_seven()
    found = {}
    for source in (1, 2, 4):
        if (folder / f"seven-{source}").is_dir():
            engine = world.build(seven_actor(folder))
            engine.load(folder / f"seven-{source}")
            loaded = state_of(engine)
            rates = seven_steps(engine, range(5, 10))
            found[source] = {"loaded": loaded, "rates": rates, "final": state_of(engine)}
    return found


def learner(engine, folder, asynchronous, thread, more=None):
    """A real learner on this rank's engine (and `more` that are saved); its post is its own."""
    config, post = RunConfig(), LocalPost()
    inbox = queue.SimpleQueue()
    orders = HeadOrders(
        OrderParts(
            post=post, inbox=inbox, head=0, engine=engine, saved={ENGINE: engine, **(more or {})},
            checkpoint_folder=lambda version: folder / f"v{version}", other_files=lambda: {"rng-0": b"numbers"},
            start_thread=thread, export_folder=lambda path: folder / path, set_phase=lambda *_, **__: None,
            asynchronous=asynchronous,
        )
    )  # fmt: skip
    parts = LearnerParts(
        orders=orders, read_rows=lambda keys: [],
        step=build_step(config, engine, Companions(), 10, torch.device("cpu")),
        transfer_error=RuntimeError, send_weights=lambda *_: None, share_weights=lambda *_: "token", check_sequences=[],
        set_version=lambda version: None,
    )  # fmt: skip
    return Learner(config, parts, 0), inbox, post


def run_learner(engine, folder, messages, asynchronous=True, thread=start_thread, more=None):
    """(what it told the head, in order)."""
    made, inbox, post = learner(engine, folder, asynchronous, thread, more)
    for message in messages:
        inbox.put((0, message))
    assert made.run() == "over"
    told = []
    while not post.box.empty():
        told.append(post.box.get()[1])
    return told


def scenario_first(folder, rank, size):
    """Two updates: undisturbed, with a save before the first one, and by an engine that loaded that save."""
    config = world.actor(folder, lr=1e-3)
    found = {}
    for name in ("undisturbed", "saved", "loaded"):
        engine = world.build(config)
        if name == "saved":
            engine.stage().write(folder / f"first-{size}")
        if name == "loaded":
            engine.load(folder / f"first-{size}")
        for _ in range(2):
            world.train(engine)
        found[name] = world.weights(engine)
        engine.close()
    return found


def scenario_learner(folder, rank, size):
    """Two saves one step apart with a slow writer; one that is refused; one that meets a bug; and without a thread."""
    logging.disable(logging.CRITICAL)
    engine = world.build(world.actor(folder, lr=1e-3))
    world.train(engine)
    over = StopTrainer("over")
    files.disk = slow = Slow(0.4)
    messages = [Save(1), RollCall(1), Save(2), RollCall(2), over]
    found = {"two": run_learner(engine, folder / "two", messages), "events": list(slow.events)}
    slow.events.clear()
    found["at once"] = run_learner(engine, folder / "at once", [Save(1), RollCall(1), over], asynchronous=False)
    files.disk = Refusing("write", full(), 4)
    critic = {"critic": world.build(world.actor(folder))}
    found["full"] = run_learner(engine, folder / "full", [Save(1), RollCall(1), Save(2), over], more=critic)
    found["broken"] = broken(engine, folder / "broken")
    return found


def broken(engine, folder):
    """A saver that meets a bug raises in its thread, and tells the head nothing; the learner never comes home."""
    files.disk = Refusing("write", KeyError("planted"), 4)
    raised = queue.SimpleQueue()

    def thread(name, target):
        def work():
            try:
                target()
            except BaseException as error:
                raised.put((name, type(error).__name__))

        start_thread(name, work)

    made, inbox, post = learner(engine, folder, True, thread)
    for message in (Save(1), StopTrainer("over")):
        inbox.put((0, message))
    threading.Thread(target=made.run, daemon=True).start()
    found = raised.get(timeout=60)
    time.sleep(0.2)
    return (*found, post.box.empty(), made.orders.saver.is_busy)


if __name__ == "__main__":
    world.__dict__.update({name: value for name, value in globals().items() if name.startswith("scenario_")})
    world.run_as_program()
