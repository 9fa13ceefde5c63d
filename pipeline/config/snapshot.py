"""What a run keeps of how it began: its effective configuration and its code.

The snapshot lies in `RUN/code/pekoe`; `PYTHONPATH=RUN/code` makes it win over any install, so that a run continues with
the code that it began with.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

from pekoe.pipeline import files
from pekoe.pipeline.config.load import load, to_yaml
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.run_directory import RunDirectory

FOLDERS = ("pipeline", "launch", "kernels", "configs")
SUFFIXES = (".py", ".yaml", ".c", ".h", ".so")


def write_run_config(run: RunDirectory, config: RunConfig) -> None:
    """Writes the effective configuration, atomically."""
    files.write_bytes(run.config, to_yaml(config).encode())


def read_run_config(run: RunDirectory) -> RunConfig:
    """The configuration that a run was started with. ValueError when it cannot be read, or is cut off: a run's own file
    has every section, in the order of `RunConfig`."""
    config = load(run.config)
    last = fields(RunConfig)[-1].name
    text = run.config.read_text(encoding="utf-8")
    if f"\n{last}:" not in text or not text.endswith("\n"):
        raise ValueError(f"{run.config}: is cut off: it must go on to the end of section {last!r}")
    return config


def snapshot_code(run: RunDirectory, package_root: Path) -> Path:
    """Copies the code below `package_root` (where `pipeline/` lies) into the run; returns the folder for PYTHONPATH.

    A snapshot that is there stays: later attempts run the code of the first. The copy appears whole or not at all.
    Raises ValueError when `package_root` is not Pekoe's.
    """
    if not (package_root / "pipeline" / "records.py").is_file():
        raise ValueError(f"package_root: {str(package_root)!r} is not the folder with pipeline/, launch/ and configs/")
    final = run.code / "pekoe"
    if final.is_dir():
        return run.code
    part = files.part_name(final)
    try:
        files.make_folder(run.code)
        files.put_away(part)
        for name in FOLDERS:
            _copy_folder(package_root / name, part / name)
        files.fsync_tree(part)
        files.publish(part, final)
    except OSError:
        # another process of this run was first
        if not final.is_dir():
            raise
    for left_over in (*run.code.glob(f"*{files.PART}"), *run.code.glob(f"*{files.DISCARDED}")):
        files.put_away(left_over)
    return run.code


def _copy_folder(source: Path, target: Path) -> None:
    for folder, names, entries in os.walk(source):
        names[:] = sorted(name for name in names if not name.startswith((".", "__pycache__")))
        kept = sorted(entry for entry in entries if entry.endswith(SUFFIXES))
        if not kept:
            continue
        to = target / Path(folder).relative_to(source)
        files.make_folder(to)
        for entry in kept:
            files.copy(Path(folder) / entry, to / entry)
