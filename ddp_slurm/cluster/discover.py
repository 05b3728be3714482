"""A Cluster from the live Slurm: ``scontrol -o show node`` reads the same on all releases from 20.11 to 26.05."""

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from ddp_slurm.cluster.machines import Cluster, Node, NodeEntry
from ddp_slurm.cluster.write import cluster_yaml
from ddp_slurm.console import Commands, add_command, say
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.schema.schema import Invalid
from ddp_slurm.slurm_client.commands import clean_environ

TIMEOUT_SECONDS = 60
UNUSABLE = {
    "DOWN",
    "DRAIN",
    "DRAINED",
    "DRAINING",
    "ERROR",
    "FAIL",
    "FAILING",
    "FUTURE",
    "INVAL",
    "INVALID_REG",
    "MAINT",
    "NO_RESPOND",
    "NOT_RESPONDING",
    "UNKNOWN",
}
WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*")


class DiscoverError(DdpSlurmError):
    """There is no live Slurm, or it has no node to train on."""


@dataclass(frozen=True, slots=True)
class Discovered:
    """The usable nodes, and a line for each thing that was left out."""

    cluster: Cluster
    left_out: tuple[str, ...]


def discover() -> Cluster:
    """Ask the Slurm of this machine for its nodes. What cannot be used is left out and named on stderr.

    Raises DiscoverError where scontrol is missing or gets no answer, and where no usable node has a GPU.
    """
    config = _scontrol("show", "config")
    name = re.search(r"^ClusterName\s*= *(\S+)", config, re.MULTILINE)
    found = read_nodes(
        _scontrol("-o", "show", "node"),
        _scontrol("-o", "show", "partition"),
        name[1] if name and name[1] != "(null)" else "cluster",
    )
    for line in found.left_out:
        say(line)
    return found.cluster


def _scontrol(*arguments: str) -> str:
    command = ["scontrol", *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
            env=clean_environ(os.environ),
        )
    except FileNotFoundError:
        raise DiscoverError(
            "no cluster.yaml and no scontrol on PATH: write a cluster.yaml, or go to a login node of the cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise DiscoverError(
            f"{' '.join(command)}: no answer within {TIMEOUT_SECONDS} s; does slurmctld run?"
        ) from None
    if done.returncode:
        raise DiscoverError(
            f"{' '.join(command)}: {(done.stderr or done.stdout).strip() or 'failed without a word'}"
        )
    return done.stdout


def read_nodes(nodes: str, partitions: str, name: str) -> Discovered:
    """The cluster that two outputs of ``scontrol -o`` describe.

    ``nodes`` and ``partitions`` are those of ``show node`` and ``show partition``; ``name`` is the cluster's.
    Raises DiscoverError where no usable node has a GPU, and for a value that cluster.yaml could not hold.
    """
    open_partitions = _open_partitions(partitions)
    usable, left_out = [], []
    for record in _records(nodes, "NodeName"):
        node_name = record["NodeName"]
        here = [name for name in open_partitions if name in record.get("Partitions", "").split(",")]
        fault = _why_unusable(record, here)
        if fault:
            left_out.append(f"left out: {node_name}: {fault}")
            continue
        node, dropped = _node(record, open_partitions, here)
        usable.append(node)
        left_out += [f"left out: {node_name}: {what}" for what in dropped]
    if not any(node.gpus for node in usable):
        raise DiscoverError(
            "\n".join(
                [*left_out, f"Slurm's cluster {name!r} has no usable node with a GPU (gres/gpu)"]
            )
        )
    return Discovered(Cluster(name, tuple(usable)), tuple(left_out))


def _records(text: str, first_key: str) -> Iterator[dict[str, str]]:
    """Key=value pairs of each line. A value may hold spaces (OS=, Reason=), and the free text in the last ones may
    look like another pair, so the first of a key holds."""
    for line in text.splitlines():
        if line.startswith(f"{first_key}="):
            record: dict[str, str] = {}
            for key, value in re.findall(r"(?:^| )([A-Za-z_/]+)=(.*?)(?= [A-Za-z_/]+=|$)", line):
                record.setdefault(key, value.strip())
            yield record


