"""Which nodes of an allocation a world uses: well ones, in the allocation's order; spare ones fill the gaps."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from pekoe.launch.node_layout import NodeGroup
from pekoe.launch.slurm_commands import ask

ANSWER_SECONDS = 15.0
ILL = re.compile(r"down|fail|unk|err|boot|reboot|power|maint|inval|plnd|not_resp|\*|#|~|!|%|\$|@")
"""In a node's state: it cannot be counted on. A node that is draining still runs the jobs that it has."""


class NodesLackingError(RuntimeError):
    """Too few nodes of the allocation are well."""


def ill_nodes(names: Sequence[str]) -> dict[str, str]:
    """Nodes that Slurm does not hold to be well -> their state. SlurmError when there is no answer."""
    if not names:
        return {}
    said = ask(["sinfo", "--noheader", "--Node", f"--nodes={','.join(names)}", "--format=%N %T"], ANSWER_SECONDS)
    states = dict(line.split(None, 1) for line in said.splitlines() if line.strip())
    return {name: states[name].strip() for name in names if name in states and ILL.search(states[name].lower())}


def pick_nodes(
    groups: Sequence[NodeGroup], components: Sequence[Sequence[str]], ill: Collection[str] = ()
) -> tuple[str, ...]:
    """Exactly as many names as the groups need, component by component. NodesLackingError when that is not possible."""
    chosen: list[str] = []
    for group, names in zip(groups, components, strict=True):
        well = [name for name in names if name not in ill]
        if len(well) < group.num_nodes:
            raise NodesLackingError(
                f"{len(well)} of the nodes {', '.join(names)} are well, {group.num_nodes} are needed"
                + (f"; ill: {', '.join(name for name in names if name in ill)}" if ill else "")
            )
        chosen += well[: group.num_nodes]
    return tuple(chosen)
