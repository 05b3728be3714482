"""A Cluster as the text of a cluster.yaml, which reads back as the same one."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import yaml

from ddp_slurm.cluster import Cluster, GpuModel, Node, Ssh
from ddp_slurm.hostlist import compress_hostlist
from ddp_slurm.schema.fields import memory_text
from ddp_slurm.schema.schema import keys_of


def cluster_yaml(
    cluster: Cluster,
    heading: Sequence[str] = (),
    comments: Mapping[str, Mapping[str, str]] | None = None,
) -> str:
    """The text. Neighbours that differ in nothing but their name share an item.

    Args:
        heading: lines of comment at the top.
        comments: by node and key, the comment behind the value.
    """
    lines = [f"# {line}" for line in heading]
    lines.append(f"name: {_flow(cluster.name)}")
    if cluster.controller:
        lines.append(f"controller: {_flow(cluster.controller)}")
    lines.append("nodes:")

    def item(node: Node) -> tuple[str | None, list[str]]:
        own_name = node.name if node.address else None  # two nodes cannot share an address
        return own_name, _item_lines(node, (comments or {}).get(node.name, {}))

    for (_, (name_comment, *others)), group in groupby(cluster.nodes, key=item):
        names = compress_hostlist([node.name for node in group])
        lines.append(f"  - name: {_flow(names)}{name_comment}")
        lines += others
    return "\n".join(lines) + "\n"


def _item_lines(node: Node, comments: Mapping[str, str]) -> list[str]:
    """The comment of the name, then a line for each other key that has a value."""
    behind = {key: f"  # {text}" for key, text in comments.items() if text}
    lines = [behind.get("name", "")]
    for name, key in keys_of(Node).items():
        if name == "name":
            continue
        value = getattr(node, key.field)
        if name in _WRITTEN and value is not None:
            value = _WRITTEN[name](value)
        if value not in (None, (), {}):
            lines.append(f"    {name}: {_flow(value)}{behind.get(name, '')}")
    return lines


def _gpus(models: tuple[GpuModel, ...]) -> Any:
    """A number for none, one mapping for one model, else a list."""
    written = [_given(model) for model in models]
    if not written:
        return 0
    return written[0] if len(written) == 1 else written


def _given(schema: GpuModel | Ssh) -> dict[str, Any]:
    values = {name: getattr(schema, name) for name in keys_of(type(schema))}
    return {name: value for name, value in values.items() if value is not None}


_WRITTEN: dict[str, Callable[[Any], Any]] = {
    "gpus": _gpus,
    "memory": memory_text,
    "env": dict,
    "ssh": _given,
}
"""How a value is written that is not a plain number, a word or a list of these."""


def _flow(value: Any) -> str:
    """A value in one line of YAML, which reads back as the same text."""
    if isinstance(value, dict):
        items = [f"{name}: {_flow(inner)}" for name, inner in value.items()]
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_flow(inner) for inner in value)}]"
    if isinstance(value, int):
        return str(value)
    dumped = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=1_000_000)
    return dumped.strip()[1:-1]
