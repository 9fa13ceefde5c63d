"""The report of a run: curves as PNG, one HTML page that needs nothing else, and a plot for the terminal."""

from __future__ import annotations

import base64
import html
import math
from dataclasses import dataclass
from pathlib import Path

from pekoe.pipeline import files
from pekoe.pipeline.observe.metrics import MetricsLine, metrics_path, read_metrics, series
from pekoe.pipeline.observe.progress import duration
from pekoe.pipeline.observe.terminal_plot import terminal_plot
from pekoe.pipeline.run_directory import RunDirectory

PANELS = (
    ("reward/mean", "reward (mean of the batch)"),
    ("eval/accuracy", "accuracy (held-out)"),
    ("eval/loss", "loss (held-out)"),
    ("staleness/mean", "staleness (training steps)"),
    ("train/loss", "loss"),
    ("train/logprob_gap", "log-prob gap engine - trainer"),
)
TRUNCATED_NOTE = 0.5
"""Share of truncated completions above which the report says so."""
SMOOTHING = 0.9
FEW_POINTS = 20


@dataclass(frozen=True)
class Curve:
    """One figure over the steps; only finite values."""

    name: str
    label: str
    steps: list[int]
    values: list[float]

    def smooth(self) -> list[float]:
        """Bias-corrected exponential mean."""
        total, weight, smoothed = 0.0, 0.0, []
        for value in self.values:
            total = SMOOTHING * total + (1 - SMOOTHING) * value
            weight = SMOOTHING * weight + (1 - SMOOTHING)
            smoothed.append(total / weight)
        return smoothed


def report(run: RunDirectory) -> str:
    """Writes `report/*.png` and `report.html`; gives a terminal plot and where things are. No metrics: a sentence."""
    lines = read_metrics(run)
    curves = {curve.name: curve for name, label in PANELS if (curve := curve_of(lines, name, label)).steps}
    if not curves:
        return f"no figures yet in {metrics_path(run)}"
    folder = run.path / "report"
    folder.mkdir(exist_ok=True)
    pictures = {name: folder / f"{file_name(name)}.png" for name in curves}
    for name, path in pictures.items():
        draw(curves[name], path)
    page = run.path / "report.html"
    files.write_bytes(page, page_of(run, lines, list(curves.values()), pictures).encode())
    shown = next(curves[name] for name in ("reward/mean", "train/loss", *curves) if name in curves)
    places = [
        f"report: {page}",
        *(f"curve:  {path}" for path in list(pictures.values())[:2]),
        f"metrics: {metrics_path(run)}",
    ]
    if run.exports.is_dir():
        places += [
            f"model:  {path}" for path in sorted(run.exports.iterdir(), key=lambda p: (len(p.name), p.name))[-1:]
        ]
    return "\n".join([plot_text(shown), *key_figures_text(lines, curves), *remarks(lines), *places])


def remarks(lines: list[MetricsLine]) -> list[str]:
    """What a person should know before trusting the curve."""
    norms = series(lines, "train/grad_norm")[1]
    truncated = series(lines, "truncated/share")[1]
    found = []
    if norms and not any(norms) and series(lines, "reward/mean")[1]:
        found.append(
            "note: no update was made, since in every step the rewards of each group were equal: another reward, "
            "easier prompts or more samples are needed"
        )
    if truncated and sum(truncated) / len(truncated) > TRUNCATED_NOTE:
        share = sum(truncated) / len(truncated)
        found.append(f"note: {share:.0%} of the completions were cut at their limit: raise gconfig.max_new_tokens")
    return found


def file_name(name: str) -> str:
    """`reward/mean` -> `reward`; other names keep their parts: `eval-accuracy`."""
    return "reward" if name == "reward/mean" else "accuracy" if name == "eval/accuracy" else name.replace("/", "-")


def curve_of(lines: list[MetricsLine], name: str, label: str) -> Curve:
    pairs = [(step, value) for step, value in zip(*series(lines, name), strict=True) if math.isfinite(value)]
    return Curve(name, label, [step for step, _ in pairs], [value for _, value in pairs])


