"""How a rollout rank comes to its engine: in its own process, or in a child process that the rank's nursery starts.

`prepare` runs before MPI does and starts the nursery where one will be used; `build_engine` may be called again and
again, since an engine that failed is built anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pekoe.pipeline.config.companions import TeacherConfig
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.registry import INFERENCE_ENGINES, resolve
from pekoe.pipeline.rollout.child.nursery import EngineNursery
from pekoe.pipeline.rollout.child.silence_watch import ChildLimits
from pekoe.pipeline.rollout.engine import EngineSettings, InferenceEngine, Instance
from pekoe.pipeline.rollout.engine_memory import ITEM_BYTES, cache_bytes_per_token, check_engine_memory
from pekoe.pipeline.rollout.teacher import Teacher
from pekoe.pipeline.train.vocabulary import check_same_vocabulary

if TYPE_CHECKING:
    from pekoe.pipeline.runs.context import RunContext

FORMS_GROUPS = ("vllm",)
"""Engines that form torch's default group, which on a colocated rank is the trainer's."""
EARLIER = 0.8
"""A child that does not answer is given up before the head gives up its rank."""
SILENCE_SECONDS = 60.0
PASS_TOKENS = 2048
"""Of a vllm teacher: the logits of one pass are in memory at once."""
BLOCK_TOKENS = 128
"""Largest block of a KV cache: a sequence takes whole ones."""
SMALL_SHARE = 0.05
"""Of the device's memory: vllm asks for no more before it has looked at the size of the cache that is given."""


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


def teacher_process(choice: str, engine: str) -> Literal["own", "child"]:
    """Where a teacher's engine runs: beside another one that forms groups there is no place in the rank's process."""
    return "child" if choice == "child" or engine in FORMS_GROUPS else "own"


def start_nursery(config: RunConfig, roles: tuple[str, ...], engine: str) -> EngineNursery | None:
    """Before MPI is initialised; None where no engine of this rank runs in a child."""
    if "rollout" not in roles:
        return None
    choice = config.rollout.engine_process
    processes = {engine_process(choice, engine, "trainer" in roles)}
    if has_teacher_engine(config):
        processes.add(teacher_process(choice, engine))
    return EngineNursery().start() if "child" in processes else None


def has_teacher_engine(config: RunConfig) -> bool:
    """Whether each rollout rank has a teacher beside its engine."""
    return config.teacher is not None and config.teacher.place == "engine"


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
    on_failure: Callable[[BaseException], None], limits: ChildLimits | None = None,
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
        context.nursery, name, settings, limits=limits or child_limits(config), on_failure=on_failure,
        bucket_bytes=config.weights.bucket_mib << 20,
    )  # fmt: skip


def build_teacher(context: RunContext) -> Teacher | None:
    """The teacher of this rank, on an engine of the same kind; None where the run has none here. ValueError when it has
    no room, or reads token ids otherwise than the policy does."""
    config = context.config
    if config.teacher is None or not has_teacher_engine(config):
        return None
    check_same_vocabulary(
        "teacher", config.teacher.path or config.actor.path, config.actor.path, context.tokenizer_path
    )
    assert context.ranks.rollout is not None
    name, settings = context.ranks.rollout.engine, teacher_settings(context, config.teacher)

    def make() -> InferenceEngine:
        with context.building:
            check_engine_memory(name, settings, key="teacher.place")
            if teacher_process(config.rollout.engine_process, name) == "child":
                limits = replace(child_limits(config), answer=EARLIER * config.cluster.progress_seconds)
                return build_child(context, name, settings, Instance(), _say_nothing, limits)
            engine: InferenceEngine = resolve(INFERENCE_ENGINES, name, "allocation").build(
                settings, Instance(), _say_nothing
            )
            return engine

    return Teacher(make, config.gconfig.temperature, settings.context_limit, config.rollout.max_engine_restarts)


def teacher_settings(context: RunContext, teacher: TeacherConfig) -> EngineSettings:
    """It decodes nothing: its cache holds the sequences of one group, and no pass has more than PASS_TOKENS, since the
    log-probs of all of them come from logits."""
    from pekoe.pipeline.runs.context import model_facts, sequence_limit

    config = context.config
    path, limit = teacher.path or config.actor.path, sequence_limit(config)
    settings = replace(
        engine_settings(context), path=path, dtype=teacher.dtype, context_limit=limit, sleeps=False,
        max_slots=min(config.gconfig.n_samples, config.rollout.max_slots),
    )  # fmt: skip
    token = cache_bytes_per_token(model_facts(path), ITEM_BYTES.get(teacher.dtype, 4))
    blocks = settings.max_slots * (limit + BLOCK_TOKENS) + BLOCK_TOKENS
    options = replace(
        config.vllm, kv_cache_gib=blocks * token / (1 << 30), gpu_memory_utilization=SMALL_SHARE, enforce_eager=True,
        enable_prefix_caching=False, max_loras=0,
        max_num_batched_tokens=min(config.vllm.max_num_batched_tokens or PASS_TOKENS, PASS_TOKENS),
    )  # fmt: skip
    return replace(settings, options=options)


def _say_nothing(error: BaseException) -> None:
    """Whoever asks the engine next hears of it."""


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
