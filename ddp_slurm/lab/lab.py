"""One lab: a running Slurm of several hosts on this machine."""

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ddp_slurm.cluster import Cluster
from ddp_slurm.errors import did_you_mean
from ddp_slurm.lab import daemons, network
from ddp_slurm.lab.config import write_configuration
from ddp_slurm.lab.enter import enter
from ddp_slurm.lab.errors import LabError
from ddp_slurm.lab.machine import check_machine, with_system_programs

LABS_FOLDER = Path("/run/ddp_slurm_lab")
SOCKET_PATH_BYTES = 107
"""Linux allows no more in the path of a socket (unix(7))."""


@dataclass(frozen=True)
class LabNode:
    """A host of the lab: ``index`` is its place in the cluster and the last part of its address."""

    name: str
    index: int
    address: str
    netns: str


@dataclass(frozen=True)
class Lab:
    """A running lab. Make one with ``Lab.up``, get hold of a running one with ``Lab.find``.

    As a context manager it is taken down at the end of the block.
    """

    name: str
    network: int
    controller: str
    """Host name of slurmctld's namespace, which is none of the nodes: each of them may be killed."""
    nodes: tuple[LabNode, ...]
    slurm_root: Path | None = None

    @classmethod
    def up(cls, cluster: Cluster, name: str = "lab", slurm_root: str | Path | None = None) -> "Lab":
        """Start a lab with the nodes of ``cluster`` and wait until Slurm calls all of them idle.

        ``slurm_root``: root folder of another system (from debootstrap) whose Slurm and munge are used.
        Raises LabError, with the daemon's own words, when something does not start; nothing is left behind then.
        """
        check_machine(slurm_root)
        check_name(name)
        check_nodes(cluster, name)
        umask = os.umask(0o022)  # other users submit jobs too
        try:
            lab = cls._reserve(cluster, name, Path(slurm_root).resolve() if slurm_root else None)
            try:
                lab._start(cluster)
            except BaseException:  # Ctrl-C too must not leave half a lab
                lab.down()
                raise
        finally:
            os.umask(umask)
        return lab

    @classmethod
    def _reserve(cls, cluster: Cluster, name: str, slurm_root: Path | None) -> "Lab":
        names = {node.name for node in cluster.nodes}
        controller = next(
            c
            for c in ("controller", *(f"controller{n}" for n in range(len(names))))
            if c not in names
        )
        with _registry():
            if (LABS_FOLDER / name).exists() or network.namespaces(_prefix(name)):
                raise LabError(
                    f"lab {name!r} is there already; end it first: ddp-slurm lab down --name {name}"
                )
            number = network.free_network(lab.network for lab in all_labs())
            nodes = tuple(
                LabNode(node.name, i, f"{network.NETWORKS[number]}.{i}", _prefix(name) + node.name)
                for i, node in enumerate(cluster.nodes, start=1)
            )
            lab = cls(name, number, controller, nodes, slurm_root)
            lab.folder.mkdir(parents=True)
            lab._record()
        return lab

    def _record(self) -> None:
        unfinished = self.folder / "lab.json.new"
        unfinished.write_text(json.dumps(asdict(self), default=str, indent=1) + "\n")
        os.replace(unfinished, self.folder / "lab.json")

    @classmethod
    def find(cls, name: str = "lab") -> "Lab":
        """The running lab of that name. Raises LabError where there is none, with the names of those that run."""
        check_name(name)
        lab = cls._read(name)
        if lab is None:
            others = [lab.name for lab in all_labs()]
            hint = (
                did_you_mean(name, others)
                if others
                else "; start one: ddp-slurm lab up --cluster cluster.yaml"
            )
            raise LabError(f"no lab {name!r} is running{hint}")
        return lab

    @classmethod
    def _read(cls, name: str) -> "Lab | None":
        try:
            values = json.loads((LABS_FOLDER / name / "lab.json").read_text())
        except FileNotFoundError:
            return None
        values["nodes"] = tuple(LabNode(**node) for node in values["nodes"])
        values["slurm_root"] = Path(values["slurm_root"]) if values["slurm_root"] else None
        return cls(**values)

    def _start(self, cluster: Cluster) -> None:
        for part in ("conf", "dev", "etc", "etc/root", "log", "spool", "state"):
            (self.folder / part).mkdir()
        for name, text in (("hosts", self._hosts()), ("nsswitch.conf", _NSSWITCH)):
            (self.folder / "etc" / name).write_text(text)
            if self.slurm_root:
                (
                    self.slurm_root / "etc" / name
                ).touch()  # to be mounted upon; debootstrap makes no hosts
        network.make_switch(self.switch, self.network)
        for node in self.nodes:
            network.make_node(node.netns, self.switch, node.index, node.address)
        write_configuration(self, cluster, daemons.slurm_version(self))
        daemons.start_munged(self)
        daemons.start_slurmctld(self)
        daemons.start_slurmd(self, *self.nodes)
        daemons.wait_for_nodes(self)

    def _hosts(self) -> str:
        """Answers every look-up: one that waits for a DNS server that is not there costs 17 s at rendezvous."""
        lines = ["127.0.0.1 localhost", f"{self.controller_address} {self.controller}"]
        return "\n".join([*lines, *(f"{node.address} {node.name}" for node in self.nodes)]) + "\n"

    def down(self) -> None:
        """End every process of the lab and remove all that it made. Also does so for half a lab."""
        remove(self.name)

    def __enter__(self) -> "Lab":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.down()

    @property
    def folder(self) -> Path:
        """Configuration, logs, spool and devices."""
        return LABS_FOLDER / self.name

    @property
    def slurm_conf(self) -> Path:
        return self.folder / "conf" / "slurm.conf"

    @property
    def controller_address(self) -> str:
        return f"{network.NETWORKS[self.network]}.{network.SWITCH_HOST}"

    @property
    def switch(self) -> str:
        """The network namespace of slurmctld, munged and the bridge."""
        return _prefix(self.name) + self.controller

    @property
    def environ(self) -> dict[str, str]:
        """To be merged into ``os.environ``: sbatch, squeue and scontrol of this machine then talk to this lab."""
        return {"SLURM_CONF": str(self.slurm_conf)}

    def node(self, name: str) -> LabNode:
        """Raises LabError for a node that the lab does not have."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise LabError(
            f"lab {self.name!r} has no node {name!r}{did_you_mean(name, [n.name for n in self.nodes])}"
        )

    def inside(self, node: LabNode | None, argv: Sequence[str | os.PathLike[str]]) -> list[str]:
        """The command line that runs ``argv`` in a node's network, host name and hosts file; None: slurmctld's host."""
        netns, host = (node.netns, node.name) if node else (self.switch, self.controller)
        return enter(argv, etc=self.folder / "etc", netns=netns, host=host, root=self.slurm_root)

    def command(self, argv: Sequence[str | os.PathLike[str]]) -> list[str]:
        """The command line that runs a client such as sbatch on this machine, with the lab's own Slurm release."""
        if self.slurm_root is None:
            return [os.fspath(arg) for arg in argv]
        return enter(argv, etc=self.folder / "etc", root=self.slurm_root)

    def run(
        self, argv: Sequence[str | os.PathLike[str]], **kwargs: Any
    ) -> "subprocess.CompletedProcess[Any]":
        """``subprocess.run`` of a client on this machine, talking to this lab."""
        return subprocess.run(self.command(argv), **self._with_environ(kwargs))

    def exec(
        self, node: str, argv: Sequence[str | os.PathLike[str]], **kwargs: Any
    ) -> "subprocess.CompletedProcess[Any]":
        """``subprocess.run`` inside a node."""
        return subprocess.run(self.inside(self.node(node), argv), **self._with_environ(kwargs))

    def _with_environ(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        environ: Mapping[str, str] = kwargs.get("env") or os.environ
        return {**kwargs, "env": with_system_programs({**environ, **self.environ})}

    def kill(self, node: str) -> None:
        """The node dies as if unplugged: slurmd, all steps and all else in it are killed, and the link goes down."""
        dead = self.node(node)
        network.check_outside(dead.netns)
        network.plug(self.switch, dead.index, up=False)
        network.kill_processes(dead.netns)

    def revive(self, node: str) -> None:
        """Plug a killed node in again and start its slurmd; Slurm takes it back when it has registered."""
        dead = self.node(node)
        network.plug(self.switch, dead.index, up=True)
        daemons.start_slurmd(self, dead)

    def daemon_runs(self, node: LabNode | None, name: str) -> bool:
        pids = network.processes(node.netns if node else self.switch)
        return any(_command_name(pid) == name for pid in pids)

    def status(self) -> dict[str, str]:
        """Slurm's state of each node, in the order of the cluster: ``{"gamma": "IDLE", "beta": "IDLE+DRAIN"}``."""
        done = self.run(
            ["scontrol", "-o", "show", "node"], capture_output=True, text=True, errors="replace"
        )
        if done.returncode:
            raise LabError(
                f"lab {self.name!r}: slurmctld does not answer: {(done.stderr or done.stdout).strip()}"
            )
        states = dict(re.findall(r"^NodeName=(\S+) .*? State=(\S+)", done.stdout, re.MULTILINE))
        return {node.name: states.get(node.name, "UNKNOWN") for node in self.nodes}


_NSSWITCH = (
    "passwd: files\ngroup: files\nshadow: files\nhosts: files\nservices: files\nprotocols: files\n"
)


def _prefix(name: str) -> str:
    """Network namespaces of one lab. A lab's name has no dot, so no name is the beginning of another."""
    return f"ddplab.{name}."


def check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,30}", name):
        raise LabError(
            f"{name!r} is not a lab's name; up to 31 letters, digits, - and _ are accepted"
        )


