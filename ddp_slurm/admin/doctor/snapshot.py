"""Everything the checks look at, gathered once: the facts of each node and what Slurm says of it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ddp_slurm.admin.facts import Facts, gather, peers_text
from ddp_slurm.cluster import Cluster, GpuModel, Node
from ddp_slurm.ssh.command import RemoteError
from ddp_slurm.ssh.run import Runner, on_all, run

SLURMCTLD_PORT, SLURMD_PORT = 6817, 6818
HIGH_PORT = 29500
"""torch's own choice for its rendezvous; stands for the ports that NCCL and gloo take where they like."""


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A node as slurmctld sees it; None where its line does not tell."""

    name: str
    version: str | None
    state: str
    reason: str | None
    cpus: int | None
    sockets: int | None
    cores_per_socket: int | None
    threads_per_core: int | None
    real_memory_mb: int | None
    gpus: int
    address: str | None = None

    def as_node(self) -> Node:
        """For a cluster without a cluster.yaml: how to reach it, and its GPUs; the rest is Slurm's word alone."""
        gpus = (GpuModel(count=self.gpus),) if self.gpus else ()
        return Node(self.name, gpus=gpus, address=self.address)


@dataclass(frozen=True)
class Snapshot:
    """What was found: ``facts`` of the nodes that answered, the cause for each of the ``unreachable`` ones."""

    cluster: Cluster
    facts: Mapping[str, Facts]
    unreachable: Mapping[str, str] = field(default_factory=dict)
    credential_from: str | None = None
    """The node whose munge credential the others decoded."""
    python: str = "python3"

    @cached_property
    def slurm_nodes(self) -> dict[str, SlurmNode]:
        """By the answer of the first node that got one; empty where slurmctld answers nobody."""
        for facts in self.facts.values():
            block = facts.block("slurm.nodes")
            if block and block.status == 0:
                return {node.name: node for node in parse_slurm_nodes(block.text)}
        return {}

    @cached_property
    def slurm_config(self) -> dict[str, str]:
        """``scontrol show config``, of the first node that got an answer."""
        for facts in self.facts.values():
            if config := config_of(facts):
                return config
        return {}

    def node(self, name: str) -> Node:
        return next(node for node in self.cluster.nodes if node.name == name)


def config_of(facts: Facts) -> dict[str, str]:
    """The keys and values of ``scontrol show config`` on a node."""
    block = facts.block("slurm.config")
    if block is None or block.status != 0:
        return {}
    pairs = re.findall(r"^(\S+?)(?:\[\d+\])?\s+= (.*)$", block.text, re.MULTILINE)
    return {key: value.strip() for key, value in pairs}


def parse_slurm_nodes(text: str) -> list[SlurmNode]:
    """The nodes of ``scontrol -o show node``, which reads the same from 20.11 to 26.05."""
    nodes = []
    for line in text.splitlines():
        fields = dict(re.findall(r"(?:^|\s)([A-Za-z]+)=(\S*)", line))
        if "NodeName" not in fields:
            continue
        reason = re.search(r"\sReason=(.*?)(?: \[(\S+)@[^\]]*\]|$)", line)
        nodes.append(
            SlurmNode(
                name=fields["NodeName"],
                version=fields.get("Version") or None,
                state=fields.get("State", "UNKNOWN"),
                reason=f"{reason[1]} (by {reason[2]})"
                if reason and reason[2]
                else reason[1]
                if reason
                else None,
                cpus=_number(fields.get("CPUTot")),
                sockets=_number(fields.get("Sockets")),
                cores_per_socket=_number(fields.get("CoresPerSocket")),
                threads_per_core=_number(fields.get("ThreadsPerCore")),
                real_memory_mb=_number(fields.get("RealMemory")),
                gpus=gpus_of_gres(fields.get("Gres", "")),
                address=fields.get("NodeAddr") or None,
            )
        )
    return nodes


def gpus_of_gres(gres: str) -> int:
    """
    >>> gpus_of_gres("gpu:a100:2(S:0-1),gpu:titan:1,nic:2"), gpus_of_gres("gpu:4"), gpus_of_gres("(null)")
    (3, 4, 0)
    """
    return sum(
        int(match[1]) for match in re.finditer(r"(?:^|,)gpu(?::[^,:()]+)?:(\d+)(?![^,(]*:)", gres)
    )


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def look(cluster: Cluster, *, python: str = "python3", runner: Runner = run) -> Snapshot:
    """Ask every node at once. A node that does not answer becomes a finding, not an error."""
    credential, source = _credential(cluster, runner)
    settings = {
        "DEPTH": "doctor",
        "CREDENTIAL": credential,
        "PYTHON": python,
        "PORTS": f"{SLURMCTLD_PORT} {SLURMD_PORT} {HIGH_PORT}",
    }

    def ask(node: Node) -> Facts:
        others = peers_text(other for other in cluster.nodes if other.name != node.name)
        return gather(node, {**settings, "PEERS": others}, runner=runner)

    answers = on_all(cluster.nodes, ask)
    return Snapshot(
        cluster,
        facts={name: answer for name, answer in answers.items() if isinstance(answer, Facts)},
        unreachable={
            name: str(answer) for name, answer in answers.items() if isinstance(answer, RemoteError)
        },
        credential_from=source,
        python=python,
    )


def _credential(cluster: Cluster, runner: Runner) -> tuple[str, str | None]:
    """A munge credential, of the controller if it can make one, else of the first node that can."""
    for node in sorted(cluster.nodes, key=lambda node: node.name != cluster.controller_name):
        try:
            block = gather(node, {"DEPTH": "credential"}, runner=runner).block("credential")
        except RemoteError:
            continue
        if block and block.status == 0 and block.text.startswith("MUNGE:"):
            return block.text.strip(), node.name
    return "", None
