"""Whether the site's partition, account, quality of service, devices and times are what this Slurm has, and whether the
job that a configuration makes would be taken at all (`sbatch --test-only`)."""

from __future__ import annotations

import getpass
import os
import subprocess

from pekoe.launch.allocation import place
from pekoe.launch.batch_script import BatchJob, batch_script, gres_request, nodes_needed
from pekoe.launch.doctor.slurm_check import AREA, ASK_SECONDS, SlurmFacts, default_partition, keeps_accounts
from pekoe.launch.slurm_commands import SlurmError, ask, without_identity
from pekoe.pipeline.config.cluster_checks import CLUSTER_CHECKS
from pekoe.pipeline.config.durations import duration_seconds
from pekoe.pipeline.config.findings import Findings
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.runs.finding import Finding, first_few, note, ok, problem

TEST_SECONDS = 15.0


def judge(facts: SlurmFacts, config: RunConfig, has_config: bool) -> list[Finding]:
    """`has_config`: a run's configuration was given, so that nodes and devices are really meant."""
    if not facts.partitions:
        return []
    found = [finding for name in _partitions(facts, config) for finding in _partition(facts, config, name, has_config)]
    if not _partitions(facts, config):
        found.append(problem(AREA, "no partition is the default", f"cluster.slurm.partition: {_names(facts)}"))
    found += _account(facts, config)
    if not any(finding.text.startswith("partition ") and finding.next_step for finding in found):
        found += _gres(config, has_config, _partitions(facts, config))
    return found


def keys(config: RunConfig) -> list[Finding]:
    """What the keys of `cluster` ask of each other, before any run is known."""
    found = Findings()
    for check in CLUSTER_CHECKS:
        check(config, found)
    step = "correct it in the site's file; docs/configuration.md tells each key"
    return [
        *(problem(AREA, text, step) for text in found.problems),
        *(note(AREA, text, step) for text in found.warnings),
    ]


