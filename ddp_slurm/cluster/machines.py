"""The machines: what cluster.yaml says, checked and immutable. No Slurm call and no torch here."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.hostlist import HostlistError, expand_hostlist
from ddp_slurm.schema import fields
from ddp_slurm.schema.schema import KeyPath, Schema, key, tuple_of
from ddp_slurm.schema.yaml_file import YamlFile, load_yaml, validate


class ClusterError(DdpSlurmError):
    """cluster.yaml, or the part of it that was asked for, cannot be used."""


@dataclass(frozen=True, init=False)
class GpuModel(Schema):
    """GPUs of one model in one node: ``gpu:a100:4`` in Slurm's words, ``gpu:4`` without a type."""

    type: str | None = key(fields.gpu_type, None)
    count: int = key(fields.gpu_count, 1)
    minors: tuple[int, ...] | None = key(tuple_of(fields.whole_number), None)
    """The numbers of the device files ``/dev/nvidiaN`` where they are not 0, 1, 2, ..."""

    def misfits(self) -> list[tuple[KeyPath, str]]:
        if self.minors is None or len(self.minors) == len(set(self.minors)) == self.count:
            return []
        return [
            (
                ("minors",),
                f"{list(self.minors)} are not {self.count} different numbers, one for each GPU",
            )
        ]


def _gpu_models(value: Any) -> tuple[GpuModel, ...]:
    """``4``, one mapping or a list of mappings; a node may hold cards of several models."""
    if isinstance(value, str) and (
        typed := re.fullmatch(r"(?:gpu:)?(?!gpu:)([^\s:,]+):([0-9]+)", value)
    ):
        raise ValueError(f"{value!r} is Slurm's way; write {{type: {typed[1]}, count: {typed[2]}}}")
    if isinstance(value, dict):
        value = [] if str(value.get("count", "1")) == "0" else [value]
    if not isinstance(value, list | tuple):
        count = 0 if value in (0, "0") else fields.gpu_count(value)
        value = [{"count": count}] if count else []
    if {} in value:
        raise ValueError("a mapping without keys; write {type: TYPE, count: N}, or a number")
    return _each_type_once(tuple_of(GpuModel.read)(value))


def _each_type_once(models: tuple[GpuModel, ...]) -> tuple[GpuModel, ...]:
    """Of two ``gpu:a:N`` in one gres Slurm takes the last; beside a typed one it refuses ``gpu:N``."""
    by_type: dict[str | None, list[GpuModel]] = {}
    for model in models:
        by_type.setdefault(model.type, []).append(model)
    if len(by_type) > 1 and None in by_type:
        raise ValueError(
            "GPUs with a type stand beside some without; give all of the node's a type, or none"
        )
    return tuple(same[0] if len(same) == 1 else _joined(same) for same in by_type.values())


def _joined(same: list[GpuModel]) -> GpuModel:
    minors = [number for model in same for number in model.minors or ()]
    count = sum(model.count for model in same)
    if minors and len(set(minors)) != count:
        raise ValueError(
            f"type {same[0].type}: minors {minors} are not {count} different numbers, one for each GPU"
        )
    return GpuModel(type=same[0].type, count=count, minors=minors or None)


@dataclass(frozen=True, init=False)
class Ssh(Schema):
    """How to reach a node by ssh; ~/.ssh/config holds for what is not said."""

    user: str | None = key(fields.user_name, None)
    port: int | None = key(fields.port, None)
    identity: str | None = key(fields.filled_text, None)


class Node(NamedTuple):
    """One machine. A named tuple: a large cluster has thousands, and they are made for every command."""

    name: str
    gpus: tuple[GpuModel, ...] = ()
    cpus: int | None = None
    memory_mb: int | None = None
    """What jobs may use of the node, in MiB: slurm.conf's RealMemory, and the --mem of a job that takes the whole node.

    ``cluster probe`` writes 95 % of what the kernel reports, so that the node never registers with less.
    """
    address: str | None = None
    """Where other machines reach it, where its name does not resolve; for torchrun, ssh and cluster_setup."""
    interface: str | None = None
    """Network interface for NCCL and gloo."""
    partition: str | None = None
    constraint: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    """Variables for the ranks on this node."""
    ssh: Ssh = Ssh()
    sockets: int | None = None
    cores_per_socket: int | None = None
    threads_per_core: int | None = None
    features: tuple[str, ...] = ()
    os: str | None = None
    """The release, such as ``ubuntu-22.04``; decides what cluster_setup writes and warns of."""

    @property
    def gpu_count(self) -> int:
        return sum(model.count for model in self.gpus)

    @property
    def gres(self) -> str:
        return gres_text(self.gpus)


def gres_text(gpus: tuple[GpuModel, ...]) -> str:
    """``gpu:a100:2,gpu:titan:1`` in Slurm's words, ``gpu:4`` without a type; empty without GPUs."""
    return ",".join(":".join(["gpu", *([m.type] if m.type else []), str(m.count)]) for m in gpus)


