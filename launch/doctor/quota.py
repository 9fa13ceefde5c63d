"""What is left of a quota: `statvfs` does not know it, the commands of a filesystem do."""

from __future__ import annotations

import getpass
import re
import shutil
from pathlib import Path

from pekoe.launch.slurm_commands import SlurmError, ask

QUOTA_SECONDS = 4.0
NEARLY = 0.9
"""A quota of which so much is used is worth a word."""


def quota_words(folder: Path, kind: str) -> str:
    """Lines of the quota that count for this user on this filesystem; "" where none is set or no command is there."""
    user = getpass.getuser()
    commands = {
        "lustre": ["lfs", "quota", "-q", "-u", user, str(folder)],
        "gpfs": ["mmlsquota", "-u", user, "--block-size", "1K"],
        "beegfs": ["beegfs-ctl", "--getquota", "--uid", user, "--csv"],
    }
    command = commands.get(kind, ["quota", "-w", "-p", "-u", user])
    if shutil.which(command[0]) is None:
        return ""
    try:
        said = ask(command, QUOTA_SECONDS)
    except SlurmError:
        return ""
    return "\n".join(line.rstrip() for line in said.splitlines() if line.strip())


def used_share(words: str) -> float | None:
    """The largest used/limit of blocks and of files in the lines of `lfs quota` and `quota -p`; None: no limit found.

    Both give, in columns: filesystem, blocks used, soft, hard, grace, files used, soft, hard, grace; 0 = no limit.
    """
    shares = []
    for line in words.splitlines():
        numbers = [int(word.rstrip("*")) for word in line.split() if re.fullmatch(r"\d+\*?", word)]
        for used, soft, hard in _triples(numbers):
            limits = [limit for limit in (soft, hard) if limit]
            if limits:
                shares.append(used / min(limits))
    return max(shares, default=None)


def _triples(numbers: list[int]) -> list[tuple[int, int, int]]:
    """(used, soft, hard) of blocks and of files. A grace time counts as a column where it is a plain number."""
    if len(numbers) == 6:
        return [(numbers[0], numbers[1], numbers[2]), (numbers[3], numbers[4], numbers[5])]
    if len(numbers) == 8:
        return [(numbers[0], numbers[1], numbers[2]), (numbers[4], numbers[5], numbers[6])]
    return []
