"""What a rank works under, decided in one place before torch is loaded: its device, ports, caches and every variable.

environment ─► facts ─┬─► device (out of the visible list)            ┐
configuration ────────┼─► caches on the node's disk                   ├─► plan ─► enter: os.environ is the plan's
placement ────────────┼─► ports for engines, one network interface    │
user's variables ─────┴─► kept, less those of other launchers         ┘
"""

from __future__ import annotations

import os
import pwd
import resource
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pekoe.launch import environment, network, node_cache, port_blocks, proxies
from pekoe.launch.environment import TORCH_VARIABLES, Device, Facts, cores_per_rank, torch_variables
from pekoe.launch.network import Interface
from pekoe.launch.port_blocks import PortBlock
from pekoe.launch.stop_signals import EXIT_CONFIGURATION

if TYPE_CHECKING:
    from pekoe.launch.placement import Placement
    from pekoe.pipeline.config.run import RunConfig

DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Nodes of a cluster reach no hub: models and data were resolved to local paths before."""
CACHES = {**node_cache.SHARED, **node_cache.OWN}
"""Variables of caches that go to the node's own disk where the user has set nothing."""
ENGINE_PORT = "VLLM_PORT"
ENGINES_WITH_PORTS = ("vllm", "sglang")


class RankPlanError(ValueError):
    """A rank cannot work in this environment: devices, network or variables do not fit."""

    exit_code = EXIT_CONFIGURATION


@dataclass(frozen=True)
class RankPlan:
    """All that is decided for one rank from its environment, its configuration and its place in the world."""

    facts: Facts
    roles: tuple[str, ...]
    role_rank: int | None
    """Among the trainer ranks; None for a rank that does not train alone."""
    role_size: int | None
    device: Device | None
    """None where devices are shared (cpu), or the vendor's library must count them first."""
    device_variable: str | None
    ports: PortBlock | None
    """For engines that open ports by themselves, held as long as the plan; all other ports are the kernel's choice."""
    interface: Interface | None
    """None for a world on one node."""
    cache: Path
    own_cache: Path
    variables: Mapping[str, str]
    """The complete environment."""
    notes: tuple[str, ...]
    """Sentences for the log."""


_entered: list[RankPlan] = []
"""The plan of this process: keeps its ports."""


def plan(environ: Mapping[str, str], placement: Placement, config: RunConfig, facts: Facts | None = None) -> RankPlan:
    """The plan of this rank; makes the folders of its caches and reserves its ports. RankPlanError for an environment
    that cannot work, OSError without a place for caches."""
    try:
        return _decide(environ, placement, config, facts or environment.read(environ))
    except ValueError as error:
        raise RankPlanError(str(error)) from error


def _decide(environ: Mapping[str, str], placement: Placement, config: RunConfig, facts: Facts) -> RankPlan:
    user = {name: value for name, value in environ.items() if name not in TORCH_VARIABLES}
    user |= config.cluster.slurm.environment
    roles = placement.roles_of(facts.rank)
    variable = _device_variable(config.cluster.device, facts)
    device = _device(config.cluster.device, facts, variable)
    interface = _interface(user, facts)
    cache = node_cache.find(user, facts)
    own = node_cache.own_folder(cache, facts.local_rank)
    ports = _ports(user, facts, placement)
    trains_alone = facts.rank in placement.trainer_ranks and facts.rank not in placement.rollout_ranks
    local = device.ordinal if device else facts.local_rank
    chosen = {
        **(network.variables(user, interface, facts.several_hosts) if interface else {}),
        **proxies.variables(user, facts, interface),
        **facts.exported,
        **({ENGINE_PORT: str(ports.first)} if ports else {}),
        **({"OMP_NUM_THREADS": str(config.cluster.threads_per_rank)} if config.cluster.threads_per_rank else {}),
        **trainer_variables(facts.rank, placement.trainer_ranks, placement.rollout_ranks, local),
    }
    too_few = environment.missing_cores(facts)
    return RankPlan(
        facts=facts, roles=roles,
        role_rank=placement.trainer_ranks.index(facts.rank) if trains_alone else None,
        role_size=len(placement.trainer_ranks) if trains_alone else None,
        device=device, device_variable=variable, ports=ports, interface=interface, cache=cache, own_cache=own,
        variables={**_defaults(environ, facts, config.cluster.device, cache, own), **user, **chosen},
        notes=facts.notes + ((too_few,) if too_few else ()),
    )  # fmt: skip


