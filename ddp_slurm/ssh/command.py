"""The ssh command line for a node, and whether the node needs one.

ssh's own configuration (~/.ssh/config, known_hosts, the agent) holds; cluster.yaml only adds to it.
"""

import os
import socket

from ddp_slurm.cluster import Node
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.schema.fields import CONTROL_CHARACTERS
from ddp_slurm.user import user_name

CONNECT_TIMEOUT_SECONDS = 10

_OPTIONS = (
    "BatchMode=yes",  # asks for no password
    "ControlMaster=no",  # a shared connection would outlive the command
    "ControlPath=none",
    "ClearAllForwardings=yes",
    "LogLevel=ERROR",
    f"ConnectTimeout={CONNECT_TIMEOUT_SECONDS}",
    "ServerAliveInterval=15",
)


class RemoteError(DdpSlurmError):
    """A node cannot be reached, or a command on it did not end in time.

    A command that ran and failed is an Answer instead.
    """


def ssh_argv(node: Node, command_text: str) -> list[str]:
    """The local command that runs ``command_text``, a line for the node's shell, by ssh.

    Quote values in the text with ``shlex.quote``. Raises RemoteError for text with control
    characters.
    """
    if CONTROL_CHARACTERS.search(command_text):
        raise RemoteError(f"{node.name}: command {command_text!r} contains a control character")
    argv = ["ssh", "-T", "-x"]
    for option in _OPTIONS:
        argv += ["-o", option]
    if node.ssh.port is not None:
        argv += ["-p", str(node.ssh.port)]
    if node.ssh.user is not None:
        argv += ["-l", node.ssh.user]
    if node.ssh.identity is not None:
        # ssh expands %h, %u, ... in the name of an identity
        identity = os.path.expanduser(node.ssh.identity).replace("%", "%%")
        argv += ["-o", "IdentitiesOnly=yes", "-i", identity]
    return [*argv, "--", node.address or node.name, command_text]


def destination(node: Node) -> str:
    """``user@host port N`` for messages."""
    user = f"{node.ssh.user}@" if node.ssh.user else ""
    port = f" port {node.ssh.port}" if node.ssh.port else ""
    return f"{user}{node.address or node.name}{port}"


def is_local(node: Node) -> bool:
    """Whether the node is this machine, reached as the user who runs this."""
    if node.ssh.user not in (None, user_name()):
        return False
    if node.address is None:
        host = socket.gethostname()
        return node.name in (host, host.split(".")[0])
    return _is_own_address(node.address)


def _is_own_address(address: str) -> bool:
    """Only an address of this machine can be bound, which needs no list of interfaces."""
    try:
        candidates = socket.getaddrinfo(
            address, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )
    except (socket.gaierror, UnicodeError):
        return False
    return any(_can_bind(family, sockaddr) for family, _, _, _, sockaddr in candidates)


def _can_bind(family: int, sockaddr: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(sockaddr)
        except OSError:
            return False
    return True
