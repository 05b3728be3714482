"""A Cluster as the text of a cluster.yaml, which reads back as the same one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby

import yaml

from ddp_slurm.cluster import Cluster, GpuModel, Node
from ddp_slurm.hostlist import compress_hostlist
from ddp_slurm.schema.fields import memory_text


def cluster_yaml(
    cluster: Cluster,
    heading: Sequence[str] = (),
    comments: Mapping[str, Mapping[str, str]] | None = None,
) -> str:
    """The text. Neighbours that differ in nothing but their name share an item.

    ``heading`` are lines of comment at the top, ``comments`` by node and key those behind a value.
    """
    lines = [*(f"# {line}" for line in heading), f"name: {_scalar(cluster.name)}"]
    if cluster.controller:
        lines.append(f"controller: {_scalar(cluster.controller)}")
    lines.append("nodes:")

    def item(node: Node) -> tuple[str | None, list[str]]:
        alone = node.name if node.address else None  # an address is one node's
        return alone, _lines(node, (comments or {}).get(node.name, {}))

    for (_, (name_comment, *rest)), group in groupby(cluster.nodes, key=item):
        names = compress_hostlist([node.name for node in group])
        lines += [f"  - name: {_scalar(names)}{name_comment}", *rest]
    return "\n".join(lines) + "\n"


def _lines(node: Node, comments: Mapping[str, str]) -> list[str]:
    """The comment of the name, then a line for each key that has a value."""
    values: dict[str, str | int | None] = {
        "os": node.os and _scalar(node.os),
        "address": node.address and _scalar(node.address),
        "interface": node.interface and _scalar(node.interface),
        "gpus": _list(map(_gpu_text, node.gpus))
        if len(node.gpus) > 1
        else "".join(map(_gpu_text, node.gpus)) or "0",
        "cpus": node.cpus,
        "sockets": node.sockets,
        "cores_per_socket": node.cores_per_socket,
        "threads_per_core": node.threads_per_core,
        "memory": node.memory_mb and memory_text(node.memory_mb),
        "features": _list(map(_scalar, node.features)) if node.features else None,
        "partition": node.partition and _scalar(node.partition),
        "constraint": node.constraint and _scalar(node.constraint),
        "env": _mapping(dict(node.env)),
        "ssh": _mapping(
            {key: str(value) for key, value in asdict(node.ssh).items() if value is not None}
        ),
    }
    said = {key: f"  # {text}" for key, text in comments.items() if text}
    return [
        said.get("name", ""),
        *(
            f"    {key}: {value}{said.get(key, '')}"
            for key, value in values.items()
            if value is not None
        ),
    ]


def _gpu_text(model: GpuModel) -> str:
    minors = None if model.minors is None else _list(map(str, model.minors))
    parts = {"type": model.type and _scalar(model.type), "count": model.count, "minors": minors}
    return (
        "{"
        + ", ".join(f"{key}: {value}" for key, value in parts.items() if value is not None)
        + "}"
    )


def _list(texts: Iterable[str]) -> str:
    return f"[{', '.join(texts)}]"


def _mapping(values: Mapping[str, str]) -> str | None:
    return (
        "{" + ", ".join(f"{key}: {_scalar(value)}" for key, value in values.items()) + "}"
        if values
        else None
    )


def _scalar(text: str) -> str:
    """Quoted where YAML would read more than the text in it."""
    return yaml.safe_dump(
        [text], default_flow_style=True, allow_unicode=True, width=1_000_000
    ).strip()[1:-1]
