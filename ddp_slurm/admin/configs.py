"""cluster.yaml -> slurm.conf, gres.conf, cgroup.conf and slurmdbd.conf for one Slurm release. Pure."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from ddp_slurm.admin.slurm_releases import DEFAULT_RELEASE, known_options, slurm_release
from ddp_slurm.cluster import Cluster, GpuModel, Node
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.files import write_whole
from ddp_slurm.hostlist import compress_hostlist
from ddp_slurm.render.templating import render_template

PROBED_MEMORY_PERCENT = 95
"""Of the memory that a machine has is given to jobs. The rest is the system's, and a new kernel may take some more."""

FIRST_RENDER_MINOR = 128
"""DRM numbers its render nodes from here (include/drm/drm_file.h of the kernel): AMD's cards, never NVIDIA's."""


def schedulable_memory_mb(probed_mb: int) -> int:
    """What cluster.yaml says of a machine on which ``probed_mb`` MiB were found.

    It becomes RealMemory, and a job may ask for all of it: slurmd drains a node that has less than RealMemory.
    """
    return probed_mb * PROBED_MEMORY_PERCENT // 100


class ConfigsError(DdpSlurmError):
    """The cluster cannot be written as a Slurm configuration."""


@dataclass(frozen=True, slots=True)
class LabSettings:
    """What several hosts on one machine need otherwise; the rest of the files is what users get.

    Paths may hold ``%n``, which Slurm replaces by the node's name.
    """

    state_dir: str
    spool_dir: str
    log_dir: str
    run_dir: str
    munge_socket: str | None = None
    controller: str | None = None
    controller_address: str | None = None
    slurm_user: str = "root"
    slurmctld_port: int = 6817
    slurmd_port: int = 6818
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Node name -> address."""
    gpu_device_prefix: str = "/dev/nvidia"
    """The device files are PREFIX0, PREFIX1, ...; all hosts of the lab share them."""
    scheduler_parameters: tuple[str, ...] = ("bf_interval=1", "sched_interval=2")


USERS_MACHINES = LabSettings(
    state_dir="/var/lib/slurm/slurmctld",
    spool_dir="/var/lib/slurm/slurmd",
    log_dir="/var/log/slurm",
    run_dir="/run",
    slurm_user="slurm",
    scheduler_parameters=(),
)
"""Where Debian's and Ubuntu's packages keep their files."""


def render_configs(
    cluster: Cluster,
    *,
    slurm_version: str = DEFAULT_RELEASE,
    lab: LabSettings | None = None,
    slurmdbd: bool = False,
    health_check: str | None = None,
) -> dict[str, str]:
    """File name -> text of slurm.conf, gres.conf and cgroup.conf, with ``slurmdbd`` also slurmdbd.conf.

    ``health_check`` is the path of a program that slurmd runs every five minutes.
    Raises ConfigsError for nodes that cannot be written, SlurmReleaseError for a release that is not known.
    """
    release = slurm_release(slurm_version)
    known = known_options(release)
    settings = lab or USERS_MACHINES
    _check(cluster, health_check)
    nodes = _node_lines(cluster, settings)
    controller = settings.controller or cluster.controller_name
    addresses = {node.name: node.address for node in cluster.nodes} | dict(settings.addresses)
    ipv6 = any(":" in (address or "") for address in addresses.values())
    # Without its configuration slurmd of 22.05 knows nothing of IPv6 and cannot fetch it that way; 24.11 can.
    configless = lab is None and not (ipv6 and release < "24.11")
    values = {
        "release": release,
        "known": known,
        "lab": lab is not None,
        "cluster_name": cluster.name.lower(),
        "controller": controller,
        "controller_address": settings.controller_address or addresses.get(controller),
        "ipv6": ipv6,
        "memory_percent": PROBED_MEMORY_PERCENT,
        "scheduler_parameters": (
            "bf_hetjob_immediate",
            "whole_hetjob",
            *settings.scheduler_parameters,
        ),
        "slurmctld_parameters": [
            parameter
            for parameter, wanted in (
                ("enable_configless", configless),
                ("node_reg_mem_percent=95", True),
            )
            if wanted and f"SlurmctldParameters={parameter.partition('=')[0]}" in known
        ],
        "def_mem_per_cpu": min(node["real_memory_mb"] // node["cpus"] for node in nodes) or 1,
        "nodes": nodes,
        "partitions": _partitions(cluster.nodes),
        "gres_lines": _gres_lines(cluster.nodes, settings.gpu_device_prefix),
        "slurmdbd": slurmdbd,
        "health_check": health_check,
        **{
            name: getattr(settings, name)
            for name in (
                "state_dir",
                "spool_dir",
                "log_dir",
                "run_dir",
                "munge_socket",
                "slurm_user",
                "slurmctld_port",
                "slurmd_port",
            )
        },
    }
    names = ["slurm.conf", "gres.conf", "cgroup.conf", *(["slurmdbd.conf"] if slurmdbd else [])]
    return {name: render_template(f"{name}.j2", **values) for name in names}


def _check(cluster: Cluster, health_check: str | None) -> None:
    faults = []
    for node in cluster.nodes:
        if node.gpu_count > FIRST_RENDER_MINOR:
            faults.append(
                f"node {node.name!r} has {node.gpu_count} GPUs; a node can have at most {FIRST_RENDER_MINOR}"
            )
        missing = [
            key
            for key, there in (("cpus", node.cpus or _topology(node)), ("memory", node.memory_mb))
            if not there
        ]
        if missing:
            faults.append(
                f"node {node.name!r} has no {' and no '.join(missing)}; 'ddp-slurm cluster probe' finds them"
            )
        topology = _topology(node)
        if topology and node.cpus not in (
            None,
            topology[0] * topology[1],
            topology[0] * topology[1] * topology[2],
        ):
            sockets, cores, threads = topology
            faults.append(
                f"node {node.name!r}: {sockets} sockets * {cores} cores_per_socket * {threads} threads_per_core "
                f"= {sockets * cores * threads} != cpus {node.cpus}"
            )
        for what, word in (("node", node.name), ("partition", node.partition or "")):
            if word.upper() == "DEFAULT":
                faults.append(
                    f"node {node.name!r}: a {what} cannot be called {word!r}: Slurm reads it as the defaults of all"
                )
    if health_check is not None and not re.fullmatch(r"/[A-Za-z0-9_./+-]+", health_check):
        faults.append(
            f"health check {health_check!r} is not the full path of a program, such as /usr/local/sbin/gpu_check"
        )
    if faults:
        raise ConfigsError("\n".join(faults))


def _topology(node: Node) -> tuple[int, int, int] | None:
    """Sockets, cores per socket and threads per core, where all three are known."""
    if node.sockets and node.cores_per_socket and node.threads_per_core:
        return node.sockets, node.cores_per_socket, node.threads_per_core
    return None


def _node_lines(cluster: Cluster, settings: LabSettings) -> list[dict[str, Any]]:
    """A line for each run of nodes that differ in nothing but their names."""
    weights = _weights(cluster.nodes)

    def line_of(node: Node) -> dict[str, Any]:
        topology = _topology(node)
        cpus = node.cpus or math.prod(topology or ())
        processors = f"CPUs={cpus}"
        if topology:
            processors += (
                f" Sockets={topology[0]} CoresPerSocket={topology[1]} ThreadsPerCore={topology[2]}"
            )
        return {
            "address": settings.addresses.get(node.name) or node.address,
            "cpus": cpus,
            "processors": processors,
            "real_memory_mb": node.memory_mb,
            "gres": node.gres,
            "features": _features(node),
            "weight": weights[node.name],
        }

    return [
        {"names": compress_hostlist(node.name for node in group), **line}
        for line, group in groupby(cluster.nodes, key=line_of)
    ]


def _features(node: Node) -> list[str]:
    """The node's features, and what its own constraint asks for: a job that names it must find it."""
    words = node.constraint.split("&") if node.constraint else []
    plain = words if all(re.fullmatch(r"[A-Za-z0-9_.+-]+", word) for word in words) else []
    return list(dict.fromkeys([*node.features, *plain]))