def test_only(config: RunConfig) -> list[Finding]:
    """Asks sbatch about the very script of this configuration, and submits nothing."""
    try:
        placement = place(config)
        script = batch_script(BatchJob("pekoe-doctor", ("true",), "/dev/null"), config, placement)
    except ValueError as error:
        return [problem(AREA, f"no job can be made of this configuration: {error}")]
    try:
        done = subprocess.run(
            ["sbatch", "--test-only"], input=script, env=without_identity(os.environ), capture_output=True, text=True,
            timeout=TEST_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return [note(AREA, f"sbatch --test-only gave no answer: {error}")]
    said = " ".join(line.removeprefix("sbatch: ").strip() for line in done.stderr.splitlines() if line.strip())
    if done.returncode:
        step = "compare cluster.* with what the site has: scontrol show partition, sinfo -o '%P %G %l %D'"
        return [problem(AREA, f"sbatch would refuse this job: {said}", step)]
    return [ok(AREA, f"sbatch would take this job: {said}")]


def _partitions(facts: SlurmFacts, config: RunConfig) -> list[str]:
    own = config.cluster.rollout_nodes
    named = [config.cluster.slurm.partition or default_partition(facts), own.partition if own is not None else None]
    return list(dict.fromkeys(name for names in named if names for name in names.split(",")))


def _partition(facts: SlurmFacts, config: RunConfig, name: str, has_config: bool) -> list[Finding]:
    words = facts.partitions.get(name)
    if words is None:
        return [problem(AREA, f"partition {name!r} is not there", f"cluster.slurm.partition: {_names(facts)}")]
    found = []
    if words.get("State", "UP") != "UP":
        found.append(problem(AREA, f"partition {name} is {words['State']}", f"another of {_names(facts)}, or wait"))
    limit, longest = config.cluster.time_limit, words.get("MaxTime", "UNLIMITED")
    wanted = duration_seconds(limit) if limit is not None else None
    most = duration_seconds(longest)
    if wanted is not None and most is not None and wanted > most:
        text = f"partition {name}: at most {longest}; cluster.time_limit is {limit}: such a job never starts"
        step = f"cluster.time_limit={longest}, and cluster.continue_by to go on in the next job"
        found.append(problem(AREA, text, step))
    total, nodes = int(words.get("TotalNodes", "0")), config.cluster.n_nodes + config.cluster.spare_nodes
    allowed = words.get("MaxNodes", "UNLIMITED")
    if has_config and nodes > min(total, int(allowed) if allowed.isdigit() else total):
        text = f"partition {name}: {total} nodes, at most {allowed} a job; the run needs {nodes}"
        found.append(problem(AREA, text, "another partition, or fewer nodes: cluster.n_nodes"))
    if not found:
        found.append(ok(AREA, f"partition {name}: {total} nodes, at most {longest} a job"))
    return found


def _account(facts: SlurmFacts, config: RunConfig) -> list[Finding]:
    slurm = config.cluster.slurm
    if not keeps_accounts(facts) or (slurm.account is None and slurm.qos is None):
        return []
    try:
        user = getpass.getuser()
        rows = ask(
            ["sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={user}", "format=account,qos"],
            ASK_SECONDS,
        ).split()
    except SlurmError as error:
        return [note(AREA, f"account and qos are not known: {error}")]
    enforced = any(
        word in facts.configuration.get("AccountingStorageEnforce", "") for word in ("assoc", "qos", "limits")
    )
    wrong = problem if enforced else note
    accounts = {row.partition("|")[0] for row in rows}
    found = []
    if slurm.account is not None and slurm.account not in accounts:
        allowed = first_few(sorted(accounts)) or "none"
        step = f"cluster.slurm.account: {allowed}" if accounts else "ask the site for an account"
        found.append(wrong(AREA, f"account {slurm.account!r} is not {user}'s (these are: {allowed})", step))
    qos = {name for row in rows for name in row.partition("|")[2].split(",") if name}
    if slurm.qos is not None and slurm.qos not in qos:
        step = f"cluster.slurm.qos: {first_few(sorted(qos)) or 'null'}"
        found.append(wrong(AREA, f"quality of service {slurm.qos!r} is not {user}'s", step))
    return found or [ok(AREA, f"account {slurm.account or 'default'}, qos {slurm.qos or 'default'}: allowed")]


def _gres(config: RunConfig, has_config: bool, partitions: list[str]) -> list[Finding]:
    try:
        request = gres_request(config, nodes_needed(config, place(config))[0], 0) if has_config else _site_gres(config)
    except ValueError as error:
        return [problem(AREA, str(error))] if has_config else []
    if not request:
        return [ok(AREA, "no generic resource is asked for")]
    try:
        command = [
            "sinfo",
            "--noheader",
            "--format=%D %G",
            *([f"--partition={','.join(partitions)}"] if partitions else []),
        ]
        offered = [line.split(None, 1) for line in ask(command, ASK_SECONDS).splitlines() if line.strip()]
    except SlurmError as error:
        return [note(AREA, f"which generic resources nodes have is not known: {error}")]
    enough = sum(int(count) for count, gres in offered if has_gres(gres, request))
    names = sorted({gres for _, gres in offered})
    if not enough:
        text = f"no node of {', '.join(partitions) or 'this cluster'} has gres {request}"
        return [problem(AREA, text, f"cluster.slurm.gres, cluster.n_gpus_per_node: nodes have {first_few(names)}")]
    return [ok(AREA, f"{enough} nodes have gres {request}")]


def _site_gres(config: RunConfig) -> str | None:
    """Of a site without a run: one device."""
    name = config.cluster.slurm.gres
    if name is None and config.cluster.device != "auto":
        from pekoe.pipeline.devices.device import choose

        name = choose(config.cluster.device).gres_name
    return f"{name}:1" if name else None


def has_gres(offered: str, request: str) -> bool:
    """Does a node with `gpu:h100:2(S:0),npu:ascend910b:2` give `gpu:h100:1`, or `gpu:1`?"""
    *wanted, count = request.split(":")
    if not count.isdigit():
        wanted, count = [*wanted, count], "1"
    total = 0
    for part in offered.split("(null)")[0].split(","):
        words = part.partition("(")[0].split(":")
        number = words.pop() if words[-1].isdigit() else "1"
        if words[: len(wanted)] == wanted:
            total += int(number)
    return total >= int(count)


def _names(facts: SlurmFacts) -> str:
    return first_few(sorted(facts.partitions), 8)
