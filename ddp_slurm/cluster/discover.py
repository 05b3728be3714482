"""A Cluster from the live Slurm."""

import re
from dataclasses import dataclass

from ddp_slurm.ask import NOT_FOUND
from ddp_slurm.cluster.machines import Cluster, Node, NodeEntry
from ddp_slurm.cluster.write import cluster_yaml
from ddp_slurm.console import Commands, add_command, say
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.schema import fields
from ddp_slurm.schema.schema import Invalid, Reader
from ddp_slurm.slurm_client.commands import ask_slurm
from ddp_slurm.slurm_client.partition_limits import allows_user
from ddp_slurm.slurm_client.records import (
    Gres,
    NodeRecord,
    PartitionRecord,
    read_nodes,
    read_partitions,
)
from ddp_slurm.user import group_names, user_name

NO_MEMORY_MB = 1
"""Slurm's value for a node whose memory slurm.conf does not give."""


class DiscoverError(DdpSlurmError):
    """There is no live Slurm, or it has no node to train on."""


@dataclass(frozen=True, slots=True)
class Discovered:
    """The usable nodes, and a line for each thing that was left out or that the user must know."""

    cluster: Cluster
    left_out: tuple[str, ...]


def add_commands(commands: Commands) -> None:
    add_command(commands, "discover", discover_command)


def discover_command() -> None:
    """Print a cluster.yaml of the live Slurm; what cannot be used is reported on stderr."""
    heading = ["Made by ddp-slurm discover; the first node with GPUs is the host of rank 0."]
    print(cluster_yaml(discover(), heading), end="")


def discover() -> Cluster:
    """Ask the Slurm of this machine for its nodes. What is left out is reported on stderr.

    Raises DiscoverError where scontrol is missing or gets no response, and where no usable node has
    a GPU.
    """
    config = _scontrol("show", "config")
    name = re.search(r"^ClusterName\s*= *(\S+)", config, re.MULTILINE)
    found = cluster_of(
        _scontrol("show", "node"),
        _scontrol("show", "partition"),
        name[1] if name and name[1] != "(null)" else "cluster",
    )
    for line in found.left_out:
        say(line)
    return found.cluster


def _scontrol(*arguments: str) -> str:
    command = ["scontrol", *arguments]
    answer = ask_slurm(command)
    if answer.status == NOT_FOUND:
        raise DiscoverError(
            "no cluster.yaml and no scontrol on PATH: write a cluster.yaml, "
            "or go to a login node of the cluster"
        )
    if answer.status:
        raise DiscoverError(f"{' '.join(command)}: {answer.text or 'failed without a message'}")
    return answer.out


def cluster_of(nodes: str, partitions: str, name: str) -> Discovered:
    """The cluster that ``scontrol show node`` and ``scontrol show partition`` describe.

    Args:
        name: the cluster's.

    Raises DiscoverError where no usable node has a GPU.
    """
    open_partitions, closed = _open_partitions(read_partitions(partitions))
    usable: list[Node] = []
    used: dict[str, PartitionRecord] = {}
    left_out = [f"left out: partition {line}" for line in closed]
    for record in read_nodes(nodes):
        here = [p for p in open_partitions if p.name in record.partitions]
        error = record.why_unavailable
        if error is None and not here:
            error = f"no open partition has it (Partitions={','.join(record.partitions)})"
        if error is None:
            try:
                node, dropped = _node(record, here[0])
            except Invalid as invalid:
                error = f"cluster.yaml cannot hold it: {invalid}"
            else:
                usable.append(node)
                used[here[0].name] = here[0]
                left_out += [f"left out: {record.name}: {what}" for what in dropped]
        if error:
            left_out.append(f"left out: {record.name}: {error}")
    if not any(node.gpus for node in usable):
        message = f"Slurm's cluster {name!r} has no usable node with a GPU (gres/gpu)"
        raise DiscoverError("\n".join([*left_out, message]))
    notes = [_accounts_note(partition) for partition in used.values() if partition.allowed_accounts]
    return Discovered(Cluster(name, tuple(usable)), tuple(left_out + notes))


def _accounts_note(partition: PartitionRecord) -> str:
    accounts = ",".join(partition.allowed_accounts)
    return f"partition {partition.name} takes the accounts {accounts} only: give one by --account"


def _open_partitions(
    partitions: list[PartitionRecord],
) -> tuple[list[PartitionRecord], list[str]]:
    """Those that take this user's jobs, and a line for each that takes only those of others.

    The default comes first, then those that take every account, then the largest.
    """
    user, groups = user_name(), group_names()
    opened = []
    closed = []
    for partition in partitions:
        if partition.state != "UP" or partition.root_only:
            continue
        if not allows_user(partition, user, groups):
            allowed = ",".join(partition.allowed_groups)
            closed.append(f"{partition.name}: {user} is in none of its AllowGroups, {allowed}")
        elif not partition.is_default and not _accepts(fields.word, partition.name):
            closed.append(f"{partition.name}: cluster.yaml cannot hold its name")
        else:
            opened.append(partition)
    opened.sort(key=lambda p: (not p.is_default, bool(p.allowed_accounts), -p.total_nodes))
    return opened, closed


def _accepts(read: Reader[str], text: str) -> bool:
    """Whether cluster.yaml can hold the text as such a value."""
    try:
        return read(text) == text
    except ValueError:
        return False


def _node(record: NodeRecord, partition: PartitionRecord) -> tuple[Node, list[str]]:
    """The node, and what of it is left out since cluster.yaml cannot hold it. Raises Invalid."""
    gpus, dropped = _gpus(record.gres)
    features = [text for text in record.features if _accepts(fields.feature, text)]
    dropped += [f"its feature {text!r}" for text in record.features if text not in features]
    memory_mb = (record.real_memory_mb or NO_MEMORY_MB) - record.reserved_memory_mb
    entry: dict[str, object] = {
        "name": record.name,
        "gpus": gpus,
        "cpus": record.usable_cpus,
        "memory": memory_mb if memory_mb > NO_MEMORY_MB else None,
        "address": record.address if record.address != record.name else None,
        "partition": None if partition.is_default else partition.name,
        "features": features,
        **_topology(record),
    }
    return NodeEntry.read(entry).first, dropped


def _gpus(gres: tuple[Gres, ...]) -> tuple[list[dict[str, object]], list[str]]:
    """The GPUs as cluster.yaml has them, and what it cannot hold.

    Slurm refuses a request for GPUs with and without a type, so all have none where one has none.
    """
    counts: dict[str | None, int] = {}
    dropped = []
    for item in gres:
        if item.name != "gpu":
            continue
        kind = item.type
        if kind is not None and not _accepts(fields.gpu_type, kind):
            dropped.append(f"the type {kind!r} of its GPUs: cluster.yaml gives them no type")
            kind = None
        counts[kind] = counts.get(kind, 0) + item.number
    if None in counts:
        counts = {None: sum(counts.values())}
    models: list[dict[str, object]] = [
        {"type": kind, "count": count} for kind, count in counts.items() if count
    ]
    return models, dropped


def _topology(record: NodeRecord) -> dict[str, int]:
    """Sockets, cores and threads; empty where slurm.conf gives none.

    Slurm then counts every CPU as a socket.
    """
    sockets = record.sockets or 1
    cores = record.cores_per_socket or 1
    threads = record.threads_per_core or 1
    has_topology = cores * threads > 1
    if not has_topology or record.usable_cpus not in (sockets * cores, sockets * cores * threads):
        return {}
    return {"sockets": sockets, "cores_per_socket": cores, "threads_per_core": threads}
