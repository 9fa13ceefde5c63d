"""How a rollout rank comes to its engine: in its own process, or in a child process that the rank's nursery starts.

`prepare` runs before MPI does and starts the nursery where one will be used; `build_engine` may be called again and
again, since an engine that failed is built anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.registry import INFERENCE_ENGINES, resolve
from pekoe.pipeline.rollout.child.nursery import EngineNursery
from pekoe.pipeline.rollout.child.silence_watch import ChildLimits
from pekoe.pipeline.rollout.engine import EngineSettings, InferenceEngine, Instance
from pekoe.pipeline.rollout.engine_memory import check_engine_memory

if TYPE_CHECKING:
    from pekoe.pipeline.runs.context import RunContext

FORMS_GROUPS = ("vllm",)
"""Engines that form torch's default group, which on a colocated rank is the trainer's."""
EARLIER = 0.8
"""A child that does not answer is given up before the head gives up its rank."""
SILENCE_SECONDS = 60.0


def engine_process(choice: str, engine: str, colocated: bool) -> Literal["own", "child"]:
    """Where the engine runs, by `rollout.engine_process`. ValueError for what cannot be."""
    forms_group = engine in FORMS_GROUPS
    if choice == "own" and colocated and forms_group:
        raise ValueError(
            f"rollout.engine_process: own, with a {engine} engine on the trainer's ranks, whose process group it would "
            "need for itself; allowed: auto, child"
        )
    if choice == "child" or (choice == "auto" and colocated and forms_group):
        return "child"
    return "own"


def start_nursery(config: RunConfig, roles: tuple[str, ...], engine: str) -> EngineNursery | None:
    """Before MPI is initialised; None where no engine of this rank runs in a child."""
    if "rollout" not in roles or engine_process(config.rollout.engine_process, engine, "trainer" in roles) == "own":
        return None
    return EngineNursery().start()


def build_engine(
    context: RunContext, instance: Instance, on_failure: Callable[[BaseException], None]
) -> InferenceEngine:
    """The configured inference engine. ValueError when it cannot be built as configured, or has no room."""
    assert context.ranks.rollout is not None
    name, settings = context.ranks.rollout.engine, engine_settings(context)
    is_colocated = "trainer" in context.ranks.roles_of(context.world.rank)
    if engine_process(context.config.rollout.engine_process, name, is_colocated) == "child":
        return build_child(context, name, settings, instance, on_failure)
    context.device.empty_cache()  # of an engine that failed before: free to torch, but taken to whoever measures
    check_engine_memory(name, settings, instance.size)
    engine: InferenceEngine = resolve(INFERENCE_ENGINES, name, "allocation").build(settings, instance, on_failure)
    return engine


def build_child(
    context: RunContext, name: str, settings: EngineSettings, instance: Instance,
    on_failure: Callable[[BaseException], None],
) -> InferenceEngine:  # fmt: skip
    """The engine in a process of its own."""
    from pekoe.pipeline.rollout.child.child_engine import ChildEngine

    if instance.size > 1:
        raise ValueError(
            f"rollout.engine_process: child, for a {name} engine over {instance.size} ranks; allowed: an engine of one "
            "rank (dimension d alone), or own on ranks apart from the trainer's"
        )
    assert context.nursery is not None, "`prepare` starts the nursery"
    config = context.config
    return ChildEngine(
        context.nursery, name, settings, limits=child_limits(config), on_failure=on_failure,
        bucket_bytes=config.weights.bucket_mib << 20,
    )  # fmt: skip


def child_limits(config: RunConfig) -> ChildLimits:
    """By the run's own time limits."""
    weights, cluster = config.weights, config.cluster
    return ChildLimits(
        start=cluster.setup_seconds,
        answer=EARLIER * weights.ready_seconds,
        drain=EARLIER * weights.drain_seconds,
        bucket=EARLIER * weights.bucket_seconds,
        silence=min(SILENCE_SECONDS, cluster.silence_seconds),
        progress=EARLIER * cluster.progress_seconds,
    )


def engine_settings(context: RunContext) -> EngineSettings:
    """What the engine of this rank is built from."""
    from pekoe.pipeline.runs.context import evaluation_limit, sequence_limit

    config = context.config
    return EngineSettings(
        path=config.rollout.path or config.actor.path,
        tokenizer_path=context.tokenizer_path,
        dtype=config.rollout.dtype,
        device=context.device.kind,
        device_index=context.device_index,
        max_slots=config.rollout.max_slots,
        context_limit=max(sequence_limit(config), evaluation_limit(config)),
        deterministic=config.rollout.deterministic,
        sleeps=context.ranks.colocated,
        options=config.vllm,
    )
