"""Trained tokens a second of Pekoe against TRL's GRPOTrainer: SmolLM2, the same prompts, batch, lengths, cores, dtype.

A step trains on 8 prompts of 4 completions each, at most 64 tokens long, with one optimiser update. Pekoe runs
`vllm:d1+fsdp:d1` (and `hf:d1+fsdp:d1`) asynchronously; TRL generates, then trains, in one process with all cores.
Trained tokens are those of completions. Of Pekoe's run neither the first two steps count (rollout begins) nor the last
ones, for which nothing is sampled any more; of TRL's not the first. Rounds alternate; a figure is the ratio of medians.

    python scripts/bench/end_to_end.py [--quick] [--engines vllm,hf] [--dtype bfloat16] [--rounds N]

TRL is of the extra `bench`; where it is not installed it comes, without what it depends on, into build/bench.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_result import report
from smollm2_material import MODEL, ROOT, find_model, write_questions

HERE = Path(__file__).resolve().parent
TARGET = 2.0
TRL = "trl==1.16.0"
TRL_FOLDER = ROOT / "build" / "bench"
PROMPTS, SAMPLES, TOKENS = 8, 4, 64
ETA = 2
NOT_COUNTED = 2
LEARNING_RATE = 1e-6


def trl_path() -> list[str]:
    """What must be on the path for `import trl`; installs it on first use."""
    if importlib.util.find_spec("trl") is not None:
        return []
    if not (TRL_FOLDER / "trl").is_dir():
        install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(TRL_FOLDER), TRL]
        subprocess.run(install, check=True, stdout=sys.stderr)
    return [str(TRL_FOLDER)]


def python_path(*folders: str) -> dict[str, str]:
    parts = [*folders, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, parts)), "HF_HUB_OFFLINE": "1"}


def num_steps(options: argparse.Namespace) -> int:
    """Of Pekoe's run."""
    return NOT_COUNTED + int(options.steps) + ETA


def trl_settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": str(options.model), "prompts": PROMPTS, "samples": SAMPLES, "tokens": TOKENS, "lr": LEARNING_RATE,
        "steps": 1 + options.steps, "micro_batch": options.trl_micro_batch, "dtype": options.dtype,
        "threads": options.cores,
    }  # fmt: skip


def run_trl(options: argparse.Namespace, path: Sequence[str]) -> float:
    """Trained tokens a second."""
    command = [sys.executable, str(HERE / "trl_side.py"), json.dumps(trl_settings(options))]
    environment = {**python_path(*path), "OMP_NUM_THREADS": str(options.cores)}
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True, timeout=3600)
    found = json.loads(done.stdout.splitlines()[-1])
    return float(sum(found["tokens"][1:]) / sum(found["seconds"][1:]))


def pekoe_settings(options: argparse.Namespace, engine: str, folder: Path) -> list[str]:
    settings = [
        f"allocation={engine}:d1+fsdp:d1 algorithm=grpo experiment_name=end-to-end cluster.fileroot={folder}",
        f"total_train_steps={num_steps(options)} cluster.device=cpu",
        f"cluster.threads_per_rank={options.threads_per_rank} train_dataset.type=jsonl",
        f"train_dataset.path={folder / 'questions.jsonl'} train_dataset.batch_size={PROMPTS}",
        f"gconfig.n_samples={SAMPLES} gconfig.max_new_tokens={TOKENS} gconfig.max_tokens=512 gconfig.temperature=1.0",
        f"rollout.max_head_offpolicyness={ETA} rollout.max_slots={PROMPTS * SAMPLES} rollout.dtype={options.dtype}",
        "reward.name=smollm2_material:vowel_share",
        f"actor.path={options.model} actor.dtype={options.dtype} actor.mb_spec.max_tokens_per_mb={options.mb_tokens}",
        f"actor.prox_logp_method=reuse actor.optimizer.lr={LEARNING_RATE} actor.optimizer.lr_scheduler_type=constant",
        "recover.freq_steps=null saver.at_end=false stats_logger.progress=off stats_logger.tensorboard=false",
    ]
    return " ".join(settings).split()


