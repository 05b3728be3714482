"""The machines: what cluster.yaml says, checked and immutable. No Slurm call and no torch here."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationInfo, field_validator

from .errors import DdpSlurmError
from .fields import (
    Address,
    Constraint,
    EnvName,
    GpuType,
    InterfaceName,
    MemoryMb,
    PlainText,
    PositiveNumber,
    Schema,
    UserName,
    WholeNumber,
    Word,
    one_line,
    whole_number,
)
from .hostlist import HostlistError, expand_hostlist
from .yaml_file import YamlFile, load_yaml, validate


class ClusterError(DdpSlurmError):
    """cluster.yaml, or the part of it that was asked for, cannot be used."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """GPUs of one model in one node: ``gpu:a100:4`` in Slurm's words, ``gpu:4`` without a type.

    ``minors`` are the numbers of the device files ``/dev/nvidiaN`` where they are not 0, 1, 2, ...
    """

    type: str | None = None
    count: int = 1
    minors: tuple[int, ...] | None = None


class GpuEntry(Schema):
    """A value of ``gpus:``."""

    type: GpuType | None = None
    count: PositiveNumber = 1
    minors: tuple[WholeNumber, ...] | None = None

    @field_validator("minors")
    @classmethod
    def _one_minor_a_gpu(cls, minors: tuple[int, ...] | None, info: ValidationInfo) -> tuple[int, ...] | None:
        count = info.data.get("count")
        if minors is not None and count is not None and (len(minors) != count or len(set(minors)) != count):
            raise ValueError(f"{list(minors)} are not {count} different numbers, one for each GPU")
        return minors


def _gpu_models(value: Any) -> Any:
    """``4``, one mapping or a list of mappings; a node may hold cards of several models."""
    if isinstance(value, dict):
        return [value] if str(value.get("count", "1")) != "0" else []
    if isinstance(value, list):
        return value
    count = whole_number(value)
    return [{"count": count}] if count else []


class Ssh(Schema):
    """How to reach a node by ssh; ~/.ssh/config holds for what is not said."""

    user: UserName | None = None
    port: PositiveNumber | None = None
    identity: PlainText | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """One machine."""

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
    ssh: Ssh = field(default_factory=Ssh)
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
    names = tuple(expand_hostlist(one_line(value)))
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?", name):
            raise ValueError(f"{name!r} is not a host name; letters, digits, - and . are accepted, as in gpu[01-04]")
    return names


class NodeEntry(Schema):
    """An item of ``nodes:``; its name may be a host expression that stands for many equal machines."""

    name: Annotated[tuple[str, ...], BeforeValidator(_host_names)]
    gpus: Annotated[tuple[GpuEntry, ...], BeforeValidator(_gpu_models)] = ()
    cpus: PositiveNumber | None = None
    memory: MemoryMb | None = None
    address: Address | None = None
    interface: InterfaceName | None = None
    partition: Word | None = None
    constraint: Constraint | None = None
    env: dict[EnvName, PlainText] = {}
    ssh: Ssh = Ssh()
    sockets: PositiveNumber | None = None
    cores_per_socket: PositiveNumber | None = None
    threads_per_core: PositiveNumber | None = None
    features: tuple[Word, ...] = ()
    os: Word | None = None

    @field_validator("address")
    @classmethod
    def _one_address_a_node(cls, address: str | None, info: ValidationInfo) -> str | None:
        names = info.data.get("name", ())
        if address is not None and len(names) > 1:
            raise ValueError(f"{address!r} cannot be the address of {len(names)} nodes; give each an item of its own")
        return address

    def expand(self, cluster_ssh: Ssh) -> list[Node]:
        ssh = cluster_ssh.model_copy(update=self.ssh.model_dump(exclude_none=True))
        shared = {
            "gpus": tuple(GpuModel(entry.type, entry.count, entry.minors) for entry in self.gpus),
            "memory_mb": self.memory,
            "env": tuple(self.env.items()),
            "ssh": ssh,
            **{
                name: getattr(self, name)
                for name in ("cpus", "address", "interface", "partition", "constraint", "sockets",
                             "cores_per_socket", "threads_per_core", "features", "os")
            },
        }  # fmt: skip
        return [Node(name=name, **shared) for name in self.name]


class ClusterFile(Schema):
    """The keys of cluster.yaml."""

    name: Word = "cluster"
    nodes: tuple[NodeEntry, ...]
    controller: Word | None = None
    ssh: Ssh = Ssh()


@dataclass(frozen=True, slots=True)
class Cluster:
    """All machines, in the order of the file: the first one with GPUs is the host of rank 0."""

    name: str
    nodes: tuple[Node, ...]
    controller: str | None = None
    """The node that runs slurmctld; the first one where the file does not say."""

    @classmethod
    def load(cls, path: str | Path) -> "Cluster":
        """Read and check a cluster.yaml. Raises ClusterError with all faults of the file, a line each."""
        file = load_yaml(Path(path), ClusterError)
        return cls._from_file(validate(ClusterFile, file, ClusterError), file)

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
                    faults.append(f"{where}: node {node.name!r} is there twice, first on line {first}")
                entry_of.setdefault(node.name, index)
                nodes.append(node)
        if not any(node.gpus for node in nodes):
            line = file.lines.get(("nodes",), 1)
            faults.append(f"{file.path}:{line}: nodes: no node has a GPU; give one 'gpus: 1' or more")
        loopback = [i for i, entry in enumerate(checked.nodes) if entry.interface == "lo"]
        if loopback and len(nodes) > 1:
            line = file.lines.get(("nodes", loopback[0], "interface"), 1)
            where = f"{file.path}:{line}: nodes[{loopback[0]}].interface"
            faults.append(f"{where}: 'lo' reaches no other node; name a real interface")
        if checked.controller is not None and checked.controller not in entry_of:
            line = file.lines.get(("controller",), 1)
            faults.append(f"{file.path}:{line}: controller: {checked.controller!r} is not one of the nodes")
        if faults:
            raise ClusterError("\n".join(faults))
        return cls(checked.name, tuple(nodes), checked.controller)

    @property
    def controller_name(self) -> str:
        return self.controller or self.nodes[0].name


__all__ = ["Cluster", "ClusterError", "GpuModel", "HostlistError", "Node", "Ssh"]
