"""The lines of slurm.conf and gres.conf that list nodes, partitions and GPUs. Pure."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ddp_slurm.admin.gpus.types import mig_profile_of
from ddp_slurm.admin.installation import USERS_MACHINES, Installation
from ddp_slurm.cluster import Cluster, GpuModel, Node
from ddp_slurm.hostlist import compress_hostlist

FIRST_RENDER_MINOR = 128
"""DRM numbers its render nodes from here: AMD's cards, never NVIDIA's.

Source: include/drm/drm_file.h of the kernel.
"""


@dataclass(frozen=True, slots=True)
class Description:
    """What slurm.conf states about a node besides its name."""

    address: str | None
    cpus: int
    topology: tuple[int, int, int] | None
    """Sockets, cores per socket, threads per core."""
    real_memory_mb: int | None
    gres: str
    features: tuple[str, ...]
    weight: int


@dataclass(frozen=True, slots=True)
class NodeLine:
    """A line of slurm.conf: neighbours that differ in nothing but their names."""

    names: str
    node: Description


@dataclass(frozen=True, slots=True)
class PartitionLine:
    """A line of slurm.conf. A job that names no partition goes to the ``default`` one."""

    name: str
    nodes: str
    default: bool


@dataclass(frozen=True, slots=True)
class GresLine:
    """A line of gres.conf: one model of card in one kind of node."""

    names: str
    type: str | None = None
    files: str | None = None
    autodetect: str | None = None
    """Slurm finds the devices of these nodes by itself, in place of ``type`` and ``files``."""


def topology_of(node: Node) -> tuple[int, int, int] | None:
    """Sockets, cores per socket and threads per core, where all three are known."""
    if node.sockets and node.cores_per_socket and node.threads_per_core:
        return node.sockets, node.cores_per_socket, node.threads_per_core
    return None


def node_lines(cluster: Cluster, installation: Installation) -> list[NodeLine]:
    weights = _weights(cluster.nodes)
    lines = []
    described = [(node.name, _describe(node, installation, weights)) for node in cluster.nodes]
    for description, group in groupby(described, key=lambda item: item[1]):
        names = compress_hostlist(name for name, _ in group)
        lines.append(NodeLine(names, description))
    return lines


def _describe(node: Node, installation: Installation, weights: dict[str, int]) -> Description:
    topology = topology_of(node)
    return Description(
        address=installation.addresses.get(node.name) or node.address,
        cpus=node.cpus or math.prod(topology or ()),
        topology=topology,
        real_memory_mb=node.memory_mb,
        gres=node.gres,
        features=_features(node),
        weight=weights[node.name],
    )


def _features(node: Node) -> tuple[str, ...]:
    """The node's features, and those of its own constraint: a job that asks for it must find it."""
    required = node.constraint.split("&") if node.constraint else []
    is_plain_list = all(re.fullmatch(r"[A-Za-z0-9_.+-]+", feature) for feature in required)
    if not is_plain_list:
        return node.features
    return tuple(dict.fromkeys([*node.features, *required]))


def _weights(nodes: Sequence[Node]) -> dict[str, int]:
    """10, 20, 30, ... from the smallest GPUs to the largest.

    By the memory that a feature names, then by count; by count alone where the memory of a node's
    GPUs is not known.
    """
    memory_gb = {node.name: _gpu_memory_gb(node) for node in nodes}
    all_known = all(memory_gb[node.name] for node in nodes if node.gpus)
    sizes = {}
    for node in nodes:
        memory = memory_gb[node.name] if all_known and node.gpus else 0
        sizes[node.name] = (memory, node.gpu_count)
    order = sorted(set(sizes.values()))
    return {name: 10 * (order.index(size) + 1) for name, size in sizes.items()}


def _gpu_memory_gb(node: Node) -> int:
    """From a feature such as ``vram80gb``, which a probe writes, or ``a100-80gb``; 0 without one.

    Others are speeds of the network: ``100g``, ``ib200gb``.
    """
    pattern = re.compile(r"(?:(?<![a-z0-9])|(?<=vram))([0-9]+)gb$", re.IGNORECASE)
    matches = map(pattern.search, node.features)
    return max((int(match[1]) for match in matches if match), default=0)


def partition_lines(nodes: Sequence[Node]) -> list[PartitionLine]:
    """The partitions of cluster.yaml, the first one the default.

    Where a node names none, the first is ``all``, which holds every node.
    """
    members: dict[str, list[str]] = {}
    if any(node.partition is None for node in nodes):
        members["all"] = [node.name for node in nodes]
    for node in nodes:
        if node.partition is None:
            continue
        names = members.setdefault(node.partition, [])
        if node.name not in names:
            names.append(node.name)
    default = next(iter(members), None)
    return [
        PartitionLine(name, compress_hostlist(names), default=name == default)
        for name, names in members.items()
    ]


def gres_lines(nodes: Sequence[Node], installation: Installation) -> list[GresLine]:
    """A line for each model of card.

    Nodes with divided cards (MIG) have one line: an instance has device files of numbers that
    change whenever the card is divided.
    """
    device_prefix = installation.gpu_device_prefix
    lines = []
    for gpus, group in groupby(nodes, key=lambda node: node.gpus):
        names = compress_hostlist(node.name for node in group)
        if not installation.is_lab and any(mig_profile_of(model.type) for model in gpus):
            lines.append(GresLine(names, autodetect="nvml"))
            continue
        for model, minors in _minors(gpus):
            lines.append(GresLine(names, model.type, _device_files(minors, device_prefix)))
    return lines


def _minors(models: Sequence[GpuModel]) -> Iterator[tuple[GpuModel, tuple[int, ...]]]:
    """The device numbers of each model: those of cluster.yaml, else the next free ones."""
    taken = {minor for model in models for minor in model.minors or ()}
    free = (number for number in range(FIRST_RENDER_MINOR) if number not in taken)
    for model in models:
        yield model, model.minors or tuple(next(free) for _ in range(model.count))


def _device_files(minors: Sequence[int], prefix: str) -> str:
    is_render_node = minors[0] >= FIRST_RENDER_MINOR
    if is_render_node and prefix == USERS_MACHINES.gpu_device_prefix:
        prefix = "/dev/dri/renderD"
    return compress_hostlist(f"{prefix}{minor}" for minor in minors)
