"""What this Slurm is and what a run may expect of it: its commands, its controller, preemption, requeueing, arrays,
accounting. Every question has a time limit; where there is no scontrol (in containers) less is known, and said."""

from __future__ import annotations

import re
import shutil
import time

import msgspec

from pekoe.launch.slurm_commands import SlurmError, ask
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.runs.finding import Finding, note, ok, problem

AREA = "slurm"
ASK_SECONDS = 10.0
SLOW_SECONDS = 3.0
COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sacct", "salloc")
NEEDED = ("sbatch", "srun", "squeue", "scancel")


class SlurmFacts(msgspec.Struct):
    """Asked once; what gave no answer is empty, and `errors` says why."""

    commands: list[str]
    version: str = ""
    ping_seconds: float = 0.0
    configuration: dict[str, str] = {}
    """`scontrol show config`."""
    partitions: dict[str, dict[str, str]] = {}
    """`scontrol show partition`, name by name."""
    accounting: str | None = None
    """Why sacct gives nothing; "" = it works, None = was not asked."""
    errors: list[str] = []


def measure() -> SlurmFacts:
    facts = SlurmFacts([name for name in COMMANDS if shutil.which(name)])
    if "srun" in facts.commands:
        facts.version = _said(facts, ["srun", "--version"]).split(" ")[-1].strip()
    if "scontrol" in facts.commands:
        began = time.monotonic()
        config = _said(facts, ["scontrol", "show", "config"])
        facts.ping_seconds = time.monotonic() - began
        facts.configuration = _pairs(config)
        if config:
            partitions = _said(facts, ["scontrol", "--oneliner", "--all", "show", "partition"])
            facts.partitions = {
                words["PartitionName"]: words for words in map(_words, partitions.splitlines()) if words
            }
    if facts.configuration and keeps_accounts(facts) and "sacct" in facts.commands:
        try:
            ask(["sacct", "--noheader", "--allocations", "--starttime=now-1hours"], ASK_SECONDS)
            facts.accounting = ""
        except SlurmError as error:
            facts.accounting = str(error)
    return facts


def keeps_accounts(facts: SlurmFacts) -> bool:
    return not facts.configuration.get("AccountingStorageType", "none").endswith("none")


def judge(facts: SlurmFacts, config: RunConfig, needed: bool) -> list[Finding]:
    """`needed`: the site's worlds start in Slurm jobs."""
    lacking = [name for name in NEEDED if name not in facts.commands]
    if len(lacking) == len(NEEDED):
        if not needed:
            return [ok(AREA, "not on this machine: runs start by mpiexec")]
        text = "sbatch and srun are not on this machine, but the site starts its worlds in Slurm jobs"
        return [problem(AREA, text, "run this on a login node, or inside a job; PATH must hold Slurm's commands")]
    found = []
    if lacking:
        text = f"{', '.join(lacking)}: not on PATH"
        found.append(problem(AREA, text, "see that PATH holds all of Slurm's commands (a container hides them)"))
    if "scontrol" not in facts.commands:
        text = f"Slurm {facts.version}; scontrol is not here: its limits are not known. Runs start without it"
        step = "cluster.continue_by: requeue needs it where the driver runs; chain does not"
        return [*found, note(AREA, text, step if config.cluster.continue_by == "requeue" else "")]
    if not facts.configuration:
        said = facts.errors[-1].splitlines()[-1] if facts.errors else "it said nothing"
        text = f"the controller does not answer: {said}"
        if not needed:
            return [*found, note(AREA, f"{text}. Runs start here by mpiexec and need none")]
        return [*found, problem(AREA, text, "scontrol ping; SLURM_CONF, when set, must name this cluster's file")]
    name = facts.configuration.get("ClusterName", "?")
    text = f"Slurm {facts.version or facts.configuration.get('SLURM_VERSION', '?')}, cluster {name}, "
    text += f"controller answers in {facts.ping_seconds:.2f} s"
    slow = facts.ping_seconds > SLOW_SECONDS
    found.append(note(AREA, text, "it is busy: submit few jobs at a time") if slow else ok(AREA, text))
    return [*found, _arrays(facts), *_continuing(facts, config), _accounting(facts)]


