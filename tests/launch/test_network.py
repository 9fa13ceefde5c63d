"""One interface for all libraries: by the route, within what the user wrote, never loopback between hosts."""

from __future__ import annotations

import socket

import pytest

from pekoe.launch import network
from pekoe.launch.network import Interface

LO = Interface("lo", "127.0.0.1", "255.0.0.0")
DOCKER = Interface("docker0", "172.17.0.1", "255.255.0.0")
ETH = Interface("eth0", "10.1.0.5", "255.255.0.0")
ETH1 = Interface("eth1", "10.2.0.5", "255.255.0.0")
IB = Interface("ib0", "10.9.0.5", "255.255.254.0")
FOUND = [LO, DOCKER, ETH, ETH1, IB]


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Peer -> this host's address on the way to it. The host's own name resolves to 127.0.1.1."""
    table = {"n2": IB.address, network.ANYWHERE: ETH.address}
    monkeypatch.setattr(network, "source_address", table.get)
    monkeypatch.setattr(network, "_own_addresses", lambda: ["127.0.1.1"])
    monkeypatch.setattr(network, "interfaces", lambda: FOUND)
    return table


@pytest.mark.parametrize(
    ("variables", "peers", "name"),
    [
        ({}, ["n2"], "ib0"),
        ({}, [], "eth0"),
        ({}, ["nowhere"], "eth0"),
        ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, [], "eth0"),
        ({"NCCL_SOCKET_IFNAME": "^lo,docker,eth"}, [], "ib0"),
        ({"NCCL_SOCKET_IFNAME": "=eth1"}, ["n2"], "eth1"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, ["n2"], "eth0"),
        ({"HCCL_SOCKET_IFNAME": "^=ib0,eth0"}, ["n2"], "docker0"),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, ["n2"], "eth1"),
        ({"GLOO_SOCKET_IFNAME": "^lo,docker"}, [], "eth0"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, [], "lo"),
    ],
)
def test_choice(variables: dict[str, str], peers: list[str], name: str, routes: dict[str, str]) -> None:
    chosen = network.choose(variables, peers)
    assert chosen is not None
    assert chosen.name == name


def test_nothing_but_loopback_is_no_choice(routes: dict[str, str]) -> None:
    assert network.choose({}, ["n2"], [LO]) is None


@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"])
def test_a_name_that_is_not_there_is_refused(name: str, routes: dict[str, str]) -> None:
    with pytest.raises(
        ValueError, match=f"{name}: '=?bond0' leaves no interface .* it has docker0, eth0, eth1, ib0, lo"
    ):
        network.choose({name: "bond0"})


def test_gloo_gets_a_literal_name_and_others_an_exact_one() -> None:
    assert network.variables({}, ETH, True) == {
        "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0",
        "HCCL_SOCKET_IFNAME": "=eth0", "VLLM_HOST_IP": "10.1.0.5",
    }  # fmt: skip
    excluded = {"GLOO_SOCKET_IFNAME": "^lo,docker", "NCCL_SOCKET_IFNAME": "^lo,docker"}
    assert network.variables(excluded, ETH, True)["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "NCCL_SOCKET_IFNAME" not in network.variables(excluded, ETH, True)
    chosen = {"GLOO_SOCKET_IFNAME": "eth0", "HCCL_IF_IP": "10.9.0.5", "VLLM_HOST_IP": "10.9.0.5"}
    assert network.variables(chosen, ETH, True) == {"TP_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}


def test_loopback_serves_one_host_only() -> None:
    assert network.variables({}, LO, False)["GLOO_SOCKET_IFNAME"] == "lo"
    with pytest.raises(ValueError, match="loopback interface but the world spans several hosts"):
        network.variables({}, LO, True)


@pytest.mark.parametrize(
    ("pattern", "name", "hit"),
    [
        ("eth", "eth12", True), ("=eth1", "eth12", False), ("=eth1", "eth1", True), ("^eth", "eth0", False),
        ("^eth", "ib0", True), ("^=eth0", "eth01", True), ("eth0,ib", "ib0", True), ("^lo, docker", "docker0", False),
    ],
)  # fmt: skip
def test_nccls_syntax(pattern: str, name: str, hit: bool) -> None:
    assert network.matches(pattern, name) is hit


def test_subnet_and_what_this_host_has() -> None:
    assert IB.subnet == "10.9.0.0/23"
    found = network.interfaces()
    assert any(one.is_loopback for one in found)
    assert all(socket.inet_aton(one.address) for one in found)
    assert network.source_address("127.0.0.1") == "127.0.0.1"
    assert network.source_address("no such host") is None
