"""Naive against decoupled PPO as the sampling policy falls behind: the ablation of AReaL in small.

Fu et al. 2025 (arXiv:2505.24298), with the objective of Hilton et al. 2022; here on the quickstart's task and model.

    naive      the ratio is clipped around the policy that sampled          actor.use_decoupled_loss=false
    decoupled  it is clipped around the policy at the step's start, times that one over the one that sampled

Runs have an exact lag and take one process (`staleness_trainer.py`): the weights of eta versions ago sample every token
of a batch; with inf the start policy samples for ever. All runs of a seed begin with the same model, and make the same
number of updates. Figures are means over seeds ± half the range: `final` is the mean of the last three held-out
accuracies, `area` the mean height of the learning curve. A PNG of the curves goes to --plot.

    python scripts/bench/staleness.py [--quick] [--etas 0,1,4,8,inf] [--seeds 3] [--steps 60] [key=value …]
    python scripts/bench/staleness.py --pipeline     eta 4 with both objectives and eta 0, as whole runs (`pekoe run`)
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from bench_result import report
from quickstart import accuracies
from staleness_trainer import Curve, Task, one_rank, train

from pekoe.pipeline.config.load import load
from pekoe.pipeline.config.run import RunConfig

ROOT = Path(__file__).resolve().parents[2]
ETAS = ("0", "1", "4", "8", "inf")
OBJECTIVES = {"naive": "actor.use_decoupled_loss=false", "decoupled": "actor.use_decoupled_loss=true"}
LEARNING_RATE = 5e-5
STEPS, EVAL_EVERY = 60, 5
NOISE = 0.02
"""Of an area: what a mean over three seeds moves from one set of seeds to the next."""

TARGETS = {
    "lost_decoupled": (f"at eta 1 and 4 <= {NOISE}", lambda lost: max(lost["1"], lost["4"]) <= NOISE),
    "lost_naive": (f"grows with eta, at 8 >= {2 * NOISE}", lambda lost: lost["1"] < lost["4"] < lost["8"] >= 2 * NOISE),
}
"""What the ablation found."""

Runs = Mapping[tuple[str, str], Sequence[Curve]]
"""(objective, eta) -> a curve a seed."""


def make_model(folder: Path, seed: int) -> Path:
    """The quickstart's model and problems of a seed; kept from one call to the next."""
    model = folder / f"model-{seed}"
    make = [sys.executable, str(ROOT / "scripts" / "make_quickstart_model.py"), str(model), "--seed", str(seed)]
    subprocess.run(make, check=True, stdout=sys.stderr)
    return model


def run_config(model: Path, seed: int, lr: float, settings: Sequence[str]) -> RunConfig:
    """The quickstart's, on a model."""
    overrides = [f"actor.path={model}", f"seed={seed}", f"actor.optimizer.lr={lr}", *settings]
    return load(ROOT / "configs" / "quickstart.yaml", overrides)


def run_all(options: argparse.Namespace, models: Mapping[int, Path]) -> Runs:
    """Every run, one after the other, told as it ends. With eta 0 both policies are one, and so are the objectives."""
    runs: dict[tuple[str, str], list[Curve]] = {}
    for seed, model in models.items():
        task = Task(model)
        for eta in options.etas:
            for objective, setting in OBJECTIVES.items():
                if eta == "0" and objective == "decoupled":
                    runs.setdefault((objective, eta), []).append(runs["naive", eta][-1])
                    continue
                config = run_config(model, seed, options.lr, [setting, *options.overrides])
                curve = train(config, float(eta), options.steps, task, EVAL_EVERY)
                runs.setdefault((objective, eta), []).append(curve)
                heights = " ".join(f"{accuracy:.2f}" for accuracy in curve.accuracy)
                print(f"seed {seed} eta {eta:>3} {objective:>9}: {heights}  {curve.seconds:.0f} s", flush=True)
    return runs


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of the range."""
    return float(np.mean(values)), float(max(values) - min(values)) / 2


def print_table(runs: Runs, etas: Sequence[str]) -> None:
    print(f"\n{'eta':>4}" + "".join(f"  {name + ' ' + what:>17}" for what in ("final", "area") for name in OBJECTIVES))
    for eta in etas:
        cells = [
            mean_and_spread([getattr(curve, what) for curve in runs[name, eta]])
            for what in ("final", "area") for name in OBJECTIVES
        ]  # fmt: skip
        print(f"{eta:>4}" + "".join(f"  {f'{mean:.3f} ± {spread:.3f}':>17}" for mean, spread in cells))


def plot(runs: Runs, etas: Sequence[str], path: Path) -> None:
    """A panel an objective: mean curve of each eta, and the range over seeds."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(OBJECTIVES), figsize=(11, 4), sharey=True, layout="constrained")
    colours = pyplot.get_cmap("viridis")(np.linspace(0, 0.9, len(etas)))
    for panel, name in zip(panels, OBJECTIVES, strict=True):
        for eta, colour in zip(etas, colours, strict=True):
            curves = runs[name, eta]
            heights = np.array([curve.accuracy for curve in curves])
            panel.plot(curves[0].steps, heights.mean(0), color=colour, label="η = " + eta.replace("inf", "∞"))
            panel.fill_between(curves[0].steps, heights.min(0), heights.max(0), color=colour, alpha=0.15, linewidth=0)
        panel.set(title=f"{name} PPO", xlabel="step")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("held-out accuracy (greedy)")
    panels[-1].legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def figures_of(runs: Runs, etas: Sequence[str]) -> dict[str, object]:
    """Per objective and eta; `lost` is what an objective's area lacks of that with eta 0."""
    found: dict[str, object] = {}
    for what in ("final", "area"):
        for name in OBJECTIVES:
            found[f"{what}_{name}"] = {
                eta: [round(x, 4) for x in mean_and_spread([getattr(curve, what) for curve in runs[name, eta]])]
                for eta in etas
            }
    for name in OBJECTIVES:
        best = np.mean([curve.area for curve in runs[name, etas[0]]])
        found[f"lost_{name}"] = {
            eta: round(float(best - np.mean([curve.area for curve in runs[name, eta]])), 4) for eta in etas[1:]
        }
    found["clipped"] = {
        name: {eta: round(float(np.mean([np.mean(curve.clipped) for curve in runs[name, eta]])), 4) for eta in etas}
        for name in OBJECTIVES
    }
    return found


