"""The transport of MPICH under Slurm's PMI: only where there is a choice, and never against the user's."""

from __future__ import annotations

import pytest

from pekoe.launch.mpi_transport import variables

BOTH = "MPICH Version:\t5.0.2\nMPICH Device:\tch4:ucx ofi\nMPICH CC:\tcc"
OFI = {"MPIR_CVAR_CH4_NETMOD": "ofi"}


def test_srun_with_pmi2_takes_libfabric_over_the_interface_of_the_plan() -> None:
    assert variables({}, "pmi2", BOTH) == OFI
    assert variables({"GLOO_SOCKET_IFNAME": "eth0"}, "pmi2", BOTH) == {**OFI, "FI_TCP_IFACE": "eth0"}
    assert variables({"GLOO_SOCKET_IFNAME": "eth0", "FI_TCP_IFACE": "ib0"}, "pmi2", BOTH) == OFI
    assert variables({"GLOO_SOCKET_IFNAME": "^docker0"}, "pmi2", BOTH) == OFI
    assert variables({}, "pmi2", BOTH.replace("ucx ofi", "ucx,ofi")) == OFI


@pytest.mark.parametrize(
    ("environ", "launcher", "library"),
    [
        ({}, "mpich", BOTH),
        ({}, "pmix", BOTH),
        ({"MPIR_CVAR_CH4_NETMOD": "ucx"}, "pmi2", BOTH),
        ({"MPICH_CH4_NETMOD": "ucx"}, "pmi2", BOTH),
        ({}, "pmi2", BOTH.replace("ucx ofi", "ucx")),
        ({}, "pmi2", BOTH.replace("ucx ofi", "ofi")),
        ({}, "pmi2", "MPICH Version: 3.4\nMPICH Device:\tch3:nemesis"),
        ({}, "pmi2", "Open MPI v4.1.4, package: Debian OpenMPI"),
    ],
)
def test_nothing_is_set_without_need(environ: dict[str, str], launcher: str, library: str) -> None:
    assert variables(environ, launcher, library) == {}
