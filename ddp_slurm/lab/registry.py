"""Which labs exist on this machine: a folder for each, with its description in lab.json."""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_slurm.errors import did_you_mean
from ddp_slurm.files import write_whole
from ddp_slurm.lab import network
from ddp_slurm.lab.errors import LabError
from ddp_slurm.lab.layout import LABS_FOLDER, LabLayout, LabNode, netns_prefix

if TYPE_CHECKING:
    from ddp_slurm.cluster import Cluster

LOCK_FILE = LABS_FOLDER.with_suffix(".lock")
SOCKET_PATH_BYTES = 107
"""Linux allows no more in the path of a socket (unix(7))."""


def check_name(name: str) -> None:
    """Raises LabError for a name that a lab cannot have."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,30}", name):
        raise LabError(f"{name!r} is not a lab's name; expected up to 31 letters, digits, - and _")


def check_nodes(cluster: "Cluster", lab: str) -> None:
    """Raises LabError for nodes that a lab of that name cannot have."""
    if len(cluster.nodes) > network.MAX_NODES:
        raise LabError(
            f"{len(cluster.nodes)} nodes are too many for one machine; at most {network.MAX_NODES}"
        )
    # slurmstepd's socket for a batch script contains the node's name twice.
    longest_socket = f"{LABS_FOLDER}/{lab}/spool//_99999.4294967291"
    longest = (SOCKET_PATH_BYTES - len(longest_socket)) // 2
    for node in cluster.nodes:
        if node.name == "localhost":
            raise LabError(
                "a node of a lab cannot be called 'localhost': each of its hosts calls itself that"
            )
        if len(node.name) > longest:
            raise LabError(
                f"node {node.name!r} has {len(node.name)} characters; in a lab called {lab!r} "
                f"at most {longest} fit into the paths of Slurm's sockets"
            )


def reserve(cluster: "Cluster", name: str, slurm_root: Path | None) -> LabLayout:
    """Choose names and addresses for a new lab and record them. Raises LabError where it exists."""
    with locked():
        if (LABS_FOLDER / name).exists() or network.namespaces(netns_prefix(name)):
            raise LabError(
                f"lab {name!r} already exists; end it first: ddp-slurm lab down --name {name}"
            )
        number = network.free_network(lab.network for lab in all_layouts())
        nodes = tuple(
            LabNode(
                name=node.name,
                index=index,
                address=f"{network.NETWORKS[number]}.{index}",
                netns=netns_prefix(name) + node.name,
            )
            for index, node in enumerate(cluster.nodes, start=1)
        )
        lab = LabLayout(name, number, _controller_name(cluster), nodes, slurm_root)
        lab.folder.mkdir(parents=True)
        text = json.dumps(asdict(lab), default=str, indent=1)
        write_whole(lab.folder / "lab.json", text + "\n")
    return lab


def _controller_name(cluster: "Cluster") -> str:
    """``controller``, or with a number where a node is called that."""
    taken = {node.name for node in cluster.nodes}
    name, number = "controller", 0
    while name in taken:
        name, number = f"controller{number}", number + 1
    return name


def find(name: str) -> LabLayout:
    """The lab of that name. Raises LabError, with the names of those that exist, where none is."""
    check_name(name)
    lab = read(name)
    if lab is None:
        others = [other.name for other in all_layouts()]
        start_one = "; start one: ddp-slurm lab up --cluster cluster.yaml"
        hint = did_you_mean(name, others) if others else start_one
        raise LabError(f"no lab {name!r} is running{hint}")
    return lab


def read(name: str) -> LabLayout | None:
    """The description in lab.json, None where the file does not exist."""
    try:
        values = json.loads((LABS_FOLDER / name / "lab.json").read_text())
    except FileNotFoundError:
        return None
    values["nodes"] = tuple(LabNode(**node) for node in values["nodes"])
    values["slurm_root"] = Path(values["slurm_root"]) if values["slurm_root"] else None
    return LabLayout(**values)


def all_layouts() -> list[LabLayout]:
    """All labs on this machine, also those of which only a part is left."""
    names = [file.parent.name for file in sorted(LABS_FOLDER.glob("*/lab.json"))]
    labs = [read(name) for name in names]
    return [lab for lab in labs if lab is not None]


def remove(name: str) -> None:
    """End and remove all that exists of a lab. Raises LabError where nothing of it exists."""
    check_name(name)
    folder = LABS_FOLDER / name
    with locked():
        if not folder.exists() and not network.namespaces(netns_prefix(name)):
            find(name)  # raises, with the names of the labs that exist
        namespaces = network.namespaces(netns_prefix(name))
        network.check_outside(*namespaces)
        lab = read(name)
        if lab:
            network.remove_link(lab.network)
        for netns in namespaces:
            network.remove_namespace(netns)
        if folder.exists():
            shutil.rmtree(folder)
        if LABS_FOLDER.exists() and not any(LABS_FOLDER.iterdir()):
            LABS_FOLDER.rmdir()


@contextmanager
def locked() -> Iterator[None]:
    """One lab at a time is registered or removed.

    The file stays until the machine restarts. No other user can open it: one who could would hold
    the lock as long as he likes.
    """
    handle = os.open(LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
