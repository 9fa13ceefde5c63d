"""Processes that a rank owns: a keeper, started before MPI is, starts children whenever they are needed.

    rank ──► keeper (knows nothing of MPI) ──► children (workers, engines), each the leader of a session of its own

A rank that has initialised MPI starts no process: memory that the fabric has registered does not survive it. The
keeper ends with its rank, and its children end with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from pekoe.pipeline.process_tree import family

MPI_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "HYDRA_", "MPI_LOCAL")
WORLD_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "NODE_RANK",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip
"""Of torch's launchers: they describe the trainer's world."""

logger = logging.getLogger(__name__)


def start_keeper(
    module: str, what: str, kind: socket.SocketKind = socket.SOCK_STREAM
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts `python -m MODULE DESCRIPTOR RANK_PID` with the other end of the socket that is returned. Call it before
    MPI is initialised; `what` names the keeper in the warning that comes otherwise."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        logger.warning("%s starts a process after MPI was initialised; start it before", what)
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
    return process, ours


def end_keeper(process: subprocess.Popen[bytes], channel: socket.socket, seconds: float) -> None:
    """The end of the stream tells it to end its children and itself; after `seconds` all of them are killed."""
    with contextlib.suppress(OSError):
        channel.shutdown(socket.SHUT_WR)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        for pid in family(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def start_child(module: str, descriptors: Sequence[int], marker: str) -> subprocess.Popen[bytes]:
    """By a keeper, on its main thread (the child dies with that thread): `python -m MODULE PARENT DESCRIPTOR…`, with
    the descriptors and `marker` (NAME=value) in its environment, and nothing there of MPI or of torch's world."""
    name, _, value = marker.partition("=")
    environment = {
        key: text for key, text in os.environ.items() if not key.startswith(MPI_PREFIXES) and key not in WORLD_VARIABLES
    }
    environment[name] = value
    environment.setdefault("OMP_NUM_THREADS", "1")
    return subprocess.Popen(
        [sys.executable, "-m", module, str(os.getpid()), *map(str, descriptors)],
        pass_fds=tuple(descriptors),
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        env=environment,
    )


def ignore_job_signals() -> None:
    """Signals to the whole job step are for the ranks; keepers and children end with their rank. A handler, unlike
    SIG_IGN, is not inherited by what a child starts."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _stay)


def _stay(_number: int, _frame: object) -> None:
    """See `ignore_job_signals`."""
