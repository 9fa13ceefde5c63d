"""Traffic between the nodes of a job never goes to a proxy; the user's proxies stay for all other hosts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence

from pekoe.launch.environment import Facts
from pekoe.launch.network import Interface

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy")
NO_PROXY = ("no_proxy", "NO_PROXY")
LOCAL = ("localhost", "127.0.0.1", "::1")
LOOKUPS = 64
"""More nodes are not looked up one by one: their subnet stands for them."""
LOOKUP_SECONDS = 2.0


def variables(environ: Mapping[str, str], facts: Facts, interface: Interface | None) -> dict[str, str]:
    """Both spellings of no_proxy, extended; nothing where no proxy is set."""
    if not any(environ.get(name) or environ.get(name.upper()) for name in PROXIES):
        return {}
    users = [part for name in NO_PROXY for part in environ.get(name, "").split(",")]
    nodes = facts.job_nodes or (facts.host,)
    own = [interface.address, interface.subnet] if interface else []
    addresses = addresses_of(nodes[:LOOKUPS]) if len(nodes) <= LOOKUPS else []
    parts = [part.strip() for part in [*users, *LOCAL, *nodes, facts.host, *own, *addresses]]
    text = ",".join(dict.fromkeys(part for part in parts if part))
    return dict.fromkeys(NO_PROXY, text)


def addresses_of(names: Sequence[str], seconds: float = LOOKUP_SECONDS) -> list[str]:
    """What the names resolve to within the time, in their order: a name service that is down holds nobody up."""
    found: dict[str, str] = {}

    def look_up() -> None:
        for name in names:
            try:
                found[name] = socket.gethostbyname(name)
            except OSError:
                continue

    thread = threading.Thread(target=look_up, name="lookup", daemon=True)
    thread.start()
    thread.join(seconds)
    return [found[name] for name in names if name in found]