def run_pekoe(options: argparse.Namespace, engine: str, folder: Path, name: str) -> dict[str, float]:
    """Trained tokens a second, and the shares of a step."""
    config = folder / "empty.yaml"
    config.write_text("{}\n")
    command = [sys.executable, "-m", "pekoe.launch.cli", "run", str(config), f"trial_name={name}"]
    command += pekoe_settings(options, engine, folder)
    subprocess.run(command, check=True, env=python_path(str(HERE)), stdout=subprocess.DEVNULL, timeout=3600)
    metrics = folder / "end-to-end" / name / "metrics" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if "time/step" in line][NOT_COUNTED : NOT_COUNTED + options.steps]
    assert len(steps) == options.steps, f"{len(steps)} steps that count"
    seconds = sum(step["time/step"] for step in steps)
    return {
        "tokens_per_second": sum(step["train/tokens"] for step in steps) / seconds,
        "train_share": sum(step["time/train"] for step in steps) / seconds,
        "wait_share": sum(step["time/wait"] for step in steps) / seconds,
        "update_share": sum(step["time/update"] for step in steps) / seconds,
        "step_seconds": seconds / len(steps),
        "length_mean": statistics.mean(step["length/mean"] for step in steps),
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    path = trl_path()
    write_questions(folder / "questions.jsonl", PROMPTS * num_steps(options))
    speeds: dict[str, list[float]] = {name: [] for name in (*options.engines, "trl")}
    figures: dict[str, Any] = {}
    for number in range(options.rounds):
        for engine in options.engines:
            found = run_pekoe(options, engine, folder, f"{engine}-{number}")
            speeds[engine].append(found["tokens_per_second"])
            figures[engine] = {key: round(value, 3) for key, value in found.items()}
            print(f"round {number}, pekoe with {engine}: {figures[engine]}", flush=True)
        speeds["trl"].append(run_trl(options, path))
        print(f"round {number}, TRL: {speeds['trl'][-1]:.1f} tokens a second", flush=True)
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    for name, speed in medians.items():
        figures[f"{name}_tokens_per_second"] = round(speed, 2)
        if name != "trl":
            figures[f"pekoe_{name}_over_trl"] = round(speed / medians["trl"], 3)
    figures["pekoe_over_trl"] = figures[f"pekoe_{options.engines[0]}_over_trl"]
    figures["settings_trl"] = trl_settings(options)
    figures["settings_pekoe"] = pekoe_settings(options, options.engines[0], folder)
    return figures


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one counted step of each (the model needs minutes)")
    parser.add_argument("--engines", default="", help="default: vllm,hf, and hf alone where vLLM is not installed")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--steps", type=int, default=0, help="steps that count; default: 3, with --quick 1")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="threads of TRL")
    parser.add_argument("--threads-per-rank", type=int, default=1, help="threads of each of Pekoe's two ranks")
    parser.add_argument("--mb-tokens", type=int, default=2048)
    parser.add_argument("--trl-micro-batch", type=int, default=8, help="completions of one backward pass")
    parser.add_argument("--model", type=Path, default=MODEL)
    options = parser.parse_args()
    has_vllm = importlib.util.find_spec("vllm") is not None
    options.engines = (options.engines or ("vllm,hf" if has_vllm else "hf")).split(",")
    options.steps = options.steps or (1 if options.quick else 3)
    return options


def main() -> int:
    options = arguments()
    options.model = find_model(options.model)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options, Path(folder))
    targets = {"pekoe_over_trl": (f">= {TARGET}", lambda ratio: ratio >= TARGET)}
    return 0 if report("end_to_end", figures, targets) else 1


if __name__ == "__main__":
    sys.exit(main())
