"""How ranks on different nodes reach each other: names, interfaces, a real connection, the variables that steer it."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping, Sequence

import msgspec
import psutil  # type: ignore[import-untyped]

from pekoe.launch import network, proxies
from pekoe.launch.doctor.rank_pair import Pair
from pekoe.launch.environment import Facts
from pekoe.launch.rendezvous import is_loopback, listen, split_address
from pekoe.pipeline.runs.finding import Finding, note, ok, problem

AREA = "network"
CONNECT_SECONDS = 5.0
PING_ROUNDS, PING_BYTES = 50, 64
STREAM_BYTES = 16 << 20
FASTER = 4
"""An interface that is so many times faster than the one in use is worth a word."""


class NetworkFacts(msgspec.Struct):
    """Of one host."""

    host: str
    names: list[str]
    """IPv4 addresses that the host's own name stands for."""
    interface: str = ""
    address: str = ""
    """What a rank tells its libraries to take; "" = there is none."""
    error: str = ""
    """Why there is none."""
    wish: dict[str, str] = {}
    """Variables by which the user limits the choice."""
    speeds: dict[str, int] = {}
    """Interface with an address that others may reach -> Mbit/s as the kernel says (0 = it does not)."""
    addresses: dict[str, str] = {}
    """Address -> interface."""
    proxies: dict[str, str] = {}


class LinkFacts(msgspec.Struct):
    """A connection from the watcher to the writer."""

    error: str = ""
    address: str = ""
    """Of the watcher's end."""
    round_trip_seconds: float = 0.0
    bytes_per_second: float = 0.0


def measure(facts: Facts, environ: Mapping[str, str]) -> NetworkFacts:
    """As this rank would choose."""
    found = network.interfaces()
    stats = psutil.net_if_stats()
    lower = {name.lower(): value for name, value in environ.items() if value}
    mine = NetworkFacts(
        host=facts.host,
        names=proxies.addresses_of([facts.host]),
        wish={name: environ[name] for name in (*network.LITERAL, *network.PATTERN) if environ.get(name)},
        speeds={one.name: stats[one.name].speed for one in found if not one.is_loopback and one.name in stats},
        addresses={one.address: one.name for one in found},
        proxies={name: _without_secret(lower[name]) for name in proxies.PROXIES if name in lower},
    )
    try:
        chosen = network.choose(environ, [node for node in facts.step_nodes if node != facts.host][:2])
    except ValueError as error:
        mine.error = str(error)
        return mine
    if chosen is None or chosen.is_loopback:
        mine.error = f"{facts.host} has no interface but loopback"
    else:
        mine.interface, mine.address = chosen.name, chosen.address
    return mine


def connect(pair: Pair, num_hosts: int) -> LinkFacts:
    """A real connection between the two ranks, found as ranks find each other; all ranks, bounded in time."""
    owner: list[socket.socket] = []

    def open_port() -> str:
        listening, endpoint = listen(num_hosts)
        listening.settimeout(CONNECT_SECONDS)
        owner.append(listening)
        return endpoint

    endpoint = pair.writer_does(open_port)
    if endpoint.error:
        return LinkFacts(error=endpoint.error)
    served, used = pair.together(lambda: _serve(owner[0]), lambda: _use(endpoint.value))
    if used.error or served.error:
        return LinkFacts(error=f"{used.error or served.error} (towards {endpoint.value})")
    return LinkFacts("", *used.value)


def judge(all_facts: Sequence[NetworkFacts], link: LinkFacts | None) -> list[Finding]:
    """`link` is None where there was one rank only, or no trial."""
    found = [_interface(facts) for facts in all_facts] if len(all_facts) > 1 else []
    if link is not None:
        found += _link(all_facts, link)
    return found + _proxies(all_facts)