def enter(plan: RankPlan, environ: MutableMapping[str, str] | None = None) -> None:
    """Makes the environment of this process the plan's; the caches and ports are held until it ends."""
    _entered.append(plan)
    node_cache.hold(plan.cache)
    if plan.facts.local_rank == 0:
        node_cache.delete_unused(plan.cache)
    apply(os.environ if environ is None else environ, plan.variables)


def node_local_cache(inherited: Mapping[str, str], facts: Facts) -> Path:
    """A writable folder on a local disk, of this user and this job. OSError when there is none."""
    return node_cache.find(inherited, facts)


def trainer_variables(
    rank: int, trainer_ranks: tuple[int, ...], rollout_ranks: tuple[int, ...], local: int
) -> dict[str, str]:
    """torch's variables for a rank that only trains: numbers of its role. Empty for all others, colocated ones too."""
    if rank not in trainer_ranks or rank in rollout_ranks:
        return {}
    return torch_variables(trainer_ranks.index(rank), len(trainer_ranks), local)


def apply(environ: MutableMapping[str, str], variables: Mapping[str, str]) -> None:
    """Makes `environ` equal to `variables`."""
    for name in set(environ) - set(variables):
        del environ[name]
    environ.update(variables)


def raise_open_files() -> int:
    """Lifts the soft limit of open files to the hard one; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _defaults(environ: Mapping[str, str], facts: Facts, kind: str, cache: Path, own: Path) -> dict[str, str]:
    """What holds where neither the user nor the configuration says anything."""
    from pekoe.pipeline.devices.device import choose
    from pekoe.pipeline.registry import DEVICES

    defaults = dict(DEFAULTS)
    for name in DEVICES if kind == "auto" else (kind,):
        defaults |= choose(name).environment_defaults(str(cache))
    return {
        **defaults,
        **node_cache.variables(cache, own),
        **_account(environ, own),
        "OMP_NUM_THREADS": str(cores_per_rank(facts)),
    }


def _account(environ: Mapping[str, str], own: Path) -> dict[str, str]:
    """HOME, USER and PATH for a task that a site starts with an empty environment, or a container without accounts."""
    try:
        account = pwd.getpwuid(os.getuid())
        home, user = account.pw_dir, account.pw_name
    except KeyError:
        home, user = "", f"user-{os.getuid()}"
    missing = {"HOME": home if Path(home).is_dir() else str(own), "USER": user, "PATH": os.defpath}
    return {name: value for name, value in missing.items() if not environ.get(name)}


def _device_variable(kind: str, facts: Facts) -> str | None:
    """The visible-devices variable of a device kind. `auto` is settled by the vendors' libraries later: until then by
    which vendor's list is set."""
    from pekoe.pipeline.devices.device import choose

    if kind == "auto":
        return environment.guess_variable(facts)
    return choose(kind).visible_devices_variable or None


def _device(kind: str, facts: Facts, variable: str | None) -> Device | None:
    """None where it takes the vendor's library, or the other ranks of the node, to say."""
    if variable is None or facts.visible[variable] is None or (facts.local_size is None and not facts.narrowed):
        return None
    try:
        return environment.pick_device(facts, variable)
    except ValueError:
        if kind != "auto":
            raise
        return None


def _interface(user: Mapping[str, str], facts: Facts) -> Interface | None:
    if not facts.several_hosts:
        return None
    peers = [node for node in facts.step_nodes[:2] if node != facts.host]
    found = network.choose(user, peers)
    if found is None:
        raise ValueError(
            f"network: {facts.host} has no interface but loopback, and the world spans several hosts; "
            "allowed: an interface with an address that the other nodes reach"
        )
    return found


def _ports(user: Mapping[str, str], facts: Facts, placement: Placement) -> PortBlock | None:
    rollout = placement.rollout
    if rollout is None or facts.rank not in rollout.ranks or rollout.engine not in ENGINES_WITH_PORTS:
        return None
    lowest = user.get(ENGINE_PORT, "")
    if lowest and not lowest.isdigit():
        raise ValueError(f"{ENGINE_PORT}: {lowest!r} in the environment is not a number; allowed: a port")
    return port_blocks.reserve(int(lowest)) if lowest else port_blocks.reserve()
