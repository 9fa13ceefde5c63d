"""Meeting points: the owner's port is the kernel's choice, nobody can take it, loopback is refused across hosts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from pekoe.launch import network, rendezvous
from pekoe.launch.network import Interface


def test_ports_are_distinct_whatever_the_job_id(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    for job in ("1500", "2500", "1500"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        opened.append(rendezvous.listen())
    ports = {rendezvous.split_address(endpoint)[1] for _, endpoint in opened}
    assert len(ports) == 3
    for owner, endpoint in opened:
        with socket.create_connection(rendezvous.split_address(endpoint), timeout=60):
            pass
        owner.close()


def test_the_port_is_held_until_handed_over() -> None:
    owner, endpoint = rendezvous.listen()
    thief = socket.socket()
    with pytest.raises(OSError, match="in use"):
        thief.bind(rendezvous.split_address(endpoint))
    owner.close()
    thief.close()


def test_loopback_is_refused_with_several_hosts() -> None:
    for address in ("127.0.0.1", "127.0.1.1", "localhost"):
        with pytest.raises(ValueError, match="loopback address but the world spans 2 hosts"):
            rendezvous.listen(2, address)
    owner, endpoint = rendezvous.listen(2, "10.1.2.3")
    assert endpoint.startswith("10.1.2.3:")
    assert owner.getsockname()[0] == "0.0.0.0"
    owner.close()


def test_own_address_skips_a_host_name_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    lo, eth = Interface("lo", "127.0.1.1", "255.0.0.0"), Interface("eth0", "10.0.0.7", "255.255.255.0")
    monkeypatch.setattr(network, "_own_addresses", lambda: ["127.0.1.1"])
    monkeypatch.setattr(network, "source_address", lambda peer: None)
    monkeypatch.setattr(network, "interfaces", lambda: [lo, eth])
    assert rendezvous.own_address() == "10.0.0.7"
    monkeypatch.setattr(network, "interfaces", lambda: [lo])
    with pytest.raises(ValueError, match="no address but loopback"):
        rendezvous.own_address()


def test_own_address_is_of_the_interface_that_libraries_take(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("eth0", "ib0")
    found = [Interface(name, f"10.0.{index}.7", "255.255.255.0") for index, name in enumerate(names)]
    monkeypatch.setattr(network, "interfaces", lambda: found)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert rendezvous.own_address() == "10.0.1.7"


@pytest.mark.parametrize("text", ["host", "host:", ":12", "host:port"])
def test_wrong_endpoints(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        rendezvous.split_address(text)


def test_torch_takes_the_socket_over() -> None:
    program = """
from pekoe.launch.rendezvous import listen, split_address
from torch.distributed import TCPStore
owner, endpoint = listen()
host, port = split_address(endpoint)
master = TCPStore(host, port, is_master=True, master_listen_fd=owner.detach(), wait_for_workers=False)
peer = TCPStore(host, port, is_master=False)
peer.set("key", "value")
assert master.get("key") == b"value"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=os.environ)
