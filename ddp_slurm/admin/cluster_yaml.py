"""The text of a cluster.yaml, with comments for what Slurm does not ask for."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ..cluster import Cluster, GpuModel, Node
from ..fields import memory_text
from .configs import PROBED_MEMORY_PERCENT
from .facts import Facts


def cluster_yaml(cluster: Cluster, told: Mapping[str, Facts]) -> str:
    """The text of cluster.yaml; comments hold what Slurm does not ask for: cards, driver, link speed.

    ``told`` is by the nodes' names.
    """
    lines = [
        "# Written by: ddp-slurm cluster probe",
        "# Change what you like; a later probe keeps address, partition, constraint, env and ssh.",
        f"name: {_scalar(cluster.name)}",
    ]
    if cluster.controller:
        lines.append(f"controller: {_scalar(cluster.controller)}")
    lines.append("nodes:")
    for node in cluster.nodes:
        lines += _node_lines(node, told.get(node.name))
    return "\n".join(lines) + "\n"


def _node_lines(node: Node, facts: Facts | None) -> list[str]:
    speed = facts.link_speed_mbit(node.interface) if facts and node.interface else None
    entries: list[tuple[str, str | None, str]] = [
        ("name", _scalar(node.name), f"kernel {facts.first('kernel')}" if facts else "not asked this time"),
        ("os", node.os and _scalar(node.os), facts.first("libc") or "" if facts else ""),
        ("address", node.address and _scalar(node.address), ""),
        ("interface", node.interface and _scalar(node.interface), f"{speed} Mbit/s" if speed else ""),
        ("gpus", _gpus_text(node.gpus), _gpus_comment(facts)),
        ("cpus", _text(node.cpus), "hardware threads"),
        ("sockets", _text(node.sockets), ""),
        ("cores_per_socket", _text(node.cores_per_socket), ""),
        ("threads_per_core", _text(node.threads_per_core), ""),
        ("memory", memory_text(node.memory_mb) if node.memory_mb else None, _memory_comment(facts)),
        ("features", f"[{', '.join(map(_scalar, node.features))}]" if node.features else None, ""),
        ("partition", node.partition and _scalar(node.partition), ""),
        ("constraint", node.constraint and _scalar(node.constraint), ""),
        ("env", _mapping_text(dict(node.env)), ""),
        ("ssh", _mapping_text({k: v for k, v in asdict(node.ssh).items() if v is not None}), ""),
    ]  # fmt: skip
    lines = [f"    {key}: {value}" + (f"  # {comment}" if comment else "") for key, value, comment in entries if value]
    return ["  - " + lines[0].lstrip(), *lines[1:]]


def _gpus_text(models: Sequence[GpuModel]) -> str:
    def one(model: GpuModel) -> str:
        parts = [f"type: {_scalar(model.type)}"] if model.type else []
        parts.append(f"count: {model.count}")
        if model.minors is not None:
            parts.append(f"minors: [{', '.join(map(str, model.minors))}]")
        return "{" + ", ".join(parts) + "}"

    texts = [one(model) for model in models]
    return "0" if not texts else texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _gpus_comment(facts: Facts | None) -> str:
    if facts is None or not facts.gpus:
        return ""
    cards = dict.fromkeys(f"{g.name} {g.memory_mib} MiB" for g in facts.gpus)
    drivers = dict.fromkeys(g.driver for g in facts.gpus if g.driver)
    return f"{', '.join(cards)}{'; driver ' + ', '.join(drivers) if drivers else ''}"


def _memory_comment(facts: Facts | None) -> str:
    return f"{PROBED_MEMORY_PERCENT} % of {facts.memory_mb} MiB" if facts and facts.memory_mb else ""


def _mapping_text(values: Mapping[str, object]) -> str | None:
    return "{" + ", ".join(f"{key}: {_scalar(str(value))}" for key, value in values.items()) + "}" if values else None


def _text(number: int | None) -> str | None:
    return str(number) if number else None


def _scalar(value: str) -> str:
    """A YAML scalar that reads back as this text: plain where it is a plain word, else in double quotes."""
    if re.fullmatch(r"[A-Za-z0-9_/.][A-Za-z0-9_/.@+-]*", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
