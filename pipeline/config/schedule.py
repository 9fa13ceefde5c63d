"""`saver`, `recover`, `evaluator`: what happens at an interval; `weights`, `stats_logger`."""

from __future__ import annotations

from dataclasses import dataclass

from pekoe.pipeline.config.fields import setting


@dataclass
class SaverConfig:
    """Hugging Face exports."""

    freq_steps: int | None = setting(None, "export every so many steps; null = only at the end", minimum=1)
    at_end: bool = setting(True, "export when training is done")


@dataclass
class RecoverConfig:
    """Checkpoints for resuming."""

    freq_steps: int | None = setting(
        50, "checkpoint every so many steps; null = only on a signal and at the end", minimum=1
    )
    keep: int = setting(2, "complete checkpoints kept", minimum=1)
    asynchronous: bool = setting(True, "write from a copy in host memory while training goes on")
    max_failures: int = setting(3, "failed saves in a row that stop the run", minimum=1)


@dataclass
class EvaluatorConfig:
    """Evaluation on `valid_dataset` beside training."""

    freq_steps: int | None = setting(None, "evaluate every so many steps; null = never", minimum=1)
    at_start: bool = setting(False, "evaluate before the first step")
    at_end: bool = setting(False, "evaluate after the last step")
    block: bool = setting(False, "training and rollout wait, so that one version is measured")


@dataclass
class WeightsConfig:
    """Weight transfer."""

    bucket_mib: int = setting(64, "size of a bucket", minimum=1)
    update_mode: str = setting(
        "interrupt",
        "what sequences under way do in an update: interrupt = stop at a token, load, recompute KV, go on; drain = "
        "finish first; overlap = as interrupt, but decoding stops only once the weights have arrived (a second copy)",
        choices=("interrupt", "drain", "overlap"),
    )
    drain_seconds: float = setting(600.0, "how long sequences have to finish (update_mode: drain)", above=0)
    ready_seconds: float = setting(60.0, "how long engines have to stop at a token", above=0)
    bucket_seconds: float = setting(120.0, "time limit of one bucket", above=0)


@dataclass
class StatsLoggerConfig:
    """Metrics and the progress display."""

    tensorboard: bool = setting(True, "write TensorBoard events beside JSON lines")
    progress: str = setting("auto", "live display on the head", choices=("auto", "live", "lines", "off"))
