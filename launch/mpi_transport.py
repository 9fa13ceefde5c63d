"""Which transport MPICH takes for a world that srun starts over several nodes: one that fits Slurm's PMI.

MPICH 5 with UCX publishes 4096 bytes from the beginning of each node's address: the address, and whatever the heap
holds behind it. Slurm's PMI takes requests of up to 1024 bytes, and MPICH, which sends bytes as hex in pieces of that
size less its own words, breaks the stream when such a piece is not compressible: then all ranks wait in MPI_Init. With
libfabric the address has its own length, some tens of bytes. (MPICH issue 6924 is about the length of the requests.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pekoe.launch.network import GLOO

NETMOD = "MPIR_CVAR_CH4_NETMOD"
USERS = (NETMOD, "MPICH_CH4_NETMOD", "MPIR_PARAM_CH4_NETMOD")
"""Names under which MPICH reads it."""
INTERFACE = "FI_TCP_IFACE"


def variables(environ: Mapping[str, str], launcher: str, library: str) -> dict[str, str]:
    """What to set before MPI_Init; empty where the user has chosen, or the library has no choice.

    `launcher` as in `Facts`, `library` is the version text of the MPI library.
    """
    device = re.search(r"MPICH Device:\s*ch4:(.*)", library)
    modules = re.split(r"[\s,]+", device[1].strip()) if device else []
    if launcher != "pmi2" or not {"ucx", "ofi"} <= set(modules) or any(environ.get(name) for name in USERS):
        return {}
    interface = environ.get(GLOO, "")
    named = bool(interface) and not set(interface) & set("^=,") and not environ.get(INTERFACE)
    return {NETMOD: "ofi", **({INTERFACE: interface} if named else {})}
