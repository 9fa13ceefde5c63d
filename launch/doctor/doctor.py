"""`pekoe doctor [CLUSTER] [CONFIG]`: is this machine, and the cluster behind it, fit for a run? What to do where not.

    versions, MPI, Slurm, the site's keys, models ─┐   asked here, each with a time limit
    a real world on two nodes (`cluster_trial`) ────┴─► findings ─► the same report as of a run's doctor

One file per kind of check, `*_check`: what is measured (on this machine or by a rank), and what it means. Takes at
most about a minute, submits at most one job of seconds, and leaves nothing behind. Imports neither torch nor MPI.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from pekoe.launch import environment, slurm_commands
from pekoe.launch.doctor import (
    cluster_trial,
    device_check,
    filesystem_check,
    model_check,
    mpi_check,
    network_check,
    node_check,
    site_check,
    slurm_check,
    version_check,
    world_check,
)
from pekoe.launch.doctor.cluster_trial import Outcome
from pekoe.launch.environment import Facts
from pekoe.pipeline.config.load import from_yaml_text, load, read_site, site_names
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.runs.finding import Finding, first_few, note, ok, problem, problems_of, report_json, report_text

EXIT_WELL, EXIT_PROBLEMS = 0, 1
CHECK_SECONDS = 50.0
"""What has given no answer by then is left behind."""
NODES = 2


def diagnose_cluster(
    site: str | None, *, config: str | None = None, as_json: bool = False, across_nodes: bool | None = None
) -> tuple[str, int]:
    """(report, exit code): 0 nothing is wrong, 1 there are problems.

    `site` is a preset of configs/clusters or a YAML file, `config` the configuration of a run (it may stand in place of
    the site, too). `across_nodes`: True tries two nodes in any case, False never asks Slurm for a job, None does when a
    site is given or this is a job.
    ConfigError (a ValueError) for a site or configuration that cannot be read.
    """
    if config is None and site is not None and _is_run(site):
        config, site = site, None
    overrides = [f"cluster.site={site}"] if site is not None else []
    loaded = load(config, overrides) if config is not None else from_yaml_text("", overrides)
    findings = examine(loaded, site or loaded.cluster.site, config is not None, across_nodes)
    code = EXIT_PROBLEMS if problems_of(findings) else EXIT_WELL
    subject: dict[str, object] = {"cluster": site, "config": config, "host": socket.gethostname()}
    if as_json:
        return report_json(subject, code, findings), code
    title = f"cluster {site or 'as it is here'}" + (f", run {config}" if config else "")
    return report_text(f"{title}, seen from {subject['host']}", findings), code


def _is_run(path: str) -> bool:
    """A YAML file that says more than where a run lives."""
    if not path.endswith((".yaml", ".yml")) or not Path(path).is_file():
        return False
    return any(key != "cluster" for key in read_site(path))


def examine(config: RunConfig, site: str | None, has_config: bool, across_nodes: bool | None) -> list[Finding]:
    """All findings, by area. Checks that only ask run beside the trial."""
    facts = environment.read(os.environ)
    needed = in_slurm(config, site, facts)
    where, num_nodes = _place_of_trial(facts, needed, across_nodes)
    checks = {
        "versions": lambda: version_check.judge_one(version_check.measure(socket.gethostname()), config.cluster.device),
        "mpi": lambda: mpi_check.examine(config, needed and slurm_commands.is_there()),
        "slurm": lambda: _slurm(config, needed, has_config),
        "models": lambda: model_check.judge(config) if has_config else [],
    }
    asked = {area: _Asked(area, check) for area, check in checks.items()}
    trial = _trial(config, site, where, num_nodes)
    found = [*(finding for one in asked.values() for finding in one.result()), *trial]
    areas = list(dict.fromkeys(finding.area for finding in found))
    return [finding for area in areas for finding in found if finding.area == area]


def in_slurm(config: RunConfig, site: str | None, facts: Facts) -> bool:
    """Do this site's worlds start in Slurm jobs?"""
    cluster = config.cluster
    if facts.job_id is not None or cluster.launcher == "srun":
        return True
    asks = any((cluster.slurm.partition, cluster.slurm.account, cluster.slurm.qos, cluster.slurm.gres))
    return site is not None and (cluster.launcher == "auto" or asks)


