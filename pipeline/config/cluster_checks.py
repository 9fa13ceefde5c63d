"""What the keys of `cluster` ask of each other: nodes, how a job goes on, what Slurm, MPI and a container are told."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from pekoe.pipeline.config.durations import duration_seconds
from pekoe.pipeline.config.findings import Findings, PlacementFacts
from pekoe.pipeline.config.run import RunConfig

GRES = re.compile(r"[A-Za-z][\w.-]*(:[\w.-]*[A-Za-z_.-][\w.-]*)?")
MEMORY = re.compile(r"\d+([KMGT]B?)?", re.IGNORECASE)
OWN_VARIABLES = re.compile(r"(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|(SLURM|SBATCH|PMI|PMIX|PMI2)_\w+")
"""Of torch and of the process manager: one value for all ranks would be wrong on all but one."""
WORDS = ("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude", "mem", "gres")
"""Keys of one word each on a line of sbatch."""
SBATCH_KEYS = {
    "--nodes": "cluster.n_nodes and cluster.spare_nodes", "-N": "cluster.n_nodes and cluster.spare_nodes",
    "--ntasks": "allocation", "-n": "allocation", "--ntasks-per-node": "allocation",
    "--cpus-per-task": "cluster.slurm.cpus_per_task", "-c": "cluster.slurm.cpus_per_task",
    "--gres": "cluster.slurm.gres", "--partition": "cluster.slurm.partition", "-p": "cluster.slurm.partition",
    "--account": "cluster.slurm.account", "-A": "cluster.slurm.account", "--qos": "cluster.slurm.qos",
    "-q": "cluster.slurm.qos", "--constraint": "cluster.slurm.constraint", "-C": "cluster.slurm.constraint",
    "--reservation": "cluster.slurm.reservation", "--nodelist": "cluster.slurm.nodelist",
    "-w": "cluster.slurm.nodelist", "--exclude": "cluster.slurm.exclude", "-x": "cluster.slurm.exclude",
    "--exclusive": "cluster.slurm.exclusive", "--mem": "cluster.slurm.mem", "--time": "cluster.time_limit",
    "-t": "cluster.time_limit", "--signal": "cluster.slurm.signal_seconds", "--requeue": "cluster.continue_by",
    "--no-requeue": "cluster.continue_by", "--no-kill": "cluster.spare_nodes", "-k": "cluster.spare_nodes",
    "--export": "cluster.slurm.environment", "--open-mode": "nothing: logs are appended to",
    "--output": "nothing: it lies in the run directory", "-o": "nothing: it lies in the run directory",
    "--job-name": "trial_name", "-J": "trial_name", "--array": "nothing: pekoe submit --array", "-a": "nothing: "
    "pekoe submit --array",
}  # fmt: skip
"""Flags that the script has already, and the key that sets each."""
SRUN_KEYS = {
    flag: SBATCH_KEYS[flag]
    for flag in ("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--cpus-per-task", "-c", "--gres",
                 "--nodelist", "-w", "--export", "--no-kill", "-k", "--output", "-o", "--open-mode")
} | {
    "--mpi": "cluster.slurm.mpi", "--kill-on-bad-exit": "nothing: a dead rank ends its world",
    "-K": "nothing: a dead rank ends its world", "--distribution": "allocation", "-m": "allocation",
    "--container-image": "cluster.slurm.container.image", "--container-mounts": "cluster.slurm.container.mounts",
}  # fmt: skip


def check_nodes(config: RunConfig, placement: PlacementFacts, findings: Findings) -> None:
    """The world fits the nodes, and no node is left empty."""
    cluster, own = config.cluster, config.cluster.rollout_nodes
    kinds = [("cluster", "allocation", placement.world_size, cluster.n_nodes, cluster.n_gpus_per_node, "ranks")]
    if own is not None:
        trainers, rollouts = set(placement.trainer_ranks), set(placement.rollout_ranks)
        if not rollouts or trainers & rollouts:
            findings.wrong(
                "allocation", str(placement), "has no rollout ranks apart from its trainer ranks, which "
                "cluster.rollout_nodes asks for; allowed: e.g. hf:d4+fsdp:d4, or cluster.rollout_nodes: null",
            )  # fmt: skip
            return
        devices = own.n_gpus_per_node or cluster.n_gpus_per_node
        kinds = [
            ("cluster", "allocation", len(trainers), cluster.n_nodes, cluster.n_gpus_per_node, "trainer ranks"),
            ("cluster.rollout_nodes", "allocation", len(rollouts), own.n_nodes, devices, "rollout ranks"),
        ]
    for section, key, ranks, nodes, devices, what in kinds:
        if ranks > nodes * devices:
            allowed = f"<= {section}.n_nodes x {section}.n_gpus_per_node ({nodes} x {devices})"
            findings.wrong(key, str(placement), f"has {ranks} {what}; allowed: {allowed}")
        elif ranks < nodes:
            findings.wrong(
                f"{section}.n_nodes", nodes, f"leaves nodes empty: there are {ranks} {what}; allowed: <= {ranks}"
            )


def _check_rollout_nodes(config: RunConfig, findings: Findings) -> None:
    cluster = config.cluster
    if cluster.rollout_nodes is None:
        return
    if cluster.launcher == "mpiexec":
        findings.wrong(
            "cluster.launcher", "mpiexec", "sees only the first component of a heterogeneous job "
            "(cluster.rollout_nodes); allowed with it: auto, srun",
        )  # fmt: skip
    if cluster.spare_nodes > 0:
        findings.wrong(
            "cluster.spare_nodes", cluster.spare_nodes, "is not allowed with cluster.rollout_nodes: a spare node is of "
            "one kind only; allowed: 0",
        )  # fmt: skip


def _check_continuing(config: RunConfig, findings: Findings) -> None:
    """What happens after a stop or a failure, and whether Slurm's warning comes early enough for it."""
    cluster, slurm = config.cluster, config.cluster.slurm
    if cluster.launcher == "none":
        for key, value, off in (
            ("continue_by", cluster.continue_by, "none"),
            ("restart_in_place", cluster.restart_in_place, 0),
        ):
            if value != off:
                findings.wrong(
                    f"cluster.{key}", value, "needs a launcher that outlives the world; "
                    f"allowed with cluster.launcher none: {off}",
                )  # fmt: skip
    if cluster.spare_nodes > 0 and cluster.restart_in_place == 0:
        findings.wrong(
            "cluster.spare_nodes", cluster.spare_nodes, "are never used when cluster.restart_in_place is 0; "
            "allowed: 0, or cluster.restart_in_place >= 1",
        )  # fmt: skip
    if slurm.signal_seconds < cluster.grace_seconds:
        text = f"is below cluster.grace_seconds ({cluster.grace_seconds:g}): a job would end before its save may"
        if cluster.continue_by == "none":
            findings.warn("cluster.slurm.signal_seconds", slurm.signal_seconds, text)
        else:
            allowed = f"allowed with cluster.continue_by {cluster.continue_by}: >= {cluster.grace_seconds:g}"
            findings.wrong("cluster.slurm.signal_seconds", slurm.signal_seconds, f"{text}; {allowed}")
    limit = duration_seconds(str(cluster.time_limit))
    if limit is not None and cluster.continue_by != "none" and limit <= slurm.signal_seconds:
        findings.wrong(
            "cluster.slurm.signal_seconds", slurm.signal_seconds, "stops a job as soon as it starts; "
            f"allowed: < cluster.time_limit ({cluster.time_limit})",
        )  # fmt: skip


