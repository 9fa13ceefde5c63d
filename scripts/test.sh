#!/usr/bin/env bash
# Sets up .venv and runs the tests of one or more lanes; without an argument, every lane but slow.
#   core      everything that needs neither more time nor more software than the set-up gives (unmarked tests)
#   slurm, vllm, kernels, trainers    tests with that pytest mark
#   slow      tests with the mark slow, of every lane
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

marks=(slurm vllm kernels trainers)
if [ $# -eq 0 ]; then set -- core "${marks[@]}"; fi

selection=""
for lane in "$@"; do
  case $lane in
    core) part="not (slow or slurm or vllm or kernels or trainers)" ;;
    slurm | vllm | kernels | trainers) part="$lane and not slow" ;;
    slow) part="slow" ;;
    *) echo "test: there is no lane $lane; lanes: core ${marks[*]} slow" >&2; exit 2 ;;
  esac
  selection="${selection:+$selection or }($part)"
done

scripts/setup_venv.sh
echo "test: lanes $*"
code=0
"${PEKOE_VENV:-.venv}/bin/python" -m pytest -m "$selection" || code=$?
# pytest's 5: no test was selected.
if [ "$code" -eq 5 ]; then
  echo "test: there are no tests yet in: $*"
  exit 0
fi
exit "$code"
