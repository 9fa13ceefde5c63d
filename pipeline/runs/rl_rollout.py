"""A rollout rank of an RL run: builds the engine, the workflow and the executor around the rollout loop."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pekoe.pipeline.config.generation import GenerationConfig
from pekoe.pipeline.config.rollout import WorkflowConfig
from pekoe.pipeline.messages import Hello, Inbox
from pekoe.pipeline.registry import WEIGHT_TRANSPORTS, WORKFLOWS, resolve
from pekoe.pipeline.reward.pool import RewardFailure, RewardPool
from pekoe.pipeline.rollout.engine import InferenceEngine, Instance, SamplingParameters
from pekoe.pipeline.rollout.executor import EpisodeSource, Executor, ExecutorSettings
from pekoe.pipeline.rollout.rank_loop import INBOX_KINDS, RolloutLoop, RolloutParts
from pekoe.pipeline.rollout.restarting_engine import RestartingEngine
from pekoe.pipeline.rollout.teacher import Teacher
from pekoe.pipeline.rollout.workflow import Workflow, WorkflowContext
from pekoe.pipeline.runs.context import HEAD, RunContext, check_sequences, evaluation_limit, sequence_limit
from pekoe.pipeline.runs.engine_setup import build_engine, build_teacher
from pekoe.pipeline.runs.rl_trainer import transport_name
from pekoe.pipeline.runs.transports import shared_setup, transport_setup
from pekoe.pipeline.trajectory.hand_over import HandOver
from pekoe.pipeline.trajectory.schema import ShardAttributes
from pekoe.pipeline.trajectory.writer import ShardWriter
from pekoe.pipeline.weights.disk import DiskTransport
from pekoe.pipeline.weights.transport import WeightReceiver

logger = logging.getLogger(__name__)

EXECUTOR_STOP_SECONDS = 15.0
EPISODES_PER_SLOT = 4
"""Episodes under way for each slot of the engine: enough to refill it while others wait for rewards."""


def roll(context: RunContext, pool: RewardPool, instance: Instance) -> str:
    """The rollout thread of a rank that leads an engine, until StopRollout. Returns how the run ended."""
    config, world = context.config, context.world
    inbox = world.post.inbox(*INBOX_KINDS)
    set_phase = context.phase_of("rollout")
    set_phase("loading the engine")
    tokenizer = AutoTokenizer.from_pretrained(context.tokenizer_path)
    engine = restarting_engine(context, instance, inbox)
    receiver = build_receiver(context)
    hand_over = open_hand_over(context)
    loop = RolloutLoop(
        RolloutParts(
            post=world.post,
            inbox=inbox,
            head=HEAD,
            engine=engine,
            writer=open_writer(context, world.attempt),
            open_writer=lambda attempt: open_writer(context, attempt),
            weights=receiver,
            check_sequences=check_sequences(config),
            sampling=sampling_parameters(config.gconfig),
            max_tokens=config.actor.mb_spec.max_tokens_per_mb,
            set_phase=set_phase,
            set_version=world.set_version,
            hand_over=hand_over,
            update_mode=config.weights.update_mode,
        )
    )
    teacher = build_teacher(context)
    executor = build_executor(context, tokenizer, engine, pool, loop, teacher)
    context.add_gauges("engine", engine.gauges)
    context.add_gauges("executor", executor.gauges)
    context.add_gauges("reward", pool.gauges)
    if teacher is not None:
        context.add_gauges("teacher", teacher.gauges)
        context.watch("teacher", teacher.progress)
    context.watch("rollout", loop.progress)
    context.watch("executor", executor.progress)
    context.watch("engine", lambda: engine_progress(engine.gauges()))
    executor_ended = threading.Event()

    def run_executor() -> None:
        executor.run()
        executor_ended.set()

    world.start("executor", run_executor)
    world.post.send(HEAD, Hello("rollout", context.start.version))
    outcome = loop.run(executor)
    executor_ended.wait(EXECUTOR_STOP_SECONDS)
    if hand_over is not None:
        hand_over.close()
    receiver.close()
    if teacher is not None:
        teacher.close()
    engine.close()
    return outcome


def engine_progress(gauges: dict[str, float]) -> tuple[float, bool]:
    """(a counter that grows with every token, has sequences to decode and may)."""
    may_decode = gauges["running"] and gauges.get("serving", 1.0)
    return gauges["tokens"] + gauges.get("prefilled_tokens", 0.0), bool(may_decode)


def restarting_engine(context: RunContext, instance: Instance, inbox: Inbox) -> RestartingEngine:
    """The engine of this rank, built anew when it fails; the rank loop hears of that. One over several ranks cannot be
    replaced from here alone: its failure ends the attempt."""
    config, world = context.config, context.world

    def make(on_failure: Callable[[BaseException], None]) -> InferenceEngine:
        with context.building:
            return build_engine(context, instance, on_failure)

    is_alone = instance.size == 1
    return RestartingEngine(
        make,
        max_restarts=config.rollout.max_engine_restarts if is_alone else 0,
        limit="" if is_alone else f"one over {instance.size} ranks is not built anew within an attempt",
        tell=lambda message: inbox.put((world.rank, message)),
        fatal=lambda error: world.abort(error, "engine"),
    )


def build_workflow(config: WorkflowConfig, about: WorkflowContext) -> Workflow:
    """The workflow that is configured; ValueError names an argument that it does not have."""
    kind = resolve(WORKFLOWS, config.name, "workflow.name")
    try:
        inspect.signature(kind).bind(about, **config.args)
    except TypeError as error:
        raise ValueError(
            f"workflow.args: {config.args} is not allowed with workflow.name {config.name}: {error}; allowed: "
            f"{', '.join(list(inspect.signature(kind).parameters)[1:]) or 'none'}"
        ) from error
    built: Workflow = kind(about, **config.args)
    return built


def build_executor(
    context: RunContext,
    tokenizer: PreTrainedTokenizerBase,
    engine: InferenceEngine,
    pool: RewardPool,
    loop: RolloutLoop,
    teacher: Teacher | None,
) -> Executor:
    """Training and evaluation episodes differ in their examples and in how they are sampled."""
    config = context.config

    def workflow(sampling: GenerationConfig, limit: int) -> Workflow:
        about = WorkflowContext(tokenizer, sampling_parameters(sampling), pool, limit)
        return build_workflow(config.workflow, about)

    training, validation = context.data.training, context.data.validation
    evaluation = None
    if validation is not None:
        evaluation = EpisodeSource(
            workflow(config.eval_gconfig or config.gconfig, evaluation_limit(config)), validation.__getitem__
        )
    return Executor(
        ExecutorSettings(
            run_seed=config.seed,
            episode_seconds=config.rollout.episode_seconds,
            episode_retries=config.rollout.episode_retries,
            max_running_episodes=max(EPISODES_PER_SLOT * config.rollout.max_slots, config.gconfig.n_samples),
            fatal=(RewardFailure,),
        ),
        engine,
        EpisodeSource(workflow(config.gconfig, sequence_limit(config)), training.__getitem__),
        evaluation,
        loop,
        None if teacher is None else teacher.add_logprobs,
    )


def build_receiver(context: RunContext) -> WeightReceiver:
    """The end of the configured transport; attached worlds load from disk."""
    if context.attached:
        reader = f"{context.attached}-rank-{context.world.rank}"
        return DiskTransport.receiver(shared_setup(context, "rollout", reader))
    transport = resolve(WEIGHT_TRANSPORTS, transport_name(context), "actor.weight_update_mode")
    receiver: WeightReceiver = transport.receiver(transport_setup(context, "rollout"))
    return receiver


def open_writer(context: RunContext, attempt: int) -> ShardWriter:
    """This rank's own folder of shards in an attempt of the run."""
    rollout = context.config.rollout
    attributes = ShardAttributes(
        run=f"{context.config.experiment_name}/{context.config.trial_name}",
        attempt=attempt,
        writer=f"{context.attached}-rank-{context.world.rank}".lstrip("-"),
        temperature=context.config.gconfig.temperature,
    )
    return ShardWriter(
        context.run, attributes, max_groups=rollout.shard_max_groups, max_seconds=rollout.shard_max_seconds
    )


def open_hand_over(context: RunContext) -> HandOver | None:
    """On big worlds the first rank of each node that leads an engine writes for all of its node. Attached worlds are
    small."""
    world, leaders = context.world, context.ranks.rollout_leaders
    if context.attached or len(leaders) <= context.config.cluster.ranks_per_writer:
        return None
    writer = min(rank for rank in leaders if world.hosts[rank] == world.hosts[world.rank])
    return HandOver(context.run, world.attempt, world.job_id, world.rank, writer)


def sampling_parameters(config: GenerationConfig) -> SamplingParameters:
    return SamplingParameters(
        max_new_tokens=config.max_new_tokens,
        min_new_tokens=config.min_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        greedy=config.greedy,
        stop_token_ids=tuple(config.stop_token_ids),
        stop=tuple(config.stop),
        ignore_eos=config.ignore_eos,
        frequency_penalty=config.frequency_penalty,
        logit_bias=tuple(sorted(config.logit_bias.items())),
    )
