"""cluster.yaml from the machines themselves: what each node told (facts), written with comments."""

import re
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import unified_diff
from ipaddress import IPv6Address, ip_address
from itertools import groupby
from pathlib import Path

from ddp_slurm.admin.configs import FIRST_RENDER_MINOR, schedulable_memory_mb
from ddp_slurm.admin.facts import Facts, gather
from ddp_slurm.admin.gpus import Gpu, gres_types, nvidia_fault
from ddp_slurm.admin.probed_yaml import probed_cluster_yaml
from ddp_slurm.cluster.machines import Cluster, ClusterError, ClusterFile, GpuModel, Node, Ssh
from ddp_slurm.console import say
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.files import write_whole
from ddp_slurm.hostlist import expand_hostlist
from ddp_slurm.schema.yaml_file import load_yaml, validate
from ddp_slurm.ssh.command import RemoteError
from ddp_slurm.ssh.run import Runner, on_all, run

NVIDIA_VENDOR = "0x10de"
"""PCI's number of the maker."""


class ProbeError(DdpSlurmError):
    """The hosts that were named cannot be asked, or their cluster.yaml cannot be written."""


def nodes_of_arguments(arguments: Sequence[str], known: Cluster | None) -> list[Node]:
    """The nodes to ask: ``HOST``, ``gpu[01-04]``, ``USER@HOST`` or ``NAME=ADDRESS``.

    Where cluster.yaml knows a host, by its name or address, its address and ssh settings hold.

    Raises ProbeError for a word that is none of these.
    """
    old = known.nodes if known else ()
    by_name = {node.address: node for node in old if node.address} | {
        node.name: node for node in old
    }
    nodes: dict[str, Node] = {}
    for argument in arguments:
        match = re.fullmatch(
            r"(?:(?P<user>[A-Za-z_][A-Za-z0-9_.-]*)@)?(?P<hosts>[A-Za-z0-9:][A-Za-z0-9_.:,\[\]-]*)"
            r"(?:=(?P<address>[A-Za-z0-9:][A-Za-z0-9_.:%-]*))?",
            argument,
        )
        if not match or (":" in match["hosts"] and not _is_ipv6(match["hosts"])):
            raise ProbeError(
                f"{argument!r} is not a host: gpu1, gpu[01-04], user@gpu1 and gpu1=192.168.8.151 are"
            )
        names = [match["hosts"]] if ":" in match["hosts"] else expand_hostlist(match["hosts"])
        if match["address"] and len(names) > 1:
            raise ProbeError(
                f"{argument!r} gives one address to {len(names)} hosts; give each its own"
            )
        for name in names:
            node = by_name.get(name, Node(name))
            if match["address"]:
                node = node._replace(address=match["address"])
            if match["user"]:
                node = node._replace(
                    ssh=Ssh(user=match["user"], port=node.ssh.port, identity=node.ssh.identity)
                )
            nodes[node.name] = node
    return list(nodes.values())


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


def probed_node(asked: Node, facts: Facts, types: Mapping[str, str], others: Iterable[str]) -> Node:
    """What a node told, laid over what cluster.yaml says of it and no probe can know (partition, constraint, env).

    ``types`` is the gres type of each card name, ``others`` the addresses of the other nodes.
    """
    topology = facts.topology
    address = _address(asked, facts)
    return asked._replace(
        address=address,
        interface=_interface(facts, address, others) or asked.interface,
        gpus=asked.gpus if gpu_warning(facts) else gpu_models(facts.gpus, types),
        cpus=facts.cpus,
        memory_mb=facts.memory_mb and schedulable_memory_mb(facts.memory_mb),
        sockets=topology.sockets if topology else None,
        cores_per_socket=topology.cores_per_socket if topology else None,
        threads_per_core=topology.threads_per_core if topology else None,
        features=_features(asked, facts.gpus),
        os=facts.first("os"),
    )


