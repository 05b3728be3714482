"""The machines: the content of cluster.yaml, checked and immutable. No Slurm call, no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ddp_slurm.cluster.gpus import GpuModel, gpu_models, gres_text
from ddp_slurm.errors import DdpSlurmError, quoted
from ddp_slurm.hostlist import MAX_HOSTS, HostlistError, expand_hostlist
from ddp_slurm.schema import fields
from ddp_slurm.schema.schema import (
    Error,
    Invalid,
    Key,
    Schema,
    expect_mapping,
    key,
    read_keys,
    tuple_of,
)
from ddp_slurm.schema.yaml_file import YamlFile, load_yaml, validate


class ClusterError(DdpSlurmError):
    """cluster.yaml, or the part of it that was asked for, cannot be used."""


@dataclass(frozen=True, init=False)
class Ssh(Schema):
    """How to reach a node by ssh; what is not given is left to ~/.ssh/config."""

    user: str | None = key(fields.user_name, None, "USER", "the user to log in as")
    port: int | None = key(fields.port, None, "N", "the port of sshd")
    identity: str | None = key(fields.filled_text, None, "FILE", "the private key")


def _host_names(value: Any) -> tuple[str, ...]:
    return tuple(fields.host_name(name) for name in expand_hostlist(fields.one_line(value)))


def _env_items(value: Any) -> tuple[tuple[str, str], ...]:
    return tuple(fields.env(value).items())


class Node(NamedTuple):
    """One machine, and the keys of an item of ``nodes:``.

    A named tuple: a large cluster has thousands, and they are made for every command.
    """

    name: Annotated[
        str, Key(_host_names, "NAME", "a Slurm NodeName, or a host list such as gpu[01-04]")
    ]
    gpus: Annotated[
        tuple[GpuModel, ...], Key(gpu_models, "N", "a number, a model, or a list of models")
    ] = ()
    cpus: Annotated[int | None, Key(fields.positive_number, "N", "CPU cores")] = None
    memory_mb: Annotated[
        int | None,
        Key(
            fields.memory_mb,
            "SIZE",
            f"memory that jobs may use, {fields.MEMORY_FORM}: slurm.conf's RealMemory and the "
            "--mem of a job on the whole node; probe writes 95 % of what the kernel reports, "
            "so that the node never registers with less",
            name="memory",
        ),
    ] = None
    address: Annotated[
        str | None,
        Key(fields.address, "ADDRESS", "where other machines reach it, if not by its name"),
    ] = None
    interface: Annotated[
        str | None, Key(fields.interface_name, "NAME", "network interface for NCCL and gloo")
    ] = None
    sockets: Annotated[int | None, Key(fields.positive_number, "N", "CPU sockets")] = None
    cores_per_socket: Annotated[
        int | None, Key(fields.positive_number, "N", "CPU cores of each socket")
    ] = None
    threads_per_core: Annotated[
        int | None, Key(fields.positive_number, "N", "hardware threads of each core")
    ] = None
    os: Annotated[
        str | None,
        Key(fields.word, "RELEASE", "such as ubuntu-22.04; cluster configs and doctor use it"),
    ] = None
    features: Annotated[
        tuple[str, ...],
        Key(tuple_of(fields.feature), "[FEATURE, ...]", "Slurm's features of the node"),
    ] = ()
    partition: Annotated[str | None, Key(fields.word, "NAME", "Slurm's partition")] = None
    constraint: Annotated[
        str | None, Key(fields.constraint, "FEATURES", "sbatch's --constraint for its component")
    ] = None
    env: Annotated[
        tuple[tuple[str, str], ...],
        Key(_env_items, "{NAME: VALUE}", "variables for the ranks on this node"),
    ] = ()
    ssh: Annotated[Ssh, Key(Ssh.read, "{...}", "how to log in; wins over the cluster's")] = Ssh()

    @property
    def gpu_count(self) -> int:
        return sum(model.count for model in self.gpus)

    @property
    def gres(self) -> str:
        return gres_text(self.gpus)


class NodeEntry(NamedTuple):
    """An item of ``nodes:``: one machine, or several that differ in nothing but their name."""

    hosts: tuple[str, ...]
    first: Node

    @classmethod
    def read(cls, value: Any) -> "NodeEntry":
        values, errors = read_keys(Node, expect_mapping(value, Node))
        hosts = values.get("name", ())
        address = values.get("address")
        if address is not None and len(hosts) > 1:
            problem = (
                f"{address!r} cannot be the address of {len(hosts)} nodes; list them one by one"
            )
            errors.append((("address",), problem))
        if errors:
            raise Invalid(errors)
        return cls(hosts, Node(**{**values, "name": hosts[0]}))

    def expand(self, cluster_ssh: Ssh) -> list[Node]:
        """All machines; the keys of ``ssh`` that they do not give are the cluster's."""
        own = self.first.ssh
        given = {name: getattr(own, name) for name in own.given}
        node = self.first._replace(ssh=cluster_ssh.replaced(**given))
        same = node[1:]
        return [Node(name, *same) for name in self.hosts]