def _open_partitions(text: str) -> dict[str, bool]:
    """Name -> whether it is the default, of those that take jobs; the default first, then the largest."""
    partitions = [
        p
        for p in _records(text, "PartitionName")
        if p.get("State") == "UP" and p.get("RootOnly") != "YES"
    ]
    partitions.sort(key=lambda p: (p.get("Default") != "YES", -int(p.get("TotalNodes", "0"))))
    return {p["PartitionName"]: p.get("Default") == "YES" for p in partitions}


def _why_unusable(record: dict[str, str], open_partitions: list[str]) -> str | None:
    state = record.get("State", "UNKNOWN")
    reason = record.get("Reason", "")
    # A star behind the state: slurmd does not answer.
    if "*" in state or set(re.findall(r"[A-Z_]+", state)) & UNUSABLE:
        return f"its state is {state}" + (f": {reason}" if reason else "")
    if not open_partitions:
        return f"no open partition takes it (Partitions={record.get('Partitions', '')})"
    return None


def _node(
    record: dict[str, str], partitions: dict[str, bool], here: list[str]
) -> tuple[Node, list[str]]:
    """The node, and what of it cluster.yaml cannot hold."""
    dropped = []
    gpus, other_types = _gpus(record.get("Gres", ""))
    dropped += [
        f"the type {kind!r} of its GPUs, which any GPU of the node then stands for"
        for kind in other_types
    ]
    words = [
        word
        for word in record.get("AvailableFeatures", "").split(",")
        if word not in ("", "(null)")
    ]
    dropped += [f"its feature {word!r}" for word in words if not WORD.fullmatch(word)]
    cpus = int(record.get("CPUEfctv") or record["CPUTot"])
    memory_mb = int(record.get("RealMemory", "1")) - int(record.get("MemSpecLimit", "0"))
    entry: dict[str, object] = {
        "name": record["NodeName"],
        "gpus": gpus,
        "cpus": cpus,
        "memory": memory_mb
        if memory_mb > 1
        else None,  # 1 is what Slurm takes where the admin set none
        "address": record.get("NodeAddr") if record.get("NodeAddr") != record["NodeName"] else None,
        "partition": None if partitions[here[0]] else here[0],
        "features": [word for word in words if WORD.fullmatch(word)],
        **_topology(record, cpus),
    }
    try:
        return NodeEntry.read(entry).first, dropped
    except Invalid as invalid:
        raise DiscoverError(
            f"node {record['NodeName']!r} of the live Slurm: {invalid}; write a cluster.yaml"
        ) from None


def _gpus(gres: str) -> tuple[list[dict[str, object]], list[str]]:
    """GPUs of ``gpu:a100:4(S:0-1),gpu:titan:1,mps:200``, and the types that cannot be written again."""
    counts: dict[str | None, int] = {}
    strange = []
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        words = [word for word in item.strip().split(":") if word != "no_consume"]
        if words[0] != "gpu":
            continue
        count = int(words.pop()) if len(words) > 1 and words[-1].isdigit() else 1
        kind = ":".join(words[1:]) or None
        if kind is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", kind):
            strange.append(kind)
            kind = None
        counts[kind] = counts.get(kind, 0) + count
    if None in counts:  # beside it Slurm refuses a type in one request
        counts = {None: sum(counts.values())}
    return [{"type": kind, "count": count} for kind, count in counts.items() if count], strange


def _topology(record: dict[str, str], cpus: int) -> dict[str, int]:
    """Sockets, cores and threads; without a topology in slurm.conf Slurm calls every CPU a socket."""
    sockets, cores, threads = (
        int(record.get(key, "1")) for key in ("Sockets", "CoresPerSocket", "ThreadsPerCore")
    )
    if cores * threads == 1 or cpus not in (sockets * cores, sockets * cores * threads):
        return {}
    return {"sockets": sockets, "cores_per_socket": cores, "threads_per_core": threads}


def add_commands(commands: Commands) -> None:
    add_command(commands, "discover", discover_command)


def discover_command() -> None:
    """Print a cluster.yaml of the live Slurm; what cannot be used is named on stderr."""
    heading = ["Made by ddp-slurm discover; the first node with GPUs is the host of rank 0."]
    print(cluster_yaml(discover(), heading), end="")
