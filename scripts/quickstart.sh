#!/usr/bin/env bash
# The main job, from nothing: sets up .venv, makes a small model that has learned addition badly, and trains it by asynchronous
# GRPO on one rollout and one trainer rank (configs/quickstart.yaml). Further arguments are configuration: key=value.
#   scripts/quickstart.sh
#   scripts/quickstart.sh total_train_steps=40 rollout.max_head_offpolicyness=0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

experiment=quickstart
trial=$(date +%Y%m%d-%H%M%S)
for argument in "$@"; do
  case $argument in
    experiment_name=*) experiment=${argument#*=} ;;
    trial_name=*) trial=${argument#*=} ;;
    *=*) ;;
    *) echo "quickstart: $argument is not key=value (for example total_train_steps=40)" >&2; exit 2 ;;
  esac
done

scripts/setup_venv.sh
venv=${PEKOE_VENV:-.venv}
model=runs/models/quickstart

echo "quickstart: the model (half a minute on one core)"
"$venv/bin/python" scripts/make_quickstart_model.py "$model" || {
  echo "quickstart: the model was not made; the lines above say why" >&2
  exit 1
}

run=runs/$experiment/$trial
echo "quickstart: training; the run directory is $run"
code=0
"$venv/bin/pekoe" run configs/quickstart.yaml "$@" "trial_name=$trial" || code=$?
case $code in
  0) ;;
  75)
    echo "quickstart: the run was stopped; go on with $venv/bin/pekoe run --resume $run (from $PWD)" >&2
    exit "$code" ;;
  78)
    echo "quickstart: nothing was trained; the lines above say what is wrong" >&2
    exit "$code" ;;
  *)
    echo "quickstart: the run ended with exit code $code. Why: $run/errors/ and $run/logs/; then run this script again." >&2
    exit "$code" ;;
esac

cat <<TEXT

Where things are:
  $run/report.html    curves and figures; pictures in $run/report/
  $run/metrics/       metrics.jsonl, TensorBoard events
  $run/exports/       the trained model in Hugging Face format
  $run/shards/        trajectories: $venv/bin/pekoe shards ls $run
  $run/logs/          one log per rank
  $run/config.yaml    the configuration that really ran
TEXT