def _check_requests(config: RunConfig, findings: Findings) -> None:
    """What Slurm is asked for, word by word: sbatch would refuse it later, or take it for something else."""
    sections = [("cluster.slurm", config.cluster.slurm), ("cluster.rollout_nodes", config.cluster.rollout_nodes)]
    for prefix, section in sections:
        for name in WORDS:
            value = getattr(section, name, None)
            if value is not None and re.search(r"\s|^-", value):
                findings.wrong(f"{prefix}.{name}", value, "is not one word; allowed: what sbatch takes, without blanks")
        gres, mem = getattr(section, "gres", None), getattr(section, "mem", None)
        if gres and not GRES.fullmatch(gres):
            findings.wrong(
                f"{prefix}.gres", gres, "is not the name of one device; allowed: NAME or NAME:TYPE (gpu, gpu:h100, "
                "npu:ascend910b; the count is the ranks on a node), '' for none, or null",
            )  # fmt: skip
        if mem is not None and not MEMORY.fullmatch(mem):
            findings.wrong(
                f"{prefix}.mem", mem, "is no amount of memory; allowed: a number and K, M, G or T, e.g. 200G"
            )
        _check_flags(f"{prefix}.extra", getattr(section, "extra", ()), SBATCH_KEYS, findings)
    slurm = config.cluster.slurm
    _check_flags("cluster.slurm.srun_extra", slurm.srun_extra, SRUN_KEYS, findings)
    for name in slurm.environment:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            findings.wrong("cluster.slurm.environment", name, "is no name of a variable; allowed: letters, digits, _")
        elif OWN_VARIABLES.fullmatch(name):
            findings.wrong("cluster.slurm.environment", name, "is set for each rank by its launcher; allowed: others")