def whole_run(model: Path, place: Path, name: str, steps: int, lr: float, settings: Sequence[str]) -> dict[str, object]:
    """The same comparison by `pekoe run`: a rollout rank and a trainer rank in an MPI world."""
    command = [
        sys.executable, "-m", "pekoe.launch.cli", "run", "configs/quickstart.yaml", f"cluster.fileroot={place}",
        f"trial_name={name}", f"actor.path={model}", f"train_dataset.path={model}/train.jsonl",
        f"valid_dataset.path={model}/valid.jsonl", f"actor.optimizer.lr={lr}",
        f"total_train_steps={steps}", "evaluator.freq_steps=10", "stats_logger.progress=lines", *settings,
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=sys.stderr, cwd=ROOT)
    metrics = place / "quickstart" / name / "metrics" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    staleness = [row["train/staleness"] for row in rows if "train/staleness" in row]
    return {"accuracy": [round(x, 4) for x in accuracies(metrics)], "staleness": round(float(np.mean(staleness)), 3)}


def pipeline(options: argparse.Namespace, model: Path, place: Path) -> int:
    place, found = Path(tempfile.mkdtemp(prefix="runs-", dir=place)), {}
    for eta, objective in (("0", "decoupled"), ("4", "naive"), ("4", "decoupled")):
        settings = [f"rollout.max_head_offpolicyness={eta}", OBJECTIVES[objective], *options.overrides]
        name = f"eta{eta}-{objective}"
        found[name] = whole_run(model, place, name, options.steps, options.lr, settings)
        print(f"{name:>15}: {found[name]}", flush=True)
    return 0 if report("staleness_pipeline", found, {}) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="eta 0 and 4, one seed, a few steps")
    parser.add_argument("--pipeline", action="store_true", help="the comparison at eta 4 by whole runs")
    parser.add_argument("--etas", type=lambda text: text.split(","), default=list(ETAS), help="first the reference")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lr", type=float, default=LEARNING_RATE)
    parser.add_argument("--folder", type=Path, help="where models (and whole runs) are kept; default: a temporary one")
    parser.add_argument("--plot", type=Path, default=ROOT / "runs" / "bench" / "staleness.png")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration for every run")
    options = parser.parse_args()
    if options.quick:
        options.etas, options.seeds, options.steps = ["0", "4"], 1, 10
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="pekoe-bench-") as temporary:
        place = (options.folder or Path(temporary)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        if options.pipeline:
            return pipeline(options, make_model(place, 1), place)
        with one_rank():
            runs = run_all(options, {seed: make_model(place, seed) for seed in range(1, options.seeds + 1)})
    print_table(runs, options.etas)
    plot(runs, options.etas, options.plot)
    print(f"\ncurves: {options.plot}\n")
    settings = {"steps": options.steps, "seeds": options.seeds, "lr": options.lr, "overrides": options.overrides}
    figures = {**figures_of(runs, options.etas), **settings}
    targets = {} if options.quick or options.etas != list(ETAS) else TARGETS
    return 0 if report("staleness", figures, targets) else 1


if __name__ == "__main__":
    sys.exit(main())