def _address(asked: Node, facts: Facts) -> str | None:
    if asked.address:
        return asked.address
    if re.fullmatch(r"[0-9.]+|[0-9a-fA-F:]+:[0-9a-fA-F:.]*", asked.name):
        return asked.name  # asked by its address: the name comes from the machine
    try:
        reached = ip_address(facts.first("reached_at") or "")
    except ValueError:
        return None
    # fe80::1%eno1 leads there over the asking machine's own interface only
    return None if reached.is_loopback or reached.is_link_local else str(reached)


def _interface(facts: Facts, address: str | None, others: Iterable[str]) -> str | None:
    """The one that leads to the other nodes; else the one that bears the node's own address."""
    towards = [facts.interface_towards(other) for other in others]
    ways = [name for name in towards if name and name != "lo"]
    return max(ways, key=ways.count) if ways else facts.addresses.get(address or "")


def gpu_warning(facts: Facts) -> str | None:
    """Why the cards of a machine cannot be seen, though there are some or a tool for them; None where all is well."""
    if facts.gpus:
        return None
    nvidia = facts.block("nvidia-smi")
    if nvidia and (fault := nvidia_fault(nvidia.status, nvidia.text)):
        return f"nvidia-smi fails: {fault}"
    for tool in ("amd-smi", "rocm-smi"):
        block = facts.block(tool)
        if block and block.status != 0:
            return (
                f"{tool} fails: {block.text.splitlines()[0] if block.text else 'it says nothing'}"
            )
    if NVIDIA_VENDOR in facts.values.get("pci_gpu", ()):
        shown = "nvidia-smi shows none" if nvidia else "no nvidia-smi; install the driver first"
        return f"there is an NVIDIA card, but {shown}"
    return None


def gpu_models(gpus: Sequence[Gpu], types: Mapping[str, str]) -> tuple[GpuModel, ...]:
    """Cards of one model together; device numbers only where they are not 0, 1, 2, ... in that order."""
    groups = [
        (name, list(cards))
        for name, cards in groupby(sorted(gpus, key=_model_order(gpus)), key=lambda g: g.name)
    ]
    numbers = [
        [card.minor if card.minor is not None else _default_minor(card) for card in cards]
        for _, cards in groups
    ]
    plain = [n for group in numbers for n in group] == list(range(len(gpus)))
    return tuple(
        GpuModel(type=types[name], count=len(cards), minors=None if plain else tuple(minors))
        for (name, cards), minors in zip(groups, numbers, strict=True)
    )


def _model_order(gpus: Sequence[Gpu]) -> Callable[[Gpu], int]:
    names = list(dict.fromkeys(gpu.name for gpu in gpus))
    return lambda gpu: names.index(gpu.name)


def _default_minor(card: Gpu) -> int:
    return card.index + (FIRST_RENDER_MINOR if card.vendor == "amd" else 0)