def _check_flags(key: str, flags: Iterable[str], own: dict[str, str], findings: Findings) -> None:
    for flag in flags:
        name = re.split(r"[=\s]", flag, maxsplit=1)[0]
        if not re.fullmatch(r"-\w|--[a-z][a-z0-9-]*", name) or "\n" in flag:
            findings.wrong(key, flag, "is no flag; allowed: one flag in each entry, e.g. --mail-type=END")
        elif name in own:
            findings.wrong(key, flag, f"is set already; allowed instead: {own[name]}")


def _check_mpi(config: RunConfig, findings: Findings) -> None:
    cluster, slurm = config.cluster, config.cluster.slurm
    if (slurm.mpi != "auto" and not re.fullmatch(r"[\w.-]+", slurm.mpi)) or slurm.mpi == "none":
        findings.wrong(
            "cluster.slurm.mpi", slurm.mpi, "would make every rank a world of its own; allowed: auto, or a name that "
            "`srun --mpi=list` shows (pmi2, pmix, cray_shasta)",
        )  # fmt: skip
    inside = slurm.container.kind != "none"
    if slurm.mpi_library is not None and not inside and "/" in slurm.mpi_library:
        _check_file("cluster.slurm.mpi_library", slurm.mpi_library, "libmpi.so of the site's MPI", findings)
    if slurm.mpiexec and cluster.launcher not in ("mpiexec", "none"):
        findings.warn("cluster.slurm.mpiexec", slurm.mpiexec, "has no effect unless cluster.launcher is mpiexec")
    if inside and slurm.mpi == "auto" and cluster.launcher in ("auto", "srun"):
        findings.wrong(
            "cluster.slurm.mpi", "auto", "cannot look into a container (cluster.slurm.container); allowed with one: "
            "pmi2 for MPICH inside, pmix for Open MPI inside",
        )  # fmt: skip


def _check_container(config: RunConfig, findings: Findings) -> None:
    slurm, container, key = config.cluster.slurm, config.cluster.slurm.container, "cluster.slurm.container"
    if slurm.packed_environment is not None:
        _check_file("cluster.slurm.packed_environment", slurm.packed_environment, "archive", findings)
        if container.kind != "none":
            findings.wrong(
                "cluster.slurm.packed_environment", slurm.packed_environment,
                f"is not allowed with {key}.kind {container.kind}: the interpreter is the container's; allowed: null",
            )  # fmt: skip
    if container.kind == "none":
        if container.image:
            findings.wrong(f"{key}.image", container.image, f"needs {key}.kind; allowed: apptainer or enroot for it")
        return
    if not container.image:
        findings.wrong(f"{key}.image", "", f"is not set; allowed with {key}.kind {container.kind}: an image")
    elif container.image.startswith("/") or (container.kind == "apptainer" and "://" not in container.image):
        _check_file(f"{key}.image", container.image, "image", findings)
    if container.kind == "enroot" and config.cluster.launcher == "mpiexec":
        findings.wrong(f"{key}.kind", "enroot", "is started by srun (pyxis); allowed with cluster.launcher mpiexec: "
                       "apptainer or none")  # fmt: skip
    if config.cluster.device == "auto":
        findings.wrong(
            "cluster.device", "auto", f"does not say which devices {key} must let in; allowed with it: cpu, cuda or npu"
        )
    for mount in container.mounts:
        if not re.fullmatch(r"/[^:,]*(:/[^:,]*)?", mount):
            findings.wrong(f"{key}.mounts", mount, "is no mount; allowed: /HOST or /HOST:/INSIDE, without commas")


def _check_file(key: str, path: str, what: str, findings: Findings) -> None:
    if not Path(path).is_absolute():
        findings.wrong(key, path, f"is a relative path; allowed: the absolute path of the {what}")
    elif not Path(path).exists():
        findings.wrong(key, path, f"does not exist; allowed: the absolute path of the {what}")


CLUSTER_CHECKS: tuple[Callable[[RunConfig, Findings], None], ...] = (
    _check_rollout_nodes,
    _check_continuing,
    _check_requests,
    _check_mpi,
    _check_container,
)
