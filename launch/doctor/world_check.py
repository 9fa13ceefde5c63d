"""What the trial's world showed: did the ranks meet, do they stand where they should, how long did it take."""

from __future__ import annotations

import re

from pekoe.launch.doctor.cluster_trial import QUEUE_SECONDS, TRIAL_SECONDS, Outcome
from pekoe.launch.doctor.rank_probe import HostReport, TrialReport
from pekoe.pipeline.runs.finding import Finding, counted, first_few, note, ok, problem

AREA = "world"
MPI_STEP = (
    "cluster.slurm.mpi: auto asks the library; by hand pmi2 for MPICH, pmix for Open MPI (what srun has: srun "
    "--mpi=list); or cluster.launcher: mpiexec"
)
SLOW_IMPORT = 20.0
SLOW_MEETING = 30.0
PMI = re.compile(r"\bPMI[X2_]?|OPAL|ORTE|mpi/pm|MPI_Init", re.I)


def judge(outcome: Outcome, site: str | None) -> list[Finding]:
    """Of a world that never was, too."""
    tried = f"{counted(outcome.num_ranks, 'rank')} on {counted(outcome.num_nodes, 'node')} by {outcome.how}"
    words = [f"  {line}" for line in outcome.words[-4:]]
    if outcome.waited:
        text = f"{tried}: no nodes within {QUEUE_SECONDS:.0f} s; the queue is full. What needs two nodes was not tried"
        again = f"salloc {outcome.salloc}, then in it: pekoe doctor {site or ''}".rstrip()
        return [note(AREA, "\n".join([text, *words[-1:]]), again)]
    if outcome.refused:
        return [problem(AREA, f"{tried}: no world can be started: {outcome.refused}", MPI_STEP)]
    if outcome.alone:
        text = f"{tried}: {len(outcome.alone)} ranks found no world, e.g. {min(outcome.alone)}"
        return [problem(AREA, "\n".join([text, outcome.command]), MPI_STEP)]
    if outcome.report is None:
        return [_failed(outcome, tried, words)]
    return [_met(outcome, tried, outcome.report), *_places(outcome.report), *_imports(outcome.report)]


def host_reports(report: TrialReport) -> list[HostReport]:
    """One of each host, in the order of ranks."""
    return [rank.host_report for rank in report.ranks if rank.host_report is not None]


def _failed(outcome: Outcome, tried: str, words: list[str]) -> Finding:
    said = "\n".join(outcome.words)
    if outcome.timed_out:
        phase = outcome.phase or "nothing was heard of it"
        text = f"{tried}: not over within {TRIAL_SECONDS:.0f} s; the last that was heard: {phase}"
        step = f"if ranks do not meet: {MPI_STEP}; if nodes are slow: once more"
        return problem(AREA, "\n".join([text, *words]), step)
    text = f"{tried}: ended with {outcome.code} before a report"
    if not outcome.phase and outcome.salloc:
        text = f"{tried}: Slurm gave no job"
        step = f"compare cluster.slurm with what the site has; it was asked: salloc {outcome.salloc}"
        return problem(AREA, "\n".join([text, *words]), step)
    step = MPI_STEP if PMI.search(said) else "the lines above are the launcher's and the ranks' own"
    return problem(AREA, "\n".join([text, *([outcome.command] if outcome.command else []), *words]), step)


def _met(outcome: Outcome, tried: str, report: TrialReport) -> Finding:
    by = f" ({report.ranks[0].launcher})"
    text = (
        f"{tried}{by}: one world after {report.mpi_seconds:.1f} s, all ranks hear all in "
        f"{report.round_trip_seconds * 1000:.1f} ms"
    )
    if report.mpi_seconds > SLOW_MEETING:
        return note(AREA, text, "start-up is slow: cluster.slurm.packed_environment spares the shared filesystem")
    return ok(AREA, "\n".join([text, *([outcome.command] if outcome.command else [])]))


def _places(report: TrialReport) -> list[Finding]:
    hosts = [rank.host for rank in report.ranks]
    distinct = list(dict.fromkeys(hosts))
    per_node = len(hosts) // len(distinct)
    expected = [host for host in distinct for _ in range(per_node)]
    listed = ", ".join(f"rank {rank.rank}: {rank.host}/{rank.local_rank}" for rank in report.ranks)
    if hosts != expected:
        step = "cluster.slurm.srun_extra must not change --distribution; SLURM_DISTRIBUTION of the site may"
        return [problem(AREA, f"ranks are not dealt out node by node: {listed}", step)]
    wrong = [rank.rank for number, rank in enumerate(report.ranks) if rank.local_rank != number % per_node]
    if wrong:
        return [problem(AREA, f"local ranks do not count from 0 on each node: {listed}", MPI_STEP)]
    return [ok(AREA, listed)]


def _imports(report: TrialReport) -> list[Finding]:
    found: list[Finding] = []
    for host in host_reports(report):
        if host.imports is None:
            continue
        if host.imports.error:
            found.append(problem(AREA, f"{host.host}: torch: {host.imports.error}", "reinstall torch, or its driver"))
        elif (host.imports.torch_seconds or 0.0) > SLOW_IMPORT:
            text = f"{host.host}: importing torch took {host.imports.torch_seconds:.0f} s"
            found.append(note(AREA, text, "cluster.slurm.packed_environment unpacks the environment once on each node"))
    if not found:
        seconds = [host.imports.torch_seconds or 0.0 for host in host_reports(report) if host.imports is not None]
        hosts = first_few(host.host for host in host_reports(report))
        found.append(ok(AREA, f"torch is imported within {max(seconds, default=0.0):.1f} s ({hosts})"))
    return found