def check_nodes(cluster: Cluster, lab: str) -> None:
    """Raises LabError for nodes that a lab of that name cannot have."""
    if len(cluster.nodes) > network.MAX_NODES:
        raise LabError(
            f"{len(cluster.nodes)} nodes are too many for one machine; at most {network.MAX_NODES}"
        )
    # slurmstepd's socket for a batch script, with the node's name twice in it
    longest = (SOCKET_PATH_BYTES - len(f"{LABS_FOLDER}/{lab}/spool//_99999.4294967291")) // 2
    for node in cluster.nodes:
        if node.name == "localhost":
            raise LabError(
                "a node of a lab cannot be called 'localhost': to each of its hosts that is itself"
            )
        if len(node.name) > longest:
            raise LabError(
                f"node {node.name!r} has {len(node.name)} characters; in a lab called {lab!r} at most {longest} fit "
                "into the paths of Slurm's sockets"
            )


def _command_name(pid: int) -> str:
    try:
        program = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").partition("\0")[0]
    except OSError:
        return ""
    return os.path.basename(program)


@contextmanager
def _registry() -> Iterator[None]:
    """One lab at a time is registered or removed. The lock is on the parent folder: a file would be left behind."""
    handle = os.open(LABS_FOLDER.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def all_labs() -> list[Lab]:
    """All labs on this machine, also those of which only a part is left."""
    labs = (Lab._read(file.parent.name) for file in sorted(LABS_FOLDER.glob("*/lab.json")))
    return [lab for lab in labs if lab is not None]


def remove(name: str) -> None:
    """Remove what there is of a lab, however little. Raises LabError where there is nothing of it."""
    check_name(name)
    folder = LABS_FOLDER / name
    with _registry():
        if not folder.exists() and not network.namespaces(_prefix(name)):
            Lab.find(name)  # raises, with the labs that there are
        network.check_outside(*network.namespaces(_prefix(name)))
        if lab := Lab._read(name):
            network.remove_link(lab.network)
        for netns in network.namespaces(_prefix(name)):
            network.remove_namespace(netns)
        if folder.exists():
            shutil.rmtree(folder)
        if LABS_FOLDER.exists() and not any(LABS_FOLDER.iterdir()):
            LABS_FOLDER.rmdir()
