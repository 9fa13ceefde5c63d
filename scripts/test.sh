#!/usr/bin/env bash
# Sets up the environments and runs the tests of one or more lanes; without an argument, every lane but slow.
#   core      everything that needs neither more time nor more software than the set-up gives (unmarked tests)
#   vllm      tests with the mark vllm; those run in .venv-vllm
#   ascend    tests with the mark ascend: kernels with triton-ascend; those run in .venv-ascend, all others in .venv
#   slurm, kernels, trainers    tests with that mark and not vllm
#   slow      tests with the mark slow, of every lane, in both environments
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

marks=(slurm vllm kernels ascend trainers)
if [ $# -eq 0 ]; then set -- core "${marks[@]}"; fi

plain="" vllm="" ascend=""
for lane in "$@"; do
  case $lane in
    core) plain+="${plain:+ or }(not (slow or slurm or vllm or kernels or ascend or trainers))" ;;
    slurm | kernels | trainers) plain+="${plain:+ or }($lane and not slow and not vllm)" ;;
    vllm) vllm+="${vllm:+ or }(vllm and not slow)" ;;
    ascend) ascend="ascend and not slow" ;;
    slow) plain+="${plain:+ or }(slow and not vllm)" vllm+="${vllm:+ or }(vllm and slow)" ;;
    *) echo "test: there is no lane $lane; lanes: core ${marks[*]} slow" >&2; exit 2 ;;
  esac
done

code=0
# run VENV SELECTION [PATH…]: the tests of a selection; pytest's 5 means that there is none. Times on shared machines are noisy:
# up to `few` tests that fail run once more, alone, and what then passes is named as flaky, not as failed.
few=3
run() {
  local ended=0 cache=build/pytest-$(basename "$1")
  echo "test: lanes ${lanes[*]} in $1"
  "$1/bin/python" -m pytest -m "$2" -o "cache_dir=$cache" --cache-clear --durations=25 "${@:3}" || ended=$?
  if [ "$ended" -eq 1 ]; then again "$1" "$2" "$cache" "${@:3}" && ended=0; fi
  if [ "$ended" -eq 5 ]; then
    echo "test: there are no tests yet in: ${lanes[*]}, in $1"
  elif [ "$ended" -ne 0 ]; then
    echo "test: failed in $1 (pytest's exit code $ended)" >&2
    code=$ended
  fi
}

# again VENV SELECTION CACHE [PATH…]: what failed, once more; false when it fails again, or was too much.
again() {
  local failed
  failed=$("$1/bin/python" -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' "$3/v/cache/lastfailed") ||
    return 1
  if [ "$(wc -l <<<"$failed")" -gt "$few" ]; then return 1; fi
  echo "test: once more, alone:" $failed
  "$1/bin/python" -m pytest -m "$2" -o "cache_dir=$3" --last-failed --last-failed-no-failures none "${@:4}" || return 1
  echo "test: FLAKY, failed and then passed alone:" $failed
}

lanes=("$@")
if [ -n "$plain" ]; then scripts/setup_venv.sh; fi
if [ -n "$vllm" ]; then scripts/setup_venv.sh vllm; fi
if [ -n "$ascend" ]; then scripts/setup_venv.sh ascend; fi
if [ -n "$plain" ]; then run "${PEKOE_VENV:-.venv}" "$plain"; fi
if [ -n "$vllm" ]; then run "${PEKOE_VENV_VLLM:-.venv-vllm}" "$vllm"; fi
if [ -n "$ascend" ]; then run "${PEKOE_VENV_ASCEND:-.venv-ascend}" "$ascend" tests/kernels; fi
exit "$code"
