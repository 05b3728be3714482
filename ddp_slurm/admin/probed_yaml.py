"""The cluster.yaml of a probe, with comments: cards, driver, kernel, link speed."""

from collections.abc import Mapping

from ddp_slurm.admin.configs import PROBED_MEMORY_PERCENT
from ddp_slurm.admin.facts import Facts
from ddp_slurm.cluster import Cluster, Node
from ddp_slurm.cluster.write import cluster_yaml

HEADING = (
    "Written by: ddp-slurm cluster probe",
    "Change what you like; a later probe keeps address, partition, constraint, env and ssh.",
)


def probed_cluster_yaml(cluster: Cluster, facts_of: Mapping[str, Facts]) -> str:
    """The text of cluster.yaml. ``facts_of`` is by the nodes' names."""
    comments = {}
    for node in cluster.nodes:
        facts = facts_of.get(node.name)
        if facts is None:
            comments[node.name] = {"name": "not asked this time", "cpus": "hardware threads"}
        else:
            comments[node.name] = _comments(node, facts)
    return cluster_yaml(cluster, HEADING, comments)


def _comments(node: Node, facts: Facts) -> dict[str, str]:
    """By key of cluster.yaml."""
    comments = {
        "name": f"kernel {facts.first('kernel')}",
        "os": facts.first("libc") or "",
        "cpus": "hardware threads",
        "gpus": _gpu_comment(facts),
    }
    speed = facts.link_speed_mbit(node.interface) if node.interface else None
    if speed:
        comments["interface"] = f"{speed} Mbit/s"
    if facts.memory_mb:
        comments["memory"] = f"{PROBED_MEMORY_PERCENT} % of {facts.memory_mb} MiB"
    return comments


def _gpu_comment(facts: Facts) -> str:
    cards = dict.fromkeys(f"{gpu.name} {gpu.memory_mib} MiB" for gpu in facts.gpus)
    drivers = dict.fromkeys(gpu.driver for gpu in facts.gpus if gpu.driver)
    text = ", ".join(cards)
    return f"{text}; driver {', '.join(drivers)}" if drivers else text
