"""What a lab consists of: its hosts, their addresses, its folders, and command lines that enter it.

Everything else in this package uses this description; it starts nothing and changes nothing.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_slurm.ask import Answer, ask
from ddp_slurm.errors import did_you_mean
from ddp_slurm.lab import network
from ddp_slurm.lab.enter import enter
from ddp_slurm.lab.errors import LabError
from ddp_slurm.lab.machine import with_system_programs

LABS_FOLDER = Path("/run/ddp_slurm_lab")
Argv = Sequence[str | os.PathLike[str]]


def netns_prefix(lab_name: str) -> str:
    """The beginning of all network namespaces of one lab.

    A lab's name contains no dot, so no prefix is the beginning of another one.
    """
    return f"ddplab.{lab_name}."


@dataclass(frozen=True)
class LabNode:
    """A host of the lab."""

    name: str
    index: int
    """Its place in the cluster, from 1, and the last part of its address."""
    address: str
    netns: str
    """Its network namespace."""


@dataclass(frozen=True)
class LabLayout:
    """The description of one lab, as lab.json holds it."""

    name: str
    network: int
    """Index into ``network.NETWORKS``."""
    controller: str
    """Host name of slurmctld's namespace, which is none of the nodes: any of them can be killed."""
    nodes: tuple[LabNode, ...]
    slurm_root: Path | None = None
    """Root folder of the system whose Slurm is used; None: this machine's own."""

    @property
    def folder(self) -> Path:
        """Configuration, logs, spool and devices."""
        return LABS_FOLDER / self.name

    @property
    def slurm_conf(self) -> Path:
        return self.folder / "conf" / "slurm.conf"

    @property
    def log_folder(self) -> Path:
        return self.folder / "log"

    @property
    def controller_address(self) -> str:
        return f"{network.NETWORKS[self.network]}.{network.SWITCH_HOST}"

    @property
    def switch(self) -> str:
        """The network namespace of slurmctld, munged and the bridge."""
        return netns_prefix(self.name) + self.controller

    @property
    def environ(self) -> dict[str, str]:
        """Merged into ``os.environ``, it makes this machine's sbatch and squeue use the lab."""
        return {"SLURM_CONF": str(self.slurm_conf)}

    def whole_environ(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """A client's environment: ``base`` (default ``os.environ``) with this lab's variables."""
        return with_system_programs({**(base or os.environ), **self.environ})

    def node(self, name: str) -> LabNode:
        """Raises LabError for a node that the lab does not have."""
        for node in self.nodes:
            if node.name == name:
                return node
        hint = did_you_mean(name, [node.name for node in self.nodes])
        raise LabError(f"lab {self.name!r} has no node {name!r}{hint}")

    def inside(self, node: LabNode | None, argv: Argv) -> list[str]:
        """The command line that runs ``argv`` in a node's network, host name and hosts file.

        None stands for slurmctld's host.
        """
        netns = node.netns if node else self.switch
        host = node.name if node else self.controller
        return enter(argv, etc=self.folder / "etc", netns=netns, host=host, root=self.slurm_root)

    def command(self, argv: Argv) -> list[str]:
        """The command line that runs a client, such as sbatch, of the lab's own Slurm release."""
        if self.slurm_root is None:
            return [os.fspath(arg) for arg in argv]
        return enter(argv, etc=self.folder / "etc", root=self.slurm_root)

    def ask(self, argv: Argv, timeout_seconds: float | None = None) -> Answer:
        """The answer of a client on this machine that talks to this lab."""
        return ask(
            self.command(argv), timeout_seconds=timeout_seconds, environ=self.whole_environ()
        )
