"""One rank of an attached world: `python -m pekoe.launch.attached_rank WORLD` (`RUN/attached/<world>`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pekoe.launch.attempts import Attempt
from pekoe.launch.rank import Origin, run_rank
from pekoe.pipeline.run_directory import RunDirectory

if TYPE_CHECKING:
    from pekoe.launch.placement import Placement
    from pekoe.pipeline.config.run import RunConfig


def main(arguments: list[str]) -> NoReturn:
    world = RunDirectory(Path(arguments[0]))

    def load() -> RunConfig:
        from pekoe.pipeline.config.load import load

        return load(world.config)

    def place(config: RunConfig) -> Placement:
        from pekoe.launch.allocation import place_attached

        return place_attached(config)

    run_rank(Origin(load, Attempt(world, 0), place=place, wiring="pekoe.pipeline.runs.rl_attached"))


if __name__ == "__main__":
    main(sys.argv[1:])
