"""Recorded calls of the native library, made again by a C program that any compiler builds for any machine."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def build_flags() -> list[str]:
    """FLAGS of setup.py, which cannot be imported without building."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FLAGS":
            found: list[str] = ast.literal_eval(node.value)
            return found
    raise AssertionError("setup.py has no FLAGS")


FLAGS = build_flags()
SOURCES = sorted((ROOT / "kernels" / "native").glob("*.c"))
WARNINGS = ("-Wall", "-Wextra", "-Werror")

HEAD = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int64_t i; double d; void *p; int64_t size; } Argument;

#ifndef BEHIND
#define BEHIND 64
#endif

static void take(void *to, size_t size) {
  if (fread(to, 1, size, stdin) != size) { fprintf(stderr, "the record is cut off\\n"); exit(3); }
}

static void take_pointer(Argument *first, int k) {
  Argument *a = first + k;
  take(&a->size, 8);
  a->p = a->size < -1 ? first[-2 - a->size].p : NULL;
  if (a->size < 0) return;
  a->p = malloc((size_t)a->size + BEHIND);
  memset(a->p, 0xA5, (size_t)a->size + BEHIND);
  take(a->p, (size_t)a->size);
}

static uint64_t mixed(uint64_t hash, const void *bytes, size_t size) {
  const unsigned char *b = bytes;
  for (size_t k = 0; k < size; k++) hash = (hash ^ b[k]) * UINT64_C(1099511628211);
  return hash;
}

static uint64_t left(Argument *a, uint64_t hash) {
  if (a->size < 0) return hash;
  hash = mixed(hash, a->p, (size_t)a->size);
  free(a->p);
  return hash;
}
"""
MAIN = """
int main(void) {
  int64_t index;
  while (fread(&index, 1, 8, stdin) == 8) {
    Argument a[64];
    uint64_t hash = UINT64_C(14695981039346656037);
    switch (index) {
%s
    default: return 4;
    }
  }
  return 0;
}
"""


@dataclass(frozen=True)
class Recording:
    """What `record_calls.py` wrote."""

    folder: Path

    @property
    def prototypes(self) -> list[list[str]]:
        found: list[list[str]] = json.loads((self.folder / "functions.json").read_text())
        return found

    def program(self) -> Path:
        """A C source that makes the calls of its standard input and prints, for each, a hash of all that it left."""
        declarations, cases = [], []
        for index, (name, result, *kinds) in enumerate(self.prototypes):
            declarations.append(f"{result} {name}({', '.join(kinds) or 'void'});")
            cases.append(f"    case {index}: {{\n{call(name, result, kinds)}      break;\n    }}")
        path = self.folder / "replay.c"
        path.write_text("\n".join([HEAD, *declarations, MAIN % "\n".join(cases)]))
        return path

    def replay(self, compiler: str, flags: Sequence[str], runner: Sequence[str] = ()) -> list[str]:
        """One line per call, by the sources compiled in this way."""
        binary = self.folder / "replay"
        own = [*FLAGS, *WARNINGS, *flags]
        compile_all([compiler, *own, str(self.program()), *map(str, SOURCES), "-lm", "-o", str(binary)])
        with open(self.folder / "calls", "rb") as calls:
            done = subprocess.run(
                [*runner, str(binary)], stdin=calls, capture_output=True, text=True, timeout=120, check=False
            )
        assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
        return done.stdout.splitlines()


def call(name: str, result: str, kinds: Sequence[str]) -> str:
    """The statements that read a record, call, and print the hash."""
    lines, passed, hashed = [], [], []
    for k, kind in enumerate(kinds):
        if kind == "void *":
            lines.append(f"take_pointer(a, {k});")
            passed.append(f"a[{k}].p")
            hashed.append(f"hash = left(&a[{k}], hash);")
        else:
            field = "d" if kind in ("double", "float") else "i"
            lines.append(f"take(&a[{k}].{field}, 8);")
            passed.append(f"({kind})a[{k}].{field}")
    if result == "void":
        lines.append(f"{name}({', '.join(passed)});")
    else:
        lines.append(f"{result} r = {name}({', '.join(passed)});")
        lines.append("hash = mixed(hash, &r, sizeof r);")
    lines += [*hashed, f'printf("{name} %016llx\\n", (unsigned long long)hash);']
    return "".join(f"      {line}\n" for line in lines)


def compile_all(command: Sequence[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def record(folder: Path) -> Recording:
    """By the installed library, in a fresh process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("record_calls.py")), str(folder)], env=environment,
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return Recording(folder)
