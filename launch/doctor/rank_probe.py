"""The program of each rank of the doctor's trial: joins the world as a rank of a run does, looks around, tries things
with the other ranks, and says what it found on its standard output.

    python -u -m pekoe.launch.doctor.rank_probe '{"num_ranks": 4, "fileroot": …}'

`Said` lines are all that it prints there. It ends with 0 whenever it could say something: what was found is judged by
who started it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec

from pekoe.launch import environment
from pekoe.launch.doctor import device_check, network_check, node_check, version_check
from pekoe.launch.doctor.filesystem_trial import FilesystemFacts, exercise
from pekoe.launch.doctor.import_probe import ImportFacts, Imports
from pekoe.launch.doctor.rank_pair import Pair
from pekoe.launch.environment import Facts
from pekoe.launch.world import World, WorldSettings, WorldSizeError

MARK = "pekoe-doctor "
EXCHANGE_SECONDS = 20.0
ROUND_TRIPS = 50


class Spec(msgspec.Struct):
    """What a rank is told."""

    num_ranks: int
    fileroot: str
    folder: str
    """Of the filesystem's trial, under fileroot."""
    device: str
    """cluster.device"""
    import_seconds: float = 25.0


class HostReport(msgspec.Struct):
    """Of one host, by its first rank."""

    host: str
    versions: version_check.VersionFacts
    node: node_check.NodeFacts
    network: network_check.NetworkFacts
    devices: device_check.DeviceFacts
    imports: ImportFacts | None = None


class RankReport(msgspec.Struct):
    """Of one rank."""

    rank: int
    host: str
    launcher: str
    local_rank: int
    local_size: int | None
    device: device_check.RankDevice
    host_report: HostReport | None = None


class TrialReport(msgspec.Struct):
    """All that rank 0 knows in the end."""

    ranks: list[RankReport]
    mpi_seconds: float
    """From the start of rank 0's program to the whole world."""
    round_trip_seconds: float
    """All ranks hear from all ranks, over MPI."""
    filesystem: FilesystemFacts | None = None
    link: network_check.LinkFacts | None = None


class Said(msgspec.Struct):
    """One line of output: a phase that was reached, an end without a world, or the report."""

    phase: str = ""
    alone: str = ""
    """Why this rank found no world."""
    refused: str = ""
    """Why no world was started."""
    report: TrialReport | None = None


def main(argument: str) -> None:
    """Does not return: leaves by `os._exit`, since MPI may not be able to end in order."""
    spec = msgspec.json.decode(argument, type=Spec)
    began = time.monotonic()
    facts = environment.read(os.environ)
    imports = Imports(spec.device) if facts.local_rank == 0 else None
    settings = WorldSettings(setup_seconds=EXCHANGE_SECONDS)
    try:
        world = World.join(spec.num_ranks, settings, facts=facts)
    except WorldSizeError as error:
        say(Said(alone=f"rank {facts.rank} on {facts.host}: {error}"))
        if imports is not None:
            imports.end()
        os._exit(0)
    with world:
        report = _examine(world, spec, began, imports)
        if world.rank == 0:
            say(Said(report=report))
    os._exit(0)


def _examine(world: World, spec: Spec, began: float, imports: Imports | None) -> TrialReport:
    mpi_seconds = time.monotonic() - began
    facts = world.facts
    _phase(world, "the world has met")
    round_trip = _round_trip(world)
    hosts = list(world.hosts)
    watcher = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), min(1, world.size - 1))
    mine = RankReport(
        world.rank, facts.host, facts.launcher, facts.local_rank, facts.local_size,
        device_check.device_of(facts, spec.device),
    )  # fmt: skip
    first_here = hosts.index(hosts[world.rank]) == world.rank
    if first_here:
        mine.host_report = _host_report(facts)
    _phase(world, "each node has looked around")
    pair = Pair(world, watcher)
    link = filesystem = None
    if world.size > 1:
        link = network_check.connect(pair, world.num_hosts)
        _phase(world, "a connection was tried")
        root = Path(spec.fileroot)
        filesystem = exercise(pair, root, root / spec.folder, hosts)
        _phase(world, "the filesystem was tried")
    if imports is not None:
        found = imports.result(spec.import_seconds)
        if mine.host_report is not None:
            mine.host_report.imports = found
    everybody = [msgspec.convert(one, RankReport) for one in world.collect(mine)]
    return TrialReport(everybody, mpi_seconds, round_trip, filesystem, link)


def _host_report(facts: Facts) -> HostReport:
    return HostReport(
        host=facts.host,
        versions=version_check.measure(facts.host),
        node=node_check.measure(facts, os.environ),
        network=network_check.measure(facts, os.environ),
        devices=device_check.measure(facts.host),
    )


def _round_trip(world: World) -> float:
    began = time.perf_counter()
    for _ in range(ROUND_TRIPS):
        world.collect(world.rank)
    return (time.perf_counter() - began) / ROUND_TRIPS


def _phase(world: World, phase: str) -> None:
    world.set_phase(phase)
    if world.rank == 0:
        say(Said(phase=phase))


def say(said: Said) -> None:
    sys.stdout.write(f"{MARK}{msgspec.json.encode(said).decode()}\n")
    sys.stdout.flush()


def heard(line: str) -> Said | None:
    """What a line of a rank's output says; None for what others print. May be preceded by a launcher's own mark."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        return msgspec.json.decode(text, type=Said)
    except msgspec.DecodeError:
        return None


if __name__ == "__main__":
    main(sys.argv[1])
