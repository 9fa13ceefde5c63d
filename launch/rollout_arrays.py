"""Rollout arrays: job arrays of `pekoe attach RUN`, each element a small world that serves a run through its directory.

RUN/slurm/rollout-arrays/A.json   an array that was submitted; many may submit at once
RUN/slurm/attach-A_I.log          what the elements print, one file each, all restarts of it
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Sequence

from pekoe.launch.attempts import PACKAGE_ROOT
from pekoe.launch.job_states import read_states
from pekoe.launch.sbatch import submit_script
from pekoe.launch.sweeps import check_array_text
from pekoe.pipeline import files
from pekoe.pipeline.run_directory import RunDirectory

FOLDER = "rollout-arrays"


def submit_rollout_array(
    run: RunDirectory, array: str, overrides: Sequence[str] = (), *, cluster: str | None = None, dry_run: bool = False
) -> str:
    """The id of the array; `array` is what sbatch takes, `0-15%4`. `overrides` are those of `pekoe attach`.

    `dry_run` prints the script, touches nothing and returns "". ValueError lists what is wrong.
    """
    from pekoe.launch.attach import attached_config
    from pekoe.launch.batch_script import BatchJob, batch_script

    check_array_text(array)
    given = [*([f"cluster.site={cluster}"] if cluster is not None else []), *overrides]
    config, placement = attached_config(run, given)
    job = BatchJob(
        name=f"{run.path.name}-rollout",
        command=(sys.executable, "-u", "-m", "pekoe.launch.cli", "attach", str(run.path), *given),
        output=str(run.slurm / "attach-%A_%a.log"),
        array=array,
    )
    code = run.code if (run.code / "pekoe").is_dir() else PACKAGE_ROOT.parent
    parts = dict.fromkeys([str(code), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    text = batch_script(job, config, placement, {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, parts))})
    if dry_run:
        print(text, end="")
        return ""
    files.make_folder(run.slurm)
    script = run.slurm / f"attach-{uuid.uuid4().hex}.sh"
    files.write_bytes(script, text.encode())
    try:
        job_id = submit_script(script)
    except BaseException:
        files.remove(script)
        raise
    files.publish(script, run.slurm / f"{job_id}_attach.sh")
    files.make_folder(run.slurm / FOLDER)
    record = {"job_id": job_id, "array": array, "overrides": list(given), "time": time.time()}
    files.write_json(run.slurm / FOLDER / f"{job_id}.json", record)
    return job_id


def array_jobs(run: RunDirectory) -> list[str]:
    """Ids of rollout arrays of which an element still waits or runs."""
    known = {str(one["job_id"]): _indices(str(one["array"])) for one in _arrays(run)}
    elements = [f"{job}_{index}" for job, indices in known.items() for index in indices]
    states = read_states(elements) if elements else {}
    return [job for job, indices in known.items() if not all(states[f"{job}_{index}"].has_ended for index in indices)]


def _arrays(run: RunDirectory) -> list[dict[str, object]]:
    return [files.read_json(path) for path in sorted((run.slurm / FOLDER).glob("*.json"))]


def _indices(array: str) -> list[int]:
    """`0-6:3,9%2` -> 0, 3, 6, 9."""
    indices: list[int] = []
    for part in array.partition("%")[0].split(","):
        bounds, _, step = part.partition(":")
        first, _, last = bounds.partition("-")
        indices += range(int(first), int(last or first) + 1, int(step or 1))
    return indices
