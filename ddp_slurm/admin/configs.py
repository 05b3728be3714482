"""cluster.yaml -> slurm.conf, gres.conf, cgroup.conf, slurmdbd.conf for one Slurm release. Pure."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp_slurm.admin.installation import USERS_MACHINES, Installation
from ddp_slurm.admin.slurm_lines import (
    FIRST_RENDER_MINOR,
    gres_lines,
    node_lines,
    partition_lines,
    topology_of,
)
from ddp_slurm.admin.slurm_releases import DEFAULT_RELEASE, known_options, slurm_release
from ddp_slurm.cluster import Cluster, Node
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.files import write_whole
from ddp_slurm.render.templating import render_template

PROBED_MEMORY_PERCENT = 95
"""The part of a machine's memory that is given to jobs.

The rest is for the system; a new kernel may leave a little less.
"""

HETJOB_PARAMETERS = ("bf_hetjob_immediate", "whole_hetjob")


class ConfigsError(DdpSlurmError):
    """The cluster cannot be written as a Slurm configuration."""


@dataclass(frozen=True, slots=True)
class _Network:
    """How the daemons find each other."""

    controller: str
    controller_address: str | None
    ipv6: bool
    """Some node has an address with colons."""
    configless: bool
    """slurmd fetches its configuration from slurmctld."""


def schedulable_memory_mb(probed_mb: int) -> int:
    """The ``memory`` in cluster.yaml of a machine on which ``probed_mb`` MiB were found.

    It becomes RealMemory, and a job may ask for all of it: slurmd drains a node that has less.
    """
    return probed_mb * PROBED_MEMORY_PERCENT // 100


def render_configs(
    cluster: Cluster,
    *,
    slurm_version: str = DEFAULT_RELEASE,
    installation: Installation = USERS_MACHINES,
    slurmdbd: bool = False,
    health_check: str | None = None,
    control_groups: bool = True,
) -> dict[str, str]:
    """File name -> text of slurm.conf, gres.conf and cgroup.conf, optionally slurmdbd.conf.

    ``health_check`` is the path of a program that slurmd runs every five minutes. Without
    ``control_groups`` a job is not kept to its memory and GPUs.
    Raises ConfigsError for nodes that cannot be written, SlurmReleaseError for an unknown release.
    """
    release = slurm_release(slurm_version)
    known = known_options(release)
    _check(cluster, health_check)
    network = _network(cluster, installation, release)
    values = {
        "release": release,
        "known": known,
        "site": installation,
        "network": network,
        "lab": installation.is_lab,
        "cluster_name": cluster.name.lower(),
        "memory_percent": PROBED_MEMORY_PERCENT,
        "scheduler_parameters": [*HETJOB_PARAMETERS, *installation.scheduler_parameters],
        "slurmctld_parameters": _slurmctld_parameters(network, known),
        "def_mem_per_cpu": _default_memory_per_cpu_mb(cluster),
        "nodes": node_lines(cluster, installation),
        "partitions": partition_lines(cluster.nodes),
        "gres_lines": gres_lines(cluster.nodes, installation),
        "slurmdbd": slurmdbd,
        "health_check": health_check,
        "control_groups": control_groups,
    }
    names = ["slurm.conf", "gres.conf", "cgroup.conf"]
    if slurmdbd:
        names.append("slurmdbd.conf")
    return {name: render_template(f"{name}.j2", **values) for name in names}


def _network(cluster: Cluster, installation: Installation, release: str) -> _Network:
    addresses = {node.name: node.address for node in cluster.nodes}
    addresses.update(installation.addresses)
    controller = installation.controller or cluster.controller_name
    ipv6 = any(":" in (address or "") for address in addresses.values())
    # Before slurmd has its configuration, slurmd of 22.05 does not use IPv6 and so cannot fetch it
    # that way; 24.11 can.
    can_fetch = not ipv6 or release >= "24.11"
    return _Network(
        controller=controller,
        controller_address=installation.controller_address or addresses.get(controller),
        ipv6=ipv6,
        configless=can_fetch and not installation.is_lab,
    )


def _slurmctld_parameters(network: _Network, known: frozenset[str]) -> list[str]:
    parameters = []
    if network.configless and "SlurmctldParameters=enable_configless" in known:
        parameters.append("enable_configless")
    if "SlurmctldParameters=node_reg_mem_percent" in known:
        parameters.append("node_reg_mem_percent=95")
    return parameters


def _default_memory_per_cpu_mb(cluster: Cluster) -> int:
    """The smallest memory a CPU of any node: more would not fit on that node."""
    per_cpu = []
    for node in cluster.nodes:
        cpus = node.cpus or math.prod(topology_of(node) or (1,))
        per_cpu.append((node.memory_mb or 0) // cpus)
    return min(per_cpu) or 1


def _check(cluster: Cluster, health_check: str | None) -> None:
    """Raises ConfigsError with all errors, a line each."""
    errors = []
    for node in cluster.nodes:
        errors += [f"node {node.name!r}: {error}" for error in _node_errors(node)]
    if health_check is not None and not re.fullmatch(r"/[A-Za-z0-9_./+-]+", health_check):
        errors.append(
            f"health check {health_check!r}: expected the full path of a program, such as "
            "/usr/local/sbin/gpu_check"
        )
    if errors:
        raise ConfigsError("\n".join(errors))


def _node_errors(node: Node) -> list[str]:
    errors = []
    topology = topology_of(node)
    if node.gpu_count > FIRST_RENDER_MINOR:
        errors.append(f"{node.gpu_count} GPUs; a node can have at most {FIRST_RENDER_MINOR}")
    missing = []
    if not node.cpus and not topology:
        missing.append("cpus")
    if not node.memory_mb:
        missing.append("memory")
    if missing:
        errors.append(f"no {' and no '.join(missing)}; 'ddp-slurm cluster probe' finds them")
    if topology and node.cpus:
        sockets, cores, threads = topology
        if node.cpus not in (sockets * cores, sockets * cores * threads):
            errors.append(
                f"{sockets} sockets * {cores} cores_per_socket * {threads} threads_per_core "
                f"= {sockets * cores * threads} != cpus {node.cpus}"
            )
    for kind, name in (("node", node.name), ("partition", node.partition)):
        if name and name.upper() == "DEFAULT":
            errors.append(
                f"a {kind} cannot be called {name!r}: Slurm reads it as the defaults of all"
            )
    return errors


def write_configs(files: Mapping[str, str], folder: Path) -> list[Path]:
    """Write each file whole or not at all; slurmdbd.conf for its owner only.

    Raises DdpSlurmError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigsError(f"{folder}: cannot be created: {error.strerror}") from None
    paths = []
    for name, text in files.items():
        path = folder / name
        write_whole(path, text, 0o600 if name == "slurmdbd.conf" else 0o644)
        paths.append(path)
    return paths
