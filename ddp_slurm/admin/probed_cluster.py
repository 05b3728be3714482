"""A Cluster from what the machines report, over an earlier cluster.yaml. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_address

from ddp_slurm.admin.configs import schedulable_memory_mb
from ddp_slurm.admin.facts import Facts
from ddp_slurm.admin.gpus import Gpu, gres_types
from ddp_slurm.admin.probe_hosts import ProbeError
from ddp_slurm.admin.slurm_lines import FIRST_RENDER_MINOR
from ddp_slurm.cluster import Cluster, GpuModel, Node

NVIDIA_VENDOR = "0x10de"
"""PCI's number of the maker."""


def probed_cluster(
    known: Cluster | None, asked: Sequence[Node], facts_of: Mapping[str, Facts]
) -> Cluster:
    """The whole cluster: nodes of the file that were not asked stay as they are, new ones follow.

    A new node gets its host name: slurmd looks for that one. ``facts_of`` is by the names that were
    asked. Raises ProbeError for two machines of one host name.
    """
    types = gres_types(gpu.name for facts in facts_of.values() for gpu in facts.gpus)
    known = known or Cluster("cluster", ())
    known_names = {node.name for node in known.nodes}
    nodes = list(known.nodes)
    for asked_node in asked:
        facts = facts_of.get(asked_node.name)
        if facts is None:
            continue
        others = _addresses_of_others(asked_node, asked, facts_of)
        node = probed_node(asked_node, facts, types, others)
        if node.name in known_names:
            index = [known_node.name for known_node in nodes].index(node.name)
            nodes[index] = node
        else:
            nodes.append(node._replace(name=facts.host or node.name))
    _check_names(nodes, known_names)
    return replace(known, nodes=tuple(nodes))


def _addresses_of_others(
    node: Node, asked: Sequence[Node], facts_of: Mapping[str, Facts]
) -> list[str]:
    addresses = []
    for other in asked:
        if other.name != node.name and other.name in facts_of:
            reached_at = facts_of[other.name].first("reached_at")
            addresses.append(other.address or reached_at or "")
    return addresses


def _check_names(nodes: Sequence[Node], known_names: set[str]) -> None:
    names = [node.name for node in nodes]
    for name in sorted(set(names)):
        if names.count(name) == 1:
            continue
        message = (
            f"two hosts have the host name {name!r}; give each machine a name of its own "
            "(hostnamectl)"
        )
        if name in known_names:
            message += f"; ask for it as {name} if it is the one of the file"
        raise ProbeError(message)


def probed_node(asked: Node, facts: Facts, types: Mapping[str, str], others: Iterable[str]) -> Node:
    """What a node reports, over what cluster.yaml has and no probe can know (partition, env).

    ``types`` is the gres type of each card name, ``others`` the addresses of the other nodes.
    """
    topology = facts.topology
    address = _address(asked, facts)
    gpus = asked.gpus if gpu_warning(facts) else gpu_models(facts.gpus, types)
    return asked._replace(
        address=address,
        interface=_interface(facts, address, others) or asked.interface,
        gpus=gpus,
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
    is_address = re.fullmatch(r"[0-9.]+|[0-9a-fA-F:]+:[0-9a-fA-F:.]*", asked.name)
    if is_address:  # the name will be the host name
        return asked.name
    try:
        reached_at = ip_address(facts.first("reached_at") or "")
    except ValueError:
        return None
    # fe80::1%eno1 leads there through the asking machine's own interface only
    if reached_at.is_loopback or reached_at.is_link_local:
        return None
    return str(reached_at)


def _interface(facts: Facts, address: str | None, others: Iterable[str]) -> str | None:
    """The one that leads to most other nodes; else the one with the node's own address."""
    interfaces = []
    for other in others:
        interface = facts.interface_towards(other)
        if interface and interface != "lo":
            interfaces.append(interface)
    if interfaces:
        return max(interfaces, key=interfaces.count)
    return facts.interface_of_address.get(address or "")


def gpu_warning(facts: Facts) -> str | None:
    """Why the cards of a machine cannot be seen; None where all is well."""
    if facts.gpus:
        return None
    if facts.nvidia_error:
        return f"nvidia-smi fails: {facts.nvidia_error}"
    if facts.undivided_mig_cards:
        return f"MIG is enabled on GPU {facts.undivided_mig_cards[0]}, but it has no instances"
    for tool in ("amd-smi", "rocm-smi"):
        block = facts.block(tool)
        if block and block.status != 0:
            message = block.text.splitlines()[0] if block.text else "no message"
            return f"{tool} fails: {message}"
    if NVIDIA_VENDOR not in facts.values.get("pci_gpu", ()):
        return None
    if facts.block("nvidia-smi"):
        return "there is an NVIDIA card, but nvidia-smi shows none"
    return "there is an NVIDIA card, but no nvidia-smi; install the driver first"


def gpu_models(gpus: Sequence[Gpu], types: Mapping[str, str]) -> tuple[GpuModel, ...]:
    """Cards of one model together, in the order of the models' first cards.

    Device numbers are given only where they are not 0, 1, 2, ... in that order. An instance of a
    divided card (MIG) has none.
    """
    minors_of_name: dict[str, list[int]] = {}
    for gpu in gpus:
        minors_of_name.setdefault(gpu.name, []).append(_minor(gpu))
    all_minors = [minor for minors in minors_of_name.values() for minor in minors]
    has_instances = any(gpu.mig_profile for gpu in gpus)
    is_default = has_instances or all_minors == list(range(len(gpus)))
    models = []
    for name, minors in minors_of_name.items():
        given = None if is_default else tuple(minors)
        models.append(GpuModel(type=types[name], count=len(minors), minors=given))
    return tuple(models)


def _minor(gpu: Gpu) -> int:
    if gpu.minor is not None:
        return gpu.minor
    return gpu.index + (FIRST_RENDER_MINOR if gpu.vendor == "amd" else 0)


def _features(asked: Node, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """After the file's own: compute capabilities, and the memory of the smallest card.

    As words that a job can ask for, such as ``cc86`` and ``vram24gb``.
    """
    features = []
    for feature in asked.features:
        is_probed = re.fullmatch(r"cc\d+|gfx\w+|vram\d+gb", feature)
        if not is_probed:
            features.append(feature)
    for gpu in gpus:
        if gpu.compute_capability and gpu.vendor == "amd":
            features.append(gpu.compute_capability)
        elif gpu.compute_capability:
            features.append("cc" + gpu.compute_capability.replace(".", ""))
    memory_mib = min((gpu.memory_mib for gpu in gpus if gpu.memory_mib), default=0)
    if memory_mib:
        # 81559 MiB is sold as 80 GB, 24564 MiB as 24 GB
        features.append(f"vram{round(memory_mib / 1024)}gb")
    return tuple(dict.fromkeys(features))