def _features(asked: Node, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Compute capability and memory of the smallest card as words that a job can ask for, after the file's own."""
    own = [word for word in asked.features if not re.fullmatch(r"cc\d+|gfx\w+|vram\d+gb", word)]
    found = [
        gpu.compute_capability
        if gpu.vendor == "amd"
        else f"cc{gpu.compute_capability.replace('.', '')}"
        for gpu in gpus
        if gpu.compute_capability
    ]
    memory = min((gpu.memory_mib for gpu in gpus if gpu.memory_mib), default=0)
    # 81559 MiB is sold as 80 GB, 24564 MiB as 24 GB
    size = [f"vram{round(memory / 1024)}gb"] if memory else []
    return tuple(dict.fromkeys([*own, *found, *size]))


def probed_cluster(
    known: Cluster | None, asked: Sequence[Node], told: Mapping[str, Facts]
) -> Cluster:
    """The whole cluster: nodes of the file that were not asked stay as they are, new ones follow.

    A new node gets the name that it calls itself: slurmd looks for that one. ``told`` is by the names that were asked.
    """
    types = gres_types(gpu.name for facts in told.values() for gpu in facts.gpus)
    old = {node.name: node for node in known.nodes} if known else {}
    found: dict[str, Node] = {}
    for node in asked:
        if node.name in told:
            others = [
                other.address or told[other.name].first("reached_at") or ""
                for other in asked
                if other.name != node.name and other.name in told
            ]
            seen = probed_node(node, told[node.name], types, others)
            found[node.name] = (
                seen if node.name in old else seen._replace(name=told[node.name].host or node.name)
            )
    nodes = {**old, **found}
    names = [node.name for node in nodes.values()]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        same = f"; ask for it as {twice[0]} if it is the one of the file" if twice[0] in old else ""
        raise ProbeError(
            f"two hosts call themselves {twice[0]!r}; give each machine a name of its own (hostnamectl){same}"
        )
    return Cluster(
        known.name if known else "cluster",
        tuple(nodes.values()),
        known.controller if known else None,
    )


def difference(old: str, new: str, path: Path) -> str:
    """A unified diff of two versions of a file; empty where they are equal."""
    return "".join(
        unified_diff(
            old.splitlines(keepends=True),
            new.splitlines(keepends=True),
            f"{path} (now)",
            f"{path} (probed)",
        )
    )


def probe(
    hosts: Sequence[str], file: Path | None, output: str | None, *, yes: bool, runner: Runner = run
) -> None:
    """The command ``ddp-slurm cluster probe``: ask, compare, write.

    Raises ProbeError when no node answered, or when a file would be written over and nobody can be asked.
    """
    path = Path(output or file or "cluster.yaml")
    base = file or (path if output != "-" and path.exists() else None)
    known = load_known(base) if base else None
    asked = nodes_of_arguments(hosts, known) or list(
        known.nodes if known else (Node(socket.gethostname()),)
    )
    told: dict[str, Facts] = {}
    for name, answer in on_all(asked, lambda node: gather(node, runner=runner)).items():
        if isinstance(answer, RemoteError):
            say(f"warning: {answer}")
        else:
            told[name] = answer
            if warning := gpu_warning(answer):
                say(f"warning: {name}: {warning}; its gpus are left as they were")
    if not told:
        raise ProbeError("no node answered; nothing was written")
    cluster = probed_cluster(known, asked, told)
    text = probed_cluster_yaml(cluster, by_final_name(known, told))
    if output == "-":
        print(text, end="")
        return
    _write(path, text, yes=yes)
    try:
        Cluster.load(path)
    except ClusterError as fault:
        say(f"warning: the file needs your hand: {fault}")


def load_known(path: Path) -> Cluster:
    """An earlier cluster.yaml. Unlike anywhere else it may be without GPUs: the first probe may come before the driver.

    Raises ClusterError for every other fault.
    """
    try:
        return Cluster.load(path)
    except ClusterError as fault:
        if len(str(fault).splitlines()) > 1 or "no node has a GPU" not in str(fault):
            raise
    checked = validate(ClusterFile.read, load_yaml(path, ClusterError), ClusterError)
    nodes = tuple(node for entry in checked.nodes for node in entry.expand(checked.ssh))
    return Cluster(checked.name, nodes, checked.controller)


def by_final_name(known: Cluster | None, told: Mapping[str, Facts]) -> dict[str, Facts]:
    """The facts under the names of cluster.yaml: those of the file, else what the machine calls itself."""
    old = {node.name for node in known.nodes} if known else set()
    return {name if name in old else facts.host or name: facts for name, facts in told.items()}


def _write(path: Path, text: str, *, yes: bool) -> None:
    old = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
    if old == text:
        say(f"{path}: nothing changed")
        return
    if old is not None:
        print(difference(old, text, path), end="")
        if not yes and not sys.stdin.isatty():
            raise ProbeError(f"{path}: is there already and differs as shown; --yes writes over it")
        if not yes:
            print(f"Write over {path}? [y/N] ", end="", file=sys.stderr, flush=True)
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                raise ProbeError(f"{path}: left as it was")
    write_whole(path, text)
    say(f"{path}: written")
