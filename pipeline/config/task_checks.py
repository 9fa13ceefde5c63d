"""What the tasks ask of the keys, and the models beside the policy: critic, teacher, reward model."""

from __future__ import annotations

from collections.abc import Callable

from pekoe.pipeline.config.companions import RewardModelConfig
from pekoe.pipeline.config.findings import Findings, PlacementFacts
from pekoe.pipeline.config.optimizer import OptimizerConfig
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.tasks import has_policy_loss, is_supervised, sides


def _check_optimizers(config: RunConfig, findings: Findings) -> None:
    optimizers: list[tuple[str, OptimizerConfig]] = [("actor", config.actor.optimizer)]
    if config.critic is not None:
        optimizers.append(("critic", config.critic.optimizer))
    for section, optimizer in optimizers:
        for name in ("beta1", "beta2"):
            value = getattr(optimizer, name)
            if value >= 1:
                findings.wrong(f"{section}.optimizer.{name}", value, "is not allowed; allowed: < 1")


def _check_unused(config: RunConfig, findings: Findings) -> None:
    """A model that nothing asks would only take memory."""
    task = config.task
    used = {
        "critic": has_policy_loss(config),
        "teacher": not is_supervised(config),
        "reward_model": has_policy_loss(config),
        "ref": task == "dpo" or not is_supervised(config),
    }
    for section, needed in used.items():
        if getattr(config, section) is not None and not needed:
            alone = "" if is_supervised(config) else " with teacher.rl_loss_weight 0 (distillation alone)"
            findings.wrong(
                f"{section}.path",
                getattr(config, section).path,
                f"has no use in task {task}{alone}; allowed: {section}: null",
            )
    if is_supervised(config) and config.algorithm is not None:
        findings.warn("algorithm", config.algorithm, f"has no effect in task {task}")


def _check_critic(config: RunConfig, findings: Findings) -> None:
    critic, steps = config.critic, config.total_train_steps
    if critic is None and config.algorithm == "ppo" and config.actor.advantage_estimator == "gae":
        findings.warn("critic", None, "leaves algorithm ppo without its baseline: discounted rewards, normalised")
    if critic is not None and steps is not None and critic.warmup_steps >= steps:
        findings.warn(
            "critic.warmup_steps", critic.warmup_steps, f"leaves no step to the policy (total_train_steps {steps})"
        )


def _check_teacher(config: RunConfig, findings: Findings) -> None:
    teacher = config.teacher
    if is_supervised(config):
        return
    if teacher is None:
        if config.task == "distill":
            findings.wrong(
                "teacher", None, "is not allowed in task distill; allowed: a section with the teacher's path"
            )
        return
    if config.task == "rl" and teacher.rl_loss_weight == 0:
        findings.wrong(
            "teacher.rl_loss_weight", teacher.rl_loss_weight, "leaves rewards out of task rl; allowed: > 0, or task "
            "distill",
        )  # fmt: skip
    if not teacher.path or teacher.path == config.actor.path:
        findings.warn("teacher.path", teacher.path, "is the policy at its start: there is nothing to learn from it")
    if not has_policy_loss(config):
        if config.rollout.dynamic_sampling:
            findings.wrong(
                "rollout.dynamic_sampling", True, "is not allowed with teacher.rl_loss_weight 0: it drops groups of "
                "equal rewards, from which the policy learns as well; allowed: rollout.dynamic_sampling=false "
                "(algorithm dapo turns it on), or teacher.rl_loss_weight > 0",
            )  # fmt: skip
        for key, value in (
            ("actor.entropy_coef", config.actor.entropy_coef),
            ("actor.kl_ctl", config.actor.kl_ctl),
            ("actor.kl_loss_coef", config.actor.kl_loss_coef),
        ):
            if value:
                findings.warn(
                    key, value, "has no use with teacher.rl_loss_weight 0: the policy learns from the teacher alone"
                )


def _check_reward_model(config: RunConfig, findings: Findings) -> None:
    model = config.reward_model
    if model is None:
        return
    if not model.path:
        check_scalar_head(model, True, findings)
    if model.weight == 0:
        findings.warn("reward_model.weight", model.weight, "has no effect: its scores are not added")


def check_scalar_head(model: RewardModelConfig, lacks_head: bool, findings: Findings) -> None:
    """The score of kind scalar comes from a head, which `model.path` has not when it `lacks_head`."""
    if model.kind == "scalar" and lacks_head:
        findings.wrong(
            "reward_model.path", model.path, "has no trained head: kind scalar needs a model that task rw has made; "
            "allowed: its folder, or reward_model.kind: generative",
        )  # fmt: skip


def _check_supervised(config: RunConfig, findings: Findings) -> None:
    if not is_supervised(config):
        return
    spec, pair = config.actor.mb_spec, sides(config) == 2
    if spec.granularity not in (1, sides(config)):
        findings.wrong(
            "actor.mb_spec.granularity", spec.granularity, f"is not allowed in task {config.task}; allowed: 1"
            + (" or 2 (pairs stay together in any case)" if pair else ""),
        )  # fmt: skip
    if spec.max_sequences_per_mb is not None and spec.max_sequences_per_mb < sides(config):
        findings.wrong(
            "actor.mb_spec.max_sequences_per_mb", spec.max_sequences_per_mb,
            f"holds no pair of task {config.task}; allowed: >= 2, or null",
        )  # fmt: skip
    for name in ("ppo_n_minibatches", "ppo_epochs"):
        value = getattr(config.actor, name)
        if value > 1:
            findings.warn(
                f"actor.{name}", value, f"has no effect in task {config.task}: a step is one update on "
                "train_dataset.batch_size examples, total_train_epochs are the passes over all of them",
            )  # fmt: skip


def check_task_placement(config: RunConfig, placement: PlacementFacts, findings: Findings) -> None:
    """Ranks that a task needs, and those that it has no use for."""
    if is_supervised(config) and placement.rollout is not None:
        findings.wrong(
            "allocation", str(placement), f"has a rollout part, and task {config.task} samples nothing; allowed: a "
            "trainer part alone, e.g. fsdp:d2",
        )  # fmt: skip
    teacher, rollout = config.teacher, placement.rollout
    if teacher is None or teacher.place != "engine" or rollout is None:
        return
    size = max(len(ranks) for ranks in rollout.instances)
    if size > 1:
        findings.wrong(
            "teacher.place", "engine", f"is not possible with inference engines of {size} ranks; allowed: trainer, or "
            "engines of one rank (dimension d alone)",
        )  # fmt: skip


TASK_CHECKS: tuple[Callable[[RunConfig, Findings], None], ...] = (
    _check_optimizers,
    _check_unused,
    _check_critic,
    _check_teacher,
    _check_reward_model,
    _check_supervised,
)