def _node_entries(value: Any) -> tuple[NodeEntry, ...]:
    if isinstance(value, str) and value:
        raise ValueError(
            f"expected a list of machines, got {quoted(value)}; write each as '- name: NAME'"
        )
    hosts = 0

    def read_entry(item: Any) -> NodeEntry:
        nonlocal hosts
        if hosts > MAX_HOSTS:  # reading more lists would take minutes and fill the memory
            raise ValueError(f"not read: the items before it name more than {MAX_HOSTS} hosts")
        entry = NodeEntry.read(item)
        hosts += len(entry.hosts)
        return entry

    entries = tuple_of(read_entry)(value)
    if hosts > MAX_HOSTS:
        raise ValueError(f"more than {MAX_HOSTS} hosts")
    return entries


@dataclass(frozen=True, init=False)
class ClusterFile(Schema):
    """The keys of cluster.yaml."""

    name: str = key(fields.word, "cluster", "NAME", "the cluster's name")
    nodes: tuple[NodeEntry, ...] = key(_node_entries)
    controller: str | None = key(
        fields.word, None, "NAME", "the node that runs slurmctld; default the first"
    )
    ssh: Ssh = key(Ssh.read, Ssh(), "{...}", "how to log in to all nodes")


@dataclass(frozen=True, slots=True)
class Cluster:
    """All machines, in the order of the file.

    Rank 0 is on the first node with GPUs; where several are alike, on the first of them by name.
    """

    name: str
    nodes: tuple[Node, ...]
    controller: str | None = None
    """The node that runs slurmctld; None: the first one."""

    @classmethod
    def load(cls, path: str | Path) -> "Cluster":
        """Read and check a cluster.yaml. Raises ClusterError with all errors of the file."""
        file = load_yaml(Path(path), ClusterError)
        checked = validate(ClusterFile.read, file, ClusterError)
        nodes: list[Node] = []
        for entry in checked.nodes:
            nodes += entry.expand(checked.ssh)
        errors = list(_errors(checked, nodes, file))
        if errors:
            raise ClusterError(file.report(errors))
        return cls(checked.name, tuple(nodes), checked.controller)

    @property
    def controller_name(self) -> str:
        return self.controller or self.nodes[0].name


def _errors(checked: ClusterFile, nodes: Sequence[Node], file: YamlFile) -> Iterator[Error]:
    """What is wrong between the items of a file whose items are valid."""
    entry_of: dict[str, int] = {}
    for index, entry in enumerate(checked.nodes):
        duplicates = []
        for name in entry.hosts:
            if name in entry_of:
                duplicates.append(name)
            else:
                entry_of[name] = index
        if duplicates:
            line = file.lines["nodes", entry_of[duplicates[0]], "name"]
            problem = f"duplicate node {duplicates[0]!r}, first on line {line}"
            if len(duplicates) > 1:
                problem += f", and {len(duplicates) - 1} more"
            yield ("nodes", index, "name"), problem
        if entry.first.interface == "lo" and len(nodes) > 1:
            problem = "'lo' does not reach other nodes; give the name of a real interface"
            yield ("nodes", index, "interface"), problem
    if not any(node.gpus for node in nodes):
        yield ("nodes",), "no node has a GPU; give one 'gpus: 1' or more"
    if checked.controller is not None and checked.controller not in entry_of:
        yield ("controller",), f"{checked.controller!r} is not one of the nodes"


__all__ = ["Cluster", "ClusterError", "GpuModel", "HostlistError", "Node", "Ssh", "gres_text"]
