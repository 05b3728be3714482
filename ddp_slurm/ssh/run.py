"""Run commands and scripts on nodes, on one or on all at once.

Secrets go over standard input: an argument is readable by every user of the node for as long as the
command runs.
"""

import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from ddp_slurm.ask import TIMED_OUT, Answer, ask
from ddp_slurm.cluster import Node
from ddp_slurm.ssh.command import RemoteError, destination, is_local, ssh_argv

MAX_CONNECTIONS = 16
"""Nodes that are asked at once. sshd's MaxStartups counts per node: this spares this machine."""
SSH_FAILED = 255
"""Exit status of ssh itself; any other one is the command's."""

_AS_ROOT = 'if [ "$(id -u)" = 0 ]; then exec "$@"; else exec sudo -n -- "$@"; fi'

T = TypeVar("T")


class Runner(Protocol):
    """Anything that runs a command on a node: ``run``, or srun, or a fake one in tests."""

    def __call__(
        self,
        node: Node,
        argv: Sequence[str],
        *,
        input: bytes | None = None,
        timeout_seconds: float = ...,
    ) -> Answer: ...


def run(
    node: Node, argv: Sequence[str], *, input: bytes | None = None, timeout_seconds: float = 60.0
) -> Answer:
    """Run ``argv`` on the node, each item one word there whatever it contains.

    ``input`` is its standard input (empty if None). Raises RemoteError when the node cannot be
    reached or the command does not end within ``timeout_seconds``; any exit status of the command
    itself is an Answer.
    """
    local = is_local(node)
    if not local and shutil.which("ssh") is None:
        raise RemoteError("ssh: command not found; install the system's ssh client")
    command = list(argv) if local else ssh_argv(node, shlex.join(argv))
    start = time.monotonic()
    answer = ask(command, timeout_seconds=timeout_seconds, input=input or b"")
    # A command may itself end with the exit status that stands for a time-out, but only earlier.
    if answer.status == TIMED_OUT and time.monotonic() - start >= timeout_seconds:
        raise RemoteError(f"{node.name}: {argv[0]} did not end within {timeout_seconds:g} s")
    if not local and answer.status == SSH_FAILED:
        cause = _cause(answer.err)
        raise RemoteError(f"{node.name}: cannot be reached by ssh ({destination(node)}): {cause}")
    return answer


def _cause(stderr: str) -> str:
    cause = last_lines(stderr) or "the connection was closed"
    if "Host key verification failed" in stderr:
        return f"{cause} Log in once by hand to see and accept the node's key"
    if "Permission denied" in stderr:
        return f"{cause} Password logins are not used; copy your key there with ssh-copy-id"
    return cause


def last_lines(text: str, count: int = 1) -> str:
    """The last ``count`` lines with something in them, separated by `` | ``."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-count:])


def run_script(
    node: Node,
    script: str,
    *,
    as_root: bool = False,
    wrapper: Sequence[str] = (),
    timeout_seconds: float = 60.0,
    runner: Runner = run,
) -> Answer:
    """Run a POSIX shell script on the node. It travels over standard input: it may hold secrets.

    ``as_root`` goes through ``sudo -n`` where the login user is not root already; ``wrapper`` is a
    command that runs the shell, such as ``flock FILE``. Raises as ``run`` does.
    """
    argv = [*wrapper, "sh", "-s"]
    if as_root:
        argv = ["sh", "-c", _AS_ROOT, "sh", *argv]
    # A command of the script must not read the rest of the script as its own input: the braces
    # make the shell read it whole first.
    text = "{\n" + script.rstrip("\n") + "\n} </dev/null\n"
    return runner(node, argv, input=text.encode(), timeout_seconds=timeout_seconds)


def on_all(nodes: Iterable[Node], function: Callable[[Node], T]) -> dict[str, T | RemoteError]:
    """``function(node)`` for every node at once, by the nodes' names.

    A node that cannot be reached gives its RemoteError instead.
    """

    def guarded(node: Node) -> T | RemoteError:
        try:
            return function(node)
        except RemoteError as error:
            return error

    all_nodes = list(nodes)
    names = [node.name for node in all_nodes]
    with ThreadPoolExecutor(max_workers=MAX_CONNECTIONS) as pool:
        answers = pool.map(guarded, all_nodes)
        return dict(zip(names, answers, strict=True))