def _serve(owner: socket.socket) -> None:
    with owner, owner.accept()[0] as peer:
        peer.settimeout(CONNECT_SECONDS)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PING_ROUNDS):
            peer.sendall(_receive(peer, PING_BYTES))
        _receive(peer, STREAM_BYTES)
        peer.sendall(b"!")


def _use(endpoint: str) -> tuple[str, float, float]:
    """(own address, seconds of a round trip, bytes a second)."""
    with socket.create_connection(split_address(endpoint), CONNECT_SECONDS) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.perf_counter()
        for _ in range(PING_ROUNDS):
            peer.sendall(b"p" * PING_BYTES)
            _receive(peer, PING_BYTES)
        round_trip = (time.perf_counter() - began) / PING_ROUNDS
        began = time.perf_counter()
        peer.sendall(bytes(STREAM_BYTES))
        _receive(peer, 1)
        rate = STREAM_BYTES / (time.perf_counter() - began)
        return str(peer.getsockname()[0]), round_trip, rate


def _receive(peer: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = peer.recv(min(count - len(data), 1 << 20))
        if not part:
            raise ConnectionResetError(104, "the other end closed the connection")
        data += part
    return bytes(data)


def _interface(facts: NetworkFacts) -> Finding:
    if facts.error:
        step = "cluster.slurm.environment: {GLOO_SOCKET_IFNAME: an interface that all nodes have}; look at ip -4 addr"
        return problem(AREA, f"{facts.host}: {facts.error}", step)
    wish = ", ".join(f"{name}={value}" for name, value in facts.wish.items())
    why = f"as {wish} says" if wish else "by the route to the other node"
    text = f"{facts.host}: ranks take {facts.interface} ({facts.address}{_speed(facts, facts.interface)}), {why}"
    if facts.names and all(is_loopback(name) for name in facts.names):
        text += f"; its own name stands for {', '.join(facts.names)}"
        return note(AREA, text, f"other libraries may take the loopback: correct {facts.host} in its /etc/hosts")
    return ok(AREA, text)


def _link(all_facts: Sequence[NetworkFacts], link: LinkFacts) -> list[Finding]:
    far = all_facts[-1]
    hosts = f"{far.host} -> {all_facts[0].host}"
    if link.error:
        step = "a firewall between nodes, or the wrong interface: cluster.slurm.environment: {GLOO_SOCKET_IFNAME: …}"
        return [problem(AREA, f"{hosts}: {link.error}", step)]
    name = far.addresses.get(link.address, "?")
    text = (
        f"{hosts}: by {name} ({link.address}), round trip {link.round_trip_seconds * 1e6:,.0f} us, "
        f"{link.bytes_per_second / 1e6:,.0f} MB/s on one connection"
    )
    if len(all_facts) > 1 and is_loopback(link.address):
        step = "the nodes are one machine, or their names stand for loopback in /etc/hosts"
        return [problem(AREA, f"{text}; loopback between two nodes", step)]
    faster = [other for other, speed in far.speeds.items() if speed >= FASTER * far.speeds.get(name, 1 << 60) > 0]
    if len(all_facts) > 1 and faster:
        best = max(faster, key=far.speeds.__getitem__)
        step = f"cluster.slurm.environment: {{GLOO_SOCKET_IFNAME: {best}}}, if all nodes reach each other by it"
        return [ok(AREA, text), note(AREA, f"{best} is up{_speed(far, best)}: much faster than {name}", step)]
    return [ok(AREA, text)]


def _proxies(all_facts: Sequence[NetworkFacts]) -> list[Finding]:
    for facts in all_facts:
        if facts.proxies:
            names = ", ".join(f"{name}={value}" for name, value in facts.proxies.items())
            return [ok(AREA, f"{facts.host}: {names}; for the nodes of the job ranks extend no_proxy")]
    return []


def _speed(facts: NetworkFacts, interface: str) -> str:
    megabits = facts.speeds.get(interface, 0)
    return f", {megabits / 1000:g} Gbit/s" if megabits else ""


def _without_secret(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//…@", url)
