"""Everything the checks look at, gathered once: the facts of each node, and Slurm's records."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ddp_slurm.admin.facts import Facts, gather, peers_text
from ddp_slurm.ask import Answer
from ddp_slurm.cluster import Cluster, Node
from ddp_slurm.slurm_client.records import NodeRecord, PartitionRecord, read_nodes, read_partitions
from ddp_slurm.ssh.command import RemoteError
from ddp_slurm.ssh.run import Runner, on_all, run

SLURMCTLD_PORT, SLURMD_PORT = 6817, 6818
HIGH_PORT = 29500
"""torch's own choice for its rendezvous; stands for the random ports of NCCL and gloo."""


@dataclass(frozen=True)
class Snapshot:
    """What was found."""

    cluster: Cluster
    facts: Mapping[str, Facts]
    """Of the nodes that responded."""
    unreachable: Mapping[str, str] = field(default_factory=dict)
    """The cause for each of the others."""
    credential_from: str | None = None
    """The node whose munge credential the others decoded."""
    python: str = "python3"
    proof: Answer | None = None
    """Of the step in which every card computes; None where it was not run."""

    @cached_property
    def slurm_nodes(self) -> dict[str, NodeRecord]:
        """By the answer of the first node that got one; empty where slurmctld does not respond."""
        return {node.name: node for node in read_nodes(self._first_answer("slurm.nodes"))}

    @cached_property
    def slurm_partitions(self) -> dict[str, PartitionRecord]:
        """As ``slurm_nodes``."""
        records = read_partitions(self._first_answer("slurm.partitions"))
        return {record.name: record for record in records}

    @cached_property
    def slurm_config(self) -> dict[str, str]:
        """As ``slurm_nodes``."""
        return read_config(self._first_answer("slurm.config"))

    def _first_answer(self, name: str) -> str:
        answers = (facts.answer(name) for facts in self.facts.values())
        return next(filter(None, answers), "")

    def responding(self) -> Iterator[tuple[Node, Facts]]:
        """The nodes that responded, and what each reported."""
        for node in self.cluster.nodes:
            if node.name in self.facts:
                yield node, self.facts[node.name]


def read_config(text: str) -> dict[str, str]:
    """The keys and values of ``scontrol show config``."""
    pairs = re.findall(r"^(\S+?)(?:\[\d+\])?\s+= (.*)$", text, re.MULTILINE)
    return {key: value.strip() for key, value in pairs}


def look(cluster: Cluster, *, python: str = "python3", runner: Runner = run) -> Snapshot:
    """Ask every node at once. A node that does not respond becomes a finding, not an error."""
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
            text = gather(node, {"DEPTH": "credential"}, runner=runner).answer("credential")
        except RemoteError:
            continue
        if text.startswith("MUNGE:"):
            return text.strip(), node.name
    return "", None
