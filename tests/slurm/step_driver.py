"""Stands where the driver does, in an allocation: starts one world by `step_command`, prints its exit code.

python step_driver.py ALLOCATION NODES PROGRAM_ARGUMENT [key=value …]      NODES: n1,n2 or - for those of the job
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from pekoe.launch import environment
from pekoe.launch.allocation import parse
from pekoe.launch.step_command import Step, choose_launcher, choose_mpi, step_command
from pekoe.pipeline.config.load import from_yaml_text

allocation, nodes, argument, *overrides = sys.argv[1:]
placement = parse(allocation)
config = from_yaml_text("", [f"allocation={allocation}", *overrides])
launcher = choose_launcher(config, environment.read(os.environ))
names = () if nodes == "-" else tuple(nodes.split(","))
step = Step((str(Path(__file__).with_name("step_probe.py")), argument), placement.world_size, names)
command = step_command(step, config, placement, choose_mpi(config, launcher))
start = time.monotonic()
code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
print(f"code {code} after {time.monotonic() - start:.1f} s", flush=True)
sys.exit(code)
