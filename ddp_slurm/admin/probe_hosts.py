"""The hosts that a probe is told to ask."""

import re
from collections.abc import Sequence
from ipaddress import IPv6Address

from ddp_slurm.cluster import Cluster, Node, Ssh
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.hostlist import expand_hostlist

_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z_][A-Za-z0-9_.-]*)@)?"
    r"(?P<hosts>[A-Za-z0-9:][A-Za-z0-9_.:,\[\]-]*)"
    r"(?:=(?P<address>[A-Za-z0-9:][A-Za-z0-9_.:%-]*))?"
)


class ProbeError(DdpSlurmError):
    """The given hosts cannot be asked, or their cluster.yaml cannot be written."""


def nodes_of_arguments(arguments: Sequence[str], known: Cluster | None) -> list[Node]:
    """The nodes to ask: ``HOST``, ``gpu[01-04]``, ``USER@HOST`` or ``NAME=ADDRESS``.

    Where cluster.yaml has a host, by its name or address, its address and ssh settings hold.
    Raises ProbeError for an argument that is none of these.
    """
    known_nodes = known.nodes if known else ()
    by_name = {node.address: node for node in known_nodes if node.address}
    by_name |= {node.name: node for node in known_nodes}
    nodes: dict[str, Node] = {}
    for argument in arguments:
        match = _HOST.fullmatch(argument)
        if match is None:
            raise _not_a_host(argument)
        user, hosts, address = match.group("user", "hosts", "address")
        names = _expand(hosts, argument)
        if address and len(names) > 1:
            raise ProbeError(
                f"{argument!r} gives one address to {len(names)} hosts; give each its own"
            )
        for name in names:
            node = by_name.get(name, Node(name))
            if address:
                node = node._replace(address=address)
            if user:
                ssh = Ssh(user=user, port=node.ssh.port, identity=node.ssh.identity)
                node = node._replace(ssh=ssh)
            nodes[node.name] = node
    return list(nodes.values())


def _expand(hosts: str, argument: str) -> list[str]:
    if ":" not in hosts:
        return list(expand_hostlist(hosts))
    try:
        IPv6Address(hosts)
    except ValueError:
        raise _not_a_host(argument) from None
    return [hosts]


def _not_a_host(argument: str) -> ProbeError:
    return ProbeError(
        f"{argument!r} is not a host; expected for example gpu1, gpu[01-04], user@gpu1 or "
        "gpu1=192.168.8.151"
    )
