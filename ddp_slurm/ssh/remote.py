"""The one seam that runs a command on a node: on this machine, or by the system's ssh client.

ssh's own configuration (~/.ssh/config, known_hosts, the agent) holds; cluster.yaml only adds to it. Secrets go over
standard input: an argument is readable by every user of the node for as long as the command runs.
"""

import os
import shlex
import socket
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ddp_slurm.cluster import Node
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.job.log_path import user_name
from ddp_slurm.schema.fields import CONTROL_CHARACTERS

CONNECT_TIMEOUT_SECONDS = 10
MAX_CONNECTIONS = 16
"""Nodes that are spoken to at once; sshd's MaxStartups counts per node, so this only spares the sending machine."""

_AS_ROOT = 'if [ "$(id -u)" = 0 ]; then exec "$@"; else exec sudo -n -- "$@"; fi'

Answer = TypeVar("Answer")


class RemoteError(DdpSlurmError):
    """A node cannot be reached, or did not answer in time. A command that ran and failed is a Result instead."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a command on a node left: its exit status and its text."""

    returncode: int
    stdout: str
    stderr: str


class Runner(Protocol):
    """Anything that runs a command on a node; ``run`` is the usual one, tests and the lab have others."""

    def __call__(
        self,
        node: Node,
        argv: Sequence[str],
        *,
        input: bytes | None = None,
        timeout_seconds: float = ...,
    ) -> Result: ...


def ssh_argv(node: Node, command_text: str) -> list[str]:
    """The local command that runs ``command_text``, a line for the node's shell, by ssh.

    Quote values in the text with ``shlex.quote``. It asks for no password and opens no shared connection: a control
    socket would outlive the command. Raises RemoteError for text with control characters.
    """
    if CONTROL_CHARACTERS.search(command_text):
        raise RemoteError(
            f"{node.name}: command {command_text!r} has a newline or another control character in it"
        )
    argv = [
        "ssh",
        "-T",
        "-x",
        "-o",
        "BatchMode=yes",
        "-o",
        "ControlMaster=no",
        "-o",
        "ControlPath=none",
    ]
    argv += ["-o", "ClearAllForwardings=yes", "-o", "LogLevel=ERROR"]
    argv += ["-o", f"ConnectTimeout={CONNECT_TIMEOUT_SECONDS}", "-o", "ServerAliveInterval=15"]
    if node.ssh.port is not None:
        argv += ["-p", str(node.ssh.port)]
    if node.ssh.user is not None:
        argv += ["-l", node.ssh.user]
    if node.ssh.identity is not None:
        # ssh expands %h, %u, ... in the name of an identity
        identity = os.path.expanduser(node.ssh.identity).replace("%", "%%")
        argv += ["-o", "IdentitiesOnly=yes", "-i", identity]
    return [*argv, "--", node.address or node.name, command_text]


def run(
    node: Node, argv: Sequence[str], *, input: bytes | None = None, timeout_seconds: float = 60.0
) -> Result:
    """Run ``argv`` on the node, each item one word there whatever is in it.

    ``input`` is its standard input (empty if None). Raises RemoteError when the node cannot be reached or the command
    is not done after ``timeout_seconds``; any exit status of the command itself is a Result.
    """
    here = is_local(node)
    command = list(argv) if here else ssh_argv(node, shlex.join(argv))
    try:
        done = subprocess.run(
            command, input=input or b"", capture_output=True, timeout=timeout_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise RemoteError(
            f"{node.name}: {argv[0]} was not done after {timeout_seconds:g} s"
        ) from None
    except FileNotFoundError:
        if here:
            return Result(127, "", f"{argv[0]}: command not found\n")
        raise RemoteError("ssh: command not found; install the system's ssh client") from None
    except (OSError, ValueError) as fault:
        raise RemoteError(f"{node.name}: cannot run {command[0]}: {fault}") from None
    result = Result(
        done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    )
    if not here and result.returncode == 255:
        raise RemoteError(
            f"{node.name}: cannot be reached by ssh ({destination(node)}): {_cause(result.stderr)}"
        )
    return result


def run_script(
    node: Node,
    script: str,
    *,
    as_root: bool = False,
    wrapper: Sequence[str] = (),
    timeout_seconds: float = 60.0,
    runner: Runner = run,
) -> Result:
    """Run a POSIX shell script on the node. It travels over standard input, so it may hold secrets.

    ``as_root`` goes through ``sudo -n`` where the login user is not root already; ``wrapper`` is a command that runs
    the shell, such as ``flock FILE``. Raises as ``run`` does.
    """
    argv = [*wrapper, "sh", "-s"]
    if as_root:
        argv = ["sh", "-c", _AS_ROOT, "sh", *argv]
    # A command of the script must not read the rest of the script as its own input: the braces make the shell
    # read it whole first.
    text = "{\n" + script.rstrip("\n") + "\n} </dev/null\n"
    return runner(node, argv, input=text.encode(), timeout_seconds=timeout_seconds)


def on_all(nodes: Iterable[Node], ask: Callable[[Node], Answer]) -> dict[str, Answer | RemoteError]:
    """``ask(node)`` for every node at once; a node that cannot be reached gives its RemoteError instead."""

    def guarded(node: Node) -> Answer | RemoteError:
        try:
            return ask(node)
        except RemoteError as fault:
            return fault

    everyone = list(nodes)
    with ThreadPoolExecutor(max_workers=MAX_CONNECTIONS) as pool:
        return dict(zip((node.name for node in everyone), pool.map(guarded, everyone), strict=True))


def is_local(node: Node) -> bool:
    """Whether the node is this machine, reached as the user who runs this."""
    if node.ssh.user not in (None, user_name()):
        return False
    if node.address is None:
        here = socket.gethostname()
        return node.name in (here, here.split(".")[0])
    return _is_own_address(node.address)


def _is_own_address(address: str) -> bool:
    """Only an address of this machine can be bound, which needs no list of interfaces."""
    try:
        candidates = socket.getaddrinfo(
            address, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )
    except (socket.gaierror, UnicodeError):
        return False
    for family, kind, protocol, _, where in candidates:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(where)
            except OSError:
                continue
            return True
    return False


def destination(node: Node) -> str:
    """``user@host port N`` for messages."""
    user = f"{node.ssh.user}@" if node.ssh.user else ""
    port = f" port {node.ssh.port}" if node.ssh.port else ""
    return f"{user}{node.address or node.name}{port}"


def _cause(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    cause = lines[-1] if lines else "the connection broke off"
    if "Host key verification failed" in stderr:
        return f"{cause} Log in once by hand to see and accept the node's key"
    if "Permission denied" in stderr:
        return f"{cause} Passwords are not asked for; copy your key there with ssh-copy-id"
    return cause
