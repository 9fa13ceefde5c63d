"""Linux calls that let a process own all its descendants and end them for good."""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ROUNDS = 50


@dataclass(frozen=True)
class Entry:
    """One line of the process table."""

    parent: int
    session: int
    state: str


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when the thread that started it ends; at once when that has happened already."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process instead of init's."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def be_first_out_of_memory(score: int = 1000) -> None:
    """Makes the kernel's out-of-memory killer prefer this process (and its children) to a rank; of several, the one
    with the highest score (at most 1000) goes first."""
    try:
        Path("/proc/self/oom_score_adj").write_text(str(score))
    except PermissionError:
        return


def process_table() -> dict[int, Entry]:
    """All processes that can be seen, by id."""
    table = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            text = Path("/proc", name, "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        fields = text[text.rindex(")") + 2 :].split()
        table[int(name)] = Entry(parent=int(fields[1]), session=int(fields[3]), state=fields[0])
    return table


def family(root: int, marker: str = "") -> set[int]:
    """Who is alive of: `root`, its session, this process's adopted children with `marker` in their environment, and all
    descendants of these."""
    table = process_table()
    me = os.getpid()
    found = {pid for pid, entry in table.items() if pid == root or entry.session == root}
    if marker:
        found |= {pid for pid, entry in table.items() if entry.parent == me and _has_variable(pid, marker)}
    size = -1
    while size != len(found):
        size = len(found)
        found |= {pid for pid, entry in table.items() if entry.parent in found}
    return {pid for pid in found if table[pid].state not in "ZX"}


def kill_all(root: int, marker: str) -> None:
    """Ends a session leader that is not yet reaped, and everything that came from it, detached processes with
    `marker` in their environment included. Stops them all first, so that none can escape by forking meanwhile."""
    stopped: set[int] = set()
    for _ in range(ROUNDS):
        fresh = family(root, marker) - stopped
        if not fresh:
            break
        for pid in fresh:
            _signal(pid, signal.SIGSTOP)
        stopped |= fresh
    for pid in stopped:
        _signal(pid, signal.SIGKILL)


def kill_marked(marker: str) -> None:
    """Ends every process with `marker` (NAME=value) in its environment, whoever its parent is, but not this one."""
    stopped: set[int] = {os.getpid()}
    for _ in range(ROUNDS):
        table = process_table()
        fresh = {pid for pid in table.keys() - stopped if table[pid].state not in "ZX" and _has_variable(pid, marker)}
        if not fresh:
            break
        for pid in fresh:
            _signal(pid, signal.SIGSTOP)
        stopped |= fresh
    for pid in stopped - {os.getpid()}:
        _signal(pid, signal.SIGKILL)


def kill_descendants() -> None:
    """Ends all that came from this process and the rest of its session, but not itself."""
    for pid in family(os.getpid()) - {os.getpid()}:
        _signal(pid, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """Whether a child of this process has ended; it stays unreaped, so its id stays its own."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def reap_orphans(own: set[int]) -> None:
    """Waits for ended children other than `own` (those that were adopted): no zombies."""
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
    except ChildProcessError:
        return
    me = os.getpid()
    for pid, entry in process_table().items():
        if entry.parent == me and entry.state == "Z" and pid not in own:
            os.waitpid(pid, os.WNOHANG)


def _has_variable(pid: int, assignment: str) -> bool:
    try:
        return assignment.encode() in Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