def draw(curve: Curve, path: Path) -> None:
    """One curve as PNG, without a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    few = len(curve.steps) < FEW_POINTS
    axes.plot(
        curve.steps, curve.values, "o-" if few else "-", color="#2f6f4f", alpha=1 if few else 0.35, label="as measured"
    )
    if not few:
        axes.plot(curve.steps, curve.smooth(), color="#2f6f4f", linewidth=2, label=f"exponential mean ({SMOOTHING})")
        axes.legend(frameon=False)
    axes.set_xlabel("training step")
    axes.set_ylabel(curve.label)
    axes.grid(alpha=0.25)
    figure.savefig(path, format="png")


def plot_text(curve: Curve) -> str:
    """The curve for a terminal; smoothed when there are many points."""
    if len(curve.steps) < FEW_POINTS:
        return terminal_plot(curve.steps, curve.values, f"{curve.label} over training steps")
    return terminal_plot(
        curve.steps, curve.smooth(), f"{curve.label} over training steps, exponential mean ({SMOOTHING})"
    )


def key_figures(lines: list[MetricsLine], curves: dict[str, Curve]) -> list[tuple[str, str]]:
    """(what, value) of the numbers that sum a run up."""
    last = max(line.step for line in lines)
    figures = [("training steps", str(last)), ("attempts", str(len({line.attempt for line in lines})))]
    figures.append(
        ("time from first to last figure", duration(max(x.time for x in lines) - min(x.time for x in lines)))
    )
    titles = [("reward/mean", "reward"), ("eval/accuracy", "held-out accuracy"), ("eval/loss", "held-out loss")]
    if "reward/mean" not in curves:
        titles.insert(0, ("train/loss", "loss"))
    for name, title in titles:
        if name in curves:
            tenth = max(1, len(curves[name].values) // 10) if name in ("reward/mean", "train/loss") else 1
            first, final = curves[name].values[:tenth], curves[name].values[-tenth:]
            scope = "" if tenth == 1 else f" (means of {tenth} steps)"
            text = f"{sum(first) / len(first):.3f} -> {sum(final) / len(final):.3f}{scope}"
            figures.append((f"{title}, first -> last", text))
    for name in (
        "staleness/mean",
        "staleness/max",
        "tokens_per_second/train",
        "tokens_per_second/rollout",
        "time/step",
    ):
        values = [value for value in series(lines, name)[1] if math.isfinite(value)]
        if values:
            figures.append((f"{name}, mean over the run", f"{sum(values) / len(values):.4g}"))
    return figures


def key_figures_text(lines: list[MetricsLine], curves: dict[str, Curve]) -> list[str]:
    return [f"{what}: {value}" for what, value in key_figures(lines, curves)]


def page_of(run: RunDirectory, lines: list[MetricsLine], curves: list[Curve], pictures: dict[str, Path]) -> str:
    """The HTML page, pictures inside."""
    by_name = {curve.name: curve for curve in curves}
    rows = "".join(
        f"<tr><td>{html.escape(what)}</td><td>{html.escape(value)}</td></tr>"
        for what, value in key_figures(lines, by_name)
    )
    images = "".join(
        f'<figure><img alt="{html.escape(curve.label)}" src="data:image/png;base64,'
        f'{base64.b64encode(pictures[curve.name].read_bytes()).decode()}"></figure>'
        for curve in curves
    )
    style = (
        "body{font:15px system-ui,sans-serif;margin:2em auto;max-width:60em;color:#222}"
        "td{padding:.2em 1.2em .2em 0;border-bottom:1px solid #ddd}figure{margin:1.5em 0}img{max-width:100%}"
    )
    title = html.escape(f"{run.path.parent.name}/{run.path.name}")
    config = html.escape(run.config.read_text()) if run.config.exists() else ""
    details = f"<details><summary>configuration</summary><pre>{config}</pre></details>" if config else ""
    head = f'<meta charset="utf-8"><title>{title}</title><style>{style}</style>'
    body = f"<h1>{title}</h1><p>{html.escape(str(run.path))}</p><table>{rows}</table>{images}{details}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'
