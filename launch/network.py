"""The one network interface that a rank's traffic takes: by the route to the other nodes, named for every library.

gloo wants a literal name; NCCL and HCCL know prefixes, `=name` and `^name`. What a user wrote for one of them is
honoured for all; what cannot be is refused before anything connects. The loopback interface serves one node only.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

GLOO = "GLOO_SOCKET_IFNAME"
LITERAL = (GLOO, "TP_SOCKET_IFNAME")
"""Variables that take a name and nothing else."""
PATTERN = ("NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
"""Variables that take a list of prefixes, of exact names after `=`, or of what must not match after `^`."""
HCCL_ADDRESS = "HCCL_IF_IP"
ENGINE_ADDRESS = "VLLM_HOST_IP"
ANYWHERE = "192.0.2.1"
"""An address of nobody (RFC 5737): the route to it is the default route."""


@dataclass(frozen=True)
class Interface:
    """One address of one interface that is up."""

    name: str
    address: str
    netmask: str

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def subnet(self) -> str:
        """As `10.1.0.0/16`."""
        return str(ipaddress.ip_network(f"{self.address}/{self.netmask}", strict=False))


def interfaces() -> list[Interface]:
    """Every IPv4 address of this host's interfaces that are up."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return [
        Interface(name, one.address, one.netmask or "255.255.255.255")
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family == socket.AF_INET and name in up
    ]


def choose(
    environ: Mapping[str, str], peers: Sequence[str] = (), found: Sequence[Interface] | None = None
) -> Interface | None:
    """The interface towards the first peer that has a route, else of the default route; None where there is nothing but
    loopback. `peers` are other hosts' names or addresses.

    What the user wrote in a variable of any library limits the choice. ValueError names the variable that leaves none.
    """
    found = list(found if found is not None else interfaces())
    for name in (*LITERAL, *PATTERN):
        pattern = environ.get(name)
        if pattern:
            found = [one for one in found if matches(pattern, one.name, literal=name in LITERAL)]
            if not found:
                here = ", ".join(sorted({one.name for one in interfaces()}))
                raise ValueError(f"{name}: {pattern!r} leaves no interface of {socket.gethostname()}; it has {here}")
    towards_peers = [source_address(peer) for peer in peers]
    for source in (*towards_peers, source_address(ANYWHERE), *_own_addresses()):
        for one in found:
            if one.address == source and not one.is_loopback:
                return one
    return next((one for one in found if not one.is_loopback), found[0] if _asked_for(environ) and found else None)


def variables(environ: Mapping[str, str], interface: Interface, several_hosts: bool) -> dict[str, str]:
    """What a rank exports so that every library takes this interface. ValueError for loopback across hosts.

    A name that the user wrote for a library in that library's own syntax stays.
    """
    if several_hosts and interface.is_loopback:
        raise ValueError(
            f"network: {interface.name} ({interface.address}) is a loopback interface but the world spans several "
            f"hosts; allowed: one that the other nodes reach (set {GLOO})"
        )
    chosen = {name: interface.name for name in LITERAL if not _is_literal(environ.get(name))}
    own_choice = {name: f"={interface.name}" for name in PATTERN if not environ.get(name)}
    if environ.get(HCCL_ADDRESS):
        own_choice.pop("HCCL_SOCKET_IFNAME", None)
    address = {} if environ.get(ENGINE_ADDRESS) else {ENGINE_ADDRESS: interface.address}
    return {**chosen, **own_choice, **address}


def matches(pattern: str, name: str, literal: bool = False) -> bool:
    """Does NCCL's syntax let this name pass? `literal` values are exact names unless they begin with `^` or `=`."""
    excluded = pattern.startswith("^")
    exact = pattern.startswith(("=", "^=")) or (literal and not excluded)
    parts = [part.strip().lstrip("=") for part in pattern.lstrip("^=").split(",") if part.strip()]
    hit = any(name == part if exact else name.startswith(part) for part in parts)
    return not hit if excluded else hit


def source_address(peer: str) -> str | None:
    """This host's address on the way to another; None where there is no way. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def address_of(environ: Mapping[str, str]) -> str | None:
    """The address of the interface that gloo was told to take; None where it was told nothing or has none."""
    names = (environ.get(GLOO) or "").split(",")
    return next((one.address for one in interfaces() if one.name in names), None)


def _own_addresses() -> list[str]:
    """What this host's name resolves to."""
    try:
        return [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    except socket.gaierror:
        return []


def _is_literal(value: str | None) -> bool:
    return bool(value) and not str(value).startswith(("^", "="))


def _asked_for(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name) for name in (*LITERAL, *PATTERN))
