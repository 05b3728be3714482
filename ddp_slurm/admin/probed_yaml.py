"""The cluster.yaml of a probe, with comments for what Slurm does not ask for: cards, driver, link speed."""

from collections.abc import Mapping

from ddp_slurm.admin.configs import PROBED_MEMORY_PERCENT
from ddp_slurm.admin.facts import Facts
from ddp_slurm.cluster import Cluster, Node
from ddp_slurm.cluster.write import cluster_yaml

HEADING = (
    "Written by: ddp-slurm cluster probe",
    "Change what you like; a later probe keeps address, partition, constraint, env and ssh.",
)


def probed_cluster_yaml(cluster: Cluster, told: Mapping[str, Facts]) -> str:
    """The text of cluster.yaml. ``told`` is by the nodes' names."""
    return cluster_yaml(
        cluster,
        HEADING,
        {node.name: _comments(node, told.get(node.name)) for node in cluster.nodes},
    )


def _comments(node: Node, facts: Facts | None) -> dict[str, str]:
    if facts is None:
        return {"name": "not asked this time", "cpus": "hardware threads"}
    speed = facts.link_speed_mbit(node.interface) if node.interface else None
    cards = ", ".join(dict.fromkeys(f"{gpu.name} {gpu.memory_mib} MiB" for gpu in facts.gpus))
    drivers = ", ".join(dict.fromkeys(gpu.driver for gpu in facts.gpus if gpu.driver))
    return {
        "name": f"kernel {facts.first('kernel')}",
        "os": facts.first("libc") or "",
        "interface": f"{speed} Mbit/s" if speed else "",
        "gpus": f"{cards}; driver {drivers}" if drivers else cards,
        "cpus": "hardware threads",
        "memory": f"{PROBED_MEMORY_PERCENT} % of {facts.memory_mb} MiB" if facts.memory_mb else "",
    }