def _host_names(value: Any) -> tuple[str, ...]:
    return tuple(map(fields.host_name, expand_hostlist(fields.one_line(value))))


@dataclass(frozen=True, init=False)
class NodeEntry(Schema):
    """An item of ``nodes:``; its name may be a host expression that stands for many equal machines."""

    name: tuple[str, ...] = key(_host_names)
    gpus: tuple[GpuModel, ...] = key(_gpu_models, ())
    cpus: int | None = key(fields.positive_number, None)
    memory: int | None = key(fields.memory_mb, None)
    address: str | None = key(fields.address, None)
    interface: str | None = key(fields.interface_name, None)
    partition: str | None = key(fields.word, None)
    constraint: str | None = key(fields.constraint, None)
    env: dict[str, str] = key(fields.env, {})
    ssh: Ssh = key(Ssh.read, Ssh())
    sockets: int | None = key(fields.positive_number, None)
    cores_per_socket: int | None = key(fields.positive_number, None)
    threads_per_core: int | None = key(fields.positive_number, None)
    features: tuple[str, ...] = key(tuple_of(fields.word), ())
    os: str | None = key(fields.word, None)

    def misfits(self) -> list[tuple[KeyPath, str]]:
        if self.address is None or len(self.name) == 1:
            return []
        many = f"{self.address!r} cannot be the address of {len(self.name)} nodes; give each an item of its own"
        return [(("address",), many)]

    def expand(self, cluster_ssh: Ssh) -> list[Node]:
        first, *others = self.name
        node = Node(
            first,
            self.gpus,
            self.cpus,
            self.memory,
            self.address,
            self.interface,
            self.partition,
            self.constraint,
            tuple(self.env.items()),
            cluster_ssh.replaced(**{name: getattr(self.ssh, name) for name in self.ssh.given}),
            self.sockets,
            self.cores_per_socket,
            self.threads_per_core,
            self.features,
            self.os,
        )
        return [node, *(Node(name, *node[1:]) for name in others)]


def _node_entries(value: Any) -> tuple[NodeEntry, ...]:
    if isinstance(value, str) and value:
        raise ValueError(
            f"{value!r} is not a list of machines; write it as an item below: - name: {value}"
        )
    return tuple_of(NodeEntry.read)(value)


@dataclass(frozen=True, init=False)
class ClusterFile(Schema):
    """The keys of cluster.yaml."""

    name: str = key(fields.word, "cluster")
    nodes: tuple[NodeEntry, ...] = key(_node_entries)
    controller: str | None = key(fields.word, None)
    ssh: Ssh = key(Ssh.read, Ssh())


@dataclass(frozen=True, slots=True)
class Cluster:
    """All machines, in the order of the file. Rank 0 is on the first with GPUs, or the first by name of those alike."""

    name: str
    nodes: tuple[Node, ...]
    controller: str | None = None
    """The node that runs slurmctld; the first one where the file does not say."""

    @classmethod
    def load(cls, path: str | Path) -> "Cluster":
        """Read and check a cluster.yaml. Raises ClusterError with all faults of the file, a line each."""
        file = load_yaml(Path(path), ClusterError)
        return cls._from_file(validate(ClusterFile.read, file, ClusterError), file)

    @classmethod
    def _from_file(cls, checked: ClusterFile, file: YamlFile) -> "Cluster":
        nodes: list[Node] = []
        entry_of: dict[str, int] = {}
        faults: list[str] = []
        for index, entry in enumerate(checked.nodes):
            line = file.lines.get(("nodes", index, "name"), 1)
            for node in entry.expand(checked.ssh):
                if node.name in entry_of:
                    first = file.lines.get(("nodes", entry_of[node.name], "name"), 1)
                    where = f"{file.path}:{line}: nodes[{index}].name"
                    faults.append(
                        f"{where}: node {node.name!r} is there twice, first on line {first}"
                    )
                entry_of.setdefault(node.name, index)
                nodes.append(node)
        if not any(node.gpus for node in nodes):
            line = file.lines.get(("nodes",), 1)
            faults.append(
                f"{file.path}:{line}: nodes: no node has a GPU; give one 'gpus: 1' or more"
            )
        loopback = [i for i, entry in enumerate(checked.nodes) if entry.interface == "lo"]
        if loopback and len(nodes) > 1:
            line = file.lines.get(("nodes", loopback[0], "interface"), 1)
            where = f"{file.path}:{line}: nodes[{loopback[0]}].interface"
            faults.append(f"{where}: 'lo' reaches no other node; name a real interface")
        if checked.controller is not None and checked.controller not in entry_of:
            line = file.lines.get(("controller",), 1)
            faults.append(
                f"{file.path}:{line}: controller: {checked.controller!r} is not one of the nodes"
            )
        if faults:
            raise ClusterError("\n".join(faults))
        return cls(checked.name, tuple(nodes), checked.controller)

    @property
    def controller_name(self) -> str:
        return self.controller or self.nodes[0].name


__all__ = ["Cluster", "ClusterError", "GpuModel", "HostlistError", "Node", "Ssh"]