def _place_of_trial(facts: Facts, needed: bool, across_nodes: bool | None) -> tuple[str, int]:
    """(job, login or here; number of nodes)."""
    if not slurm_commands.is_there() or across_nodes is False:
        return "here", 1
    if facts.job_id is not None:
        return "job", min(NODES, max(1, len(facts.job_nodes)))
    return ("login", NODES) if needed or across_nodes else ("here", 1)


def _slurm(config: RunConfig, needed: bool, has_config: bool) -> list[Finding]:
    found = slurm_check.measure()
    findings = slurm_check.judge(found, config, needed)
    if not has_config:
        findings += site_check.keys(config)
    if "sbatch" in found.commands and found.configuration and needed:
        findings += site_check.judge(found, config, has_config)
        if has_config:
            findings += site_check.test_only(config)
    return findings


def _trial(config: RunConfig, site: str | None, where: str, num_nodes: int) -> list[Finding]:
    try:
        outcome = cluster_trial.run_trial(config, where, num_nodes)
    except (ValueError, OSError) as error:
        step = "correct the keys that it names; the rest was not tried on two nodes"
        return [problem(world_check.AREA, f"no trial can be made: {error}", step)]
    found = [*world_check.judge(outcome, site), *_after_trial(config, outcome)]
    if where == "here" and slurm_commands.is_there():
        sites = first_few(site_names())
        text = (
            f"no nodes of the cluster were tried; `pekoe doctor CLUSTER` tries two (CLUSTER: {sites}, or a YAML file)"
        )
        found.append(ok(world_check.AREA, text))
    elif where == "job" and num_nodes == 1:
        text = "this job has one node: what needs two was not tried"
        found.append(note(world_check.AREA, text, "salloc --nodes=2 …, or at a login node: pekoe doctor CLUSTER"))
    return found


def _after_trial(config: RunConfig, outcome: Outcome) -> list[Finding]:
    """What ranks have seen and tried."""
    report = outcome.report
    if report is None:
        return []
    hosts = world_check.host_reports(report)
    cluster = config.cluster
    root = Path(cluster.fileroot).expanduser().absolute()
    kinds = [(host.host, host.imports.device, host.imports.num_devices) for host in hosts if host.imports is not None]
    found = version_check.judge_same([host.versions for host in hosts])
    if report.filesystem is not None:
        found += filesystem_check.judge(report.filesystem)
        if not root.is_dir():
            found.append(ok(filesystem_check.AREA, f"{root} is not there yet: {report.filesystem.root} was tried"))
    found += network_check.judge([host.network for host in hosts], report.link)
    found += device_check.judge(
        [host.devices for host in hosts], [(rank.host, rank.device) for rank in report.ranks],
        [kind for kind in kinds if kind[1]], cluster.device, outcome.num_ranks // outcome.num_nodes,
    )  # fmt: skip
    used = {kind for _, kind, _ in kinds}
    return found + node_check.judge([host.node for host in hosts], cluster.slurm.cpus_per_task, used)


class _Asked:
    """One check in a thread of its own; a command that hangs does not hang the doctor."""

    def __init__(self, area: str, check: Callable[[], list[Finding]]) -> None:
        self._area = area
        self._found: list[Finding] | None = None
        self._thread = threading.Thread(target=self._run, args=(check,), daemon=True)
        self._thread.start()

    def result(self) -> list[Finding]:
        self._thread.join(CHECK_SECONDS)
        if self._found is None:
            text = f"no answer within {CHECK_SECONDS:.0f} s"
            return [note(self._area, text, "a command or a filesystem hangs: look at what this machine waits for")]
        return self._found

    def _run(self, check: Callable[[], list[Finding]]) -> None:
        try:
            self._found = check()
        except Exception as error:
            text = f"cannot be examined: {type(error).__name__}: {error}"
            self._found = [problem(self._area, text, "PEKOE_TRACEBACK=1 shows where")]