def _weights(nodes: Sequence[Node]) -> dict[str, int]:
    """10, 20, 30, ... from the smallest GPUs to the largest: by the memory that a feature names, then by count.

    Where the file does not say it of every node, by count alone.
    """
    memory = {node.name: _gpu_memory_gb(node) for node in nodes}
    told = all(memory[node.name] for node in nodes if node.gpus)

    def size(node: Node) -> tuple[int, int]:
        return (memory[node.name] if told and node.gpus else 0, node.gpu_count)

    order = sorted({size(node) for node in nodes})
    return {node.name: 10 * (order.index(size(node)) + 1) for node in nodes}


def _gpu_memory_gb(node: Node) -> int:
    """Of a feature such as ``vram80gb``, which a probe writes; 0 without one."""
    matches = (re.search(r"([0-9]+)gb?$", word, re.IGNORECASE) for word in node.features)
    return max((int(match[1]) for match in matches if match), default=0)


def _partitions(nodes: Sequence[Node]) -> list[dict[str, object]]:
    """The partitions of cluster.yaml; where a node names none, ``all`` holds every node and is the default."""
    members: dict[str, list[str]] = {}
    if any(node.partition is None for node in nodes):
        members["all"] = [node.name for node in nodes]
    for node in nodes:
        if node.partition and node.name not in members.setdefault(node.partition, []):
            members[node.partition].append(node.name)
    return [
        {"name": name, "nodes": compress_hostlist(names), "default": i == 0}
        for i, (name, names) in enumerate(members.items())
    ]


def _gres_lines(nodes: Sequence[Node], device_prefix: str) -> list[dict[str, str | None]]:
    lines: list[dict[str, str | None]] = []
    for gpus, group in groupby(nodes, key=lambda node: node.gpus):
        names = compress_hostlist(node.name for node in group)
        for model, minors in zip(gpus, _minors(gpus), strict=True):
            lines.append(
                {"names": names, "type": model.type, "files": _device_files(minors, device_prefix)}
            )
    return lines


def _minors(models: Sequence[GpuModel]) -> list[tuple[int, ...]]:
    """The device numbers of each model: those of the file, else the next free ones."""
    taken = {minor for model in models for minor in model.minors or ()}
    free = (number for number in range(FIRST_RENDER_MINOR) if number not in taken)
    return [model.minors or tuple(next(free) for _ in range(model.count)) for model in models]


def _device_files(minors: Sequence[int], prefix: str) -> str:
    if minors[0] >= FIRST_RENDER_MINOR and prefix == USERS_MACHINES.gpu_device_prefix:
        prefix = "/dev/dri/renderD"
    return compress_hostlist(f"{prefix}{minor}" for minor in minors)


def write_configs(files: Mapping[str, str], folder: Path) -> list[Path]:
    """Write each file whole or not at all; slurmdbd.conf for its owner only. Raises DdpSlurmError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise ConfigsError(f"{folder}: cannot be made: {fault.strerror}") from None
    for name, text in files.items():
        write_whole(folder / name, text, 0o600 if name == "slurmdbd.conf" else 0o644)
    return [folder / name for name in files]
