"""One lab: a running Slurm of several hosts on this machine."""

import os
import subprocess
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_slurm.lab import daemons, network, registry
from ddp_slurm.lab.layout import Argv, LabLayout
from ddp_slurm.lab.machine import check_machine

if TYPE_CHECKING:
    from ddp_slurm.cluster import Cluster

NSSWITCH = """\
passwd: files
group: files
shadow: files
hosts: files
services: files
protocols: files
"""


@dataclass(frozen=True)
class Lab(LabLayout):
    """A running lab. Make one with ``Lab.up``, get a running one with ``Lab.find``.

    As a context manager it is taken down at the end of the block.
    """

    @classmethod
    def up(
        cls, cluster: "Cluster", name: str = "lab", slurm_root: str | Path | None = None
    ) -> "Lab":
        """Start a lab with the nodes of ``cluster`` and wait until Slurm reports all of them idle.

        ``slurm_root``: root folder of another system (from debootstrap) whose Slurm and munge are
        used. Raises LabError, with the daemon's own message, when something does not start;
        nothing is left behind then.
        """
        check_machine(slurm_root)
        registry.check_name(name)
        registry.check_nodes(cluster, name)
        root = Path(slurm_root).resolve() if slurm_root else None
        umask = os.umask(0o022)  # other users submit jobs too
        try:
            lab = cls._of(registry.reserve(cluster, name, root))
            try:
                start(lab, cluster)
            except BaseException:  # Ctrl-C too must not leave half a lab
                lab.down()
                raise
        finally:
            os.umask(umask)
        return lab

    @classmethod
    def find(cls, name: str = "lab") -> "Lab":
        """The running lab of that name.

        Raises LabError, with the names of those that run, where none has that name.
        """
        return cls._of(registry.find(name))

    @classmethod
    def _of(cls, layout: LabLayout) -> "Lab":
        return cls(**{field.name: getattr(layout, field.name) for field in fields(layout)})

    def down(self) -> None:
        """End every process of the lab and remove all that it made, also of half a lab."""
        registry.remove(self.name)

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    def run(self, argv: Argv, **settings: Any) -> "subprocess.CompletedProcess[Any]":
        """``subprocess.run`` of a client on this machine that talks to this lab."""
        environ = self.whole_environ(settings.pop("env", None))
        return subprocess.run(self.command(argv), env=environ, **settings)

    def exec(self, node: str, argv: Argv, **settings: Any) -> "subprocess.CompletedProcess[Any]":
        """``subprocess.run`` inside a node."""
        environ = self.whole_environ(settings.pop("env", None))
        return subprocess.run(self.inside(self.node(node), argv), env=environ, **settings)

    def kill(self, node: str) -> None:
        """Let the node die as if unplugged: its processes are killed and its link goes down."""
        dead = self.node(node)
        network.check_outside(dead.netns)
        network.plug(self.switch, dead.index, up=False)
        network.kill_processes(dead.netns)

    def revive(self, node: str) -> None:
        """Plug in a killed node and start its slurmd; Slurm uses it again once it registers."""
        dead = self.node(node)
        network.plug(self.switch, dead.index, up=True)
        daemons.start_slurmd(self, dead)

    def status(self) -> dict[str, str]:
        """Slurm's state of each node, in the order of the cluster.

        Example: ``{"gamma": "IDLE", "beta": "IDLE+DRAIN"}``.
        """
        return daemons.node_states(self)


def start(lab: LabLayout, cluster: "Cluster") -> None:
    """Make the folders, the network and the configuration of a lab and start its daemons."""
    from ddp_slurm.lab.config import write_configuration  # imports Jinja2, which only this needs

    _make_folders(lab)
    network.make_switch(lab.switch, lab.network)
    for node in lab.nodes:
        network.make_node(node.netns, lab.switch, node.index, node.address)
    write_configuration(lab, cluster, daemons.slurm_version(lab))
    daemons.start_munged(lab)
    daemons.start_slurmctld(lab)
    daemons.start_slurmd(lab, *lab.nodes)
    daemons.wait_for_nodes(lab)


def _make_folders(lab: LabLayout) -> None:
    for part in ("conf", "dev", "etc", "etc/root", "log", "spool", "state"):
        (lab.folder / part).mkdir()
    for name, text in (("hosts", _hosts(lab)), ("nsswitch.conf", NSSWITCH)):
        (lab.folder / "etc" / name).write_text(text)
        if lab.slurm_root:  # the mount point; debootstrap makes no hosts file
            (lab.slurm_root / "etc" / name).touch()


def _hosts(lab: LabLayout) -> str:
    """A hosts file that answers every look-up.

    One that waits for a DNS server that does not exist costs 17 s at rendezvous.
    """
    lines = ["127.0.0.1 localhost", f"{lab.controller_address} {lab.controller}"]
    lines += [f"{node.address} {node.name}" for node in lab.nodes]
    return "\n".join(lines) + "\n"


def all_labs() -> list[Lab]:
    """All labs on this machine, also those of which only a part is left."""
    return [Lab._of(layout) for layout in registry.all_layouts()]
