"""Saves checkpoints for ever, until it is killed; prints each step once it is committed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pekoe.pipeline.run_directory import RunDirectory
from pekoe.pipeline.train.checkpoint import Checkpoints


def main() -> None:
    checkpoints = Checkpoints(RunDirectory(Path(sys.argv[1])), keep=2, attempt=int(sys.argv[2]))
    found = checkpoints.latest(deep=True)
    step = 0 if found is None else found[0]
    while True:
        step += 1
        part = checkpoints.begin(step)
        (part / "engine").mkdir(exist_ok=True)
        for rank in range(3):
            (part / "engine" / f"__{rank}_0.distcp").write_bytes(os.urandom(50_000) + step.to_bytes(8, "little"))
        (part / "state.json").write_text(str(step))
        checkpoints.commit(step)
        print(step, flush=True)
        checkpoints.prune()


if __name__ == "__main__":
    main()
