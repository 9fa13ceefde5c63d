"""Meeting points: the owner binds a port of its own choice, listens, and publishes `host:port` over MPI.

No port formula. `torch.distributed.TCPStore(host, port, is_master=True, master_listen_fd=socket.detach())` takes the
listening socket over, so that nobody else can get the port in between.
"""

from __future__ import annotations

import ipaddress
import os
import socket

from pekoe.launch import network

LOOPBACK = "127.0.0.1"
BACKLOG = 2048


def listen(num_hosts: int = 1, address: str | None = None) -> tuple[socket.socket, str]:
    """A listening socket on a port that the kernel chose, and its `host:port` for the others.

    One host listens on loopback; more of them on all interfaces, published under `address` or this host's own address.
    """
    published = address or (LOOPBACK if num_hosts == 1 else own_address())
    check_address(published, num_hosts)
    owner = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    owner.bind((LOOPBACK if is_loopback(published) else "", 0))
    owner.listen(BACKLOG)
    return owner, f"{published}:{owner.getsockname()[1]}"


def split_address(endpoint: str) -> tuple[str, int]:
    """`host:port` -> (host, port). ValueError for anything else."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"endpoint: {endpoint!r} is not host:port")
    return host, int(port)


def check_address(address: str, num_hosts: int) -> None:
    """ValueError for a loopback address that ranks on other hosts would have to reach."""
    if num_hosts > 1 and is_loopback(address):
        raise ValueError(
            f"rendezvous: {address} is a loopback address but the world spans {num_hosts} hosts; "
            "allowed: an address that the other hosts can reach (look at this host's name in /etc/hosts)"
        )


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def own_address() -> str:
    """This host's address for other hosts: of the interface that the rank's libraries were told to take, else of the
    one by the route. ValueError where there is nothing but loopback."""
    told = network.address_of(os.environ)
    if told and not is_loopback(told):
        return told
    found = network.choose(os.environ)
    if found is None or found.is_loopback:
        raise ValueError(
            f"rendezvous: host {socket.gethostname()!r} has no address but loopback; "
            "allowed: an interface with an address that the other hosts reach"
        )
    return found.address