def preemption_of(facts: SlurmFacts, partition: str | None) -> tuple[str, int]:
    """(what happens to a job there: OFF, REQUEUE, CANCEL, SUSPEND; seconds from the signal to the end)."""
    words = facts.partitions.get(partition or default_partition(facts), {})
    mode = words.get("PreemptMode") or facts.configuration.get("PreemptMode", "OFF")
    if facts.configuration.get("PreemptType", "").endswith("none"):
        mode = "OFF"
    grace = words.get("GraceTime", "0")
    return mode.split(",")[-1], int(grace) if grace.isdigit() else 0


def default_partition(facts: SlurmFacts) -> str:
    return next((name for name, words in facts.partitions.items() if words.get("Default") == "YES"), "")


def _arrays(facts: SlurmFacts) -> Finding:
    size = int(facts.configuration.get("MaxArraySize", "0"))
    if size < 1:
        return note(AREA, "this cluster takes no job arrays (MaxArraySize=0)", "submit runs one by one")
    return ok(AREA, f"arrays have indices below {size:,}; larger sweeps become several arrays")


def _continuing(facts: SlurmFacts, config: RunConfig) -> list[Finding]:
    found: list[Finding] = []
    cluster = config.cluster
    wait = re.match(r"\d+", facts.configuration.get("KillWait", "30"))
    kill = int(wait[0]) if wait else 30
    warned = "preempt_send_user_signal" in facts.configuration.get("SlurmctldParameters", "")
    for partition in (cluster.slurm.partition or default_partition(facts)).split(","):
        if partition not in facts.partitions:
            continue
        mode, grace = preemption_of(facts, partition)
        if mode == "OFF":
            found.append(ok(AREA, f"partition {partition}: jobs are not preempted"))
            continue
        signal = "USR2 to the driver" if warned else "SIGTERM to ranks"
        text = f"partition {partition}: preempted by {mode}: {signal}, the end {grace} s later"
        if mode == "CANCEL" and cluster.continue_by == "requeue":
            step = "cluster.continue_by: chain (a cancelled job is not requeued)"
            found.append(problem(AREA, f"{text}; cluster.continue_by is requeue", step))
        elif mode in ("REQUEUE", "CANCEL") and grace < cluster.grace_seconds:
            text += f"; cluster.grace_seconds is {cluster.grace_seconds:g}"
            step = f"cluster.grace_seconds={max(grace - 5, 5)}, and save often (recover.freq_steps)"
            found.append(note(AREA, text, step))
        else:
            found.append(ok(AREA, text))
    text = f"after scancel or the time limit: SIGTERM, SIGKILL {kill} s later"
    text += f"; the job is warned {cluster.slurm.signal_seconds} s before its end (cluster.slurm.signal_seconds)"
    if cluster.slurm.signal_seconds < cluster.grace_seconds:
        text += f", cluster.grace_seconds is {cluster.grace_seconds:g}"
        step = f"cluster.slurm.signal_seconds={int(cluster.grace_seconds) + 60}"
        return [*found, note(AREA, text, step)]
    return [*found, ok(AREA, text)]


def _accounting(facts: SlurmFacts) -> Finding:
    if not keeps_accounts(facts):
        age = facts.configuration.get("MinJobAge", "?")
        text = f"no accounting: the state of an ended job is known for {age} only, then by the run's own files"
        return ok(AREA, text)
    if facts.accounting is None:
        return note(AREA, "sacct is not on PATH: states of ended jobs come from squeue while it knows them")
    if facts.accounting:
        text = f"sacct gives nothing: {facts.accounting}"
        return note(AREA, text, "states come from squeue while it knows a job; ask the site about slurmdbd")
    return ok(AREA, "accounting works (sacct)")


def _said(facts: SlurmFacts, command: list[str]) -> str:
    """After a question without an answer no other is asked."""
    if facts.errors:
        return ""
    try:
        return ask(command, ASK_SECONDS)
    except SlurmError as error:
        facts.errors.append(str(error))
        return ""


def _pairs(text: str) -> dict[str, str]:
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _words(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)
