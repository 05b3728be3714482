"""Machines without Slurm: one torchrun a node, started over ssh, or here where the node is this machine.

Each node's command runs in a process group of its own under a small shell that holds its end of a lifeline, the
standard input: when that ends, or no sign of life came for a while, the shell stops the group. So nothing stays on a
node when this process is killed or the network breaks; a terminal (ssh -tt) would need one here as well.
"""

import os
import shlex
import sys

from ddp_slurm.backends.processes import HEARTBEAT_SECONDS, STOP_GRACE_SECONDS, Process, run_all
from ddp_slurm.cluster import Cluster, Node
from ddp_slurm.console import say
from ddp_slurm.plan import Plan, make_plan
from ddp_slurm.render.torchrun import NodeCommand, network_commands, render_torchrun
from ddp_slurm.ssh import remote

SILENCE_SECONDS = 12 * HEARTBEAT_SECONDS
"""So long may this process be stopped, or the network away, before the nodes give up."""
PROBE_SECONDS = 15.0

# The command comes as the first line of the lifeline and not as an argument: arguments can be read by all users of the
# node. The second line cleans up, and is run however the command ended.
# All on one line: ssh's command must be one.
_HOLDER = (
    "exec 3<&0; IFS= read -r line <&3 && IFS= read -r clean_up <&3 || exit 125; "
    "export line; "
    """setsid bash -c 'command=$line; unset line; eval "$command"' </dev/null 3<&- & """
    "child=$!; unset line; "
    '( while [ "$(timeout "$1" head -c 1 <&3)" = . ]; do :; done; '
    'kill -s TERM -- "-$child"; sleep "$2"; kill -s KILL -- "-$child"; eval "$clean_up" ) >/dev/null 2>&1 & '
    'watcher=$!; exec 3<&-; wait "$child"; status=$?; kill "$watcher"; '
    'kill -s KILL -- "-$child" 2>/dev/null; eval "$clean_up" >/dev/null 2>&1; exit "$status"'
)


def holder_argv() -> list[str]:
    """The shell that holds a node's end of the lifeline."""
    return ["sh", "-c", _HOLDER, "sh", str(SILENCE_SECONDS), str(STOP_GRACE_SECONDS)]


def describe(plan: Plan) -> str:
    """The line to paste on each machine, for ``--dry-run``."""
    lines = [f"# once, for the containers' network, {line}\n" for line in network_commands(plan)]
    for node, command in zip(plan.machines, _commands(plan), strict=True):
        lines.append(f"# on {node.name} ({remote.destination(node)}):\n{command.line}\n")
    return "".join(lines)


def run(plan: Plan) -> int:
    """Run torchrun on all nodes to the end. Returns 0, or the exit status of the first that failed.

    Where restarts are allowed, the nodes that still answer start again together, as a new plan: with other ranks and
    shares where a node is lost. Ctrl-C stops all nodes.
    """
    attempt = 0
    while True:
        ending = run_all(_processes(plan, attempt), "node")
        if not ending.status or ending.interrupted or attempt == plan.options.max_restarts:
            return ending.status
        attempt += 1
        again = _after_failure(plan)
        if again is None:
            return ending.status
        plan = again
        say(f"restart {attempt} of {plan.options.max_restarts}: {plan.size}")


def _commands(plan: Plan, attempt: int = 0) -> tuple[NodeCommand, ...]:
    return render_torchrun(plan, os.getcwd(), sys.executable, attempt)


def _processes(plan: Plan, attempt: int) -> list[Process]:
    width = max(len(node.name) for node in plan.machines)
    return [
        Process(
            argv=_argv(node),
            environ=os.environ,
            label=f"{f'[{node.name}]':{width + 2}} ",
            name=f"torchrun on {node.name}",
            lifeline=f"{command.line}\n{command.clean_up}",
        )
        for node, command in zip(plan.machines, _commands(plan, attempt), strict=True)
    ]


def _argv(node: Node) -> list[str]:
    if remote.is_local(node):
        return holder_argv()
    program, *arguments = remote.ssh_argv(node, shlex.join(holder_argv()))
    # ssh keeps the first value that it is given; a node that dies is to be missed within seconds
    return [program, "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", *arguments]


def _after_failure(plan: Plan) -> Plan | None:
    """The plan for the nodes that still answer, or None where there are none."""

    def ask(node: Node) -> None:
        remote.run(node, ["true"], timeout_seconds=PROBE_SECONDS)

    answers = remote.on_all(plan.machines, ask)
    there = tuple(node for node in plan.machines if answers[node.name] is None)
    for name, answer in answers.items():
        if answer is not None:
            say(f"node {name} is lost: {answer}")
    if len(there) == len(plan.machines):
        return plan
    gpus = sum(node.gpu_count for node in there)
    if not gpus:
        return None
    wanted = plan.options.gpus
    options = plan.options.replaced(nodes=None, gpus=min(wanted, gpus) if wanted else None)
    return make_plan(Cluster(plan.cluster_name, there), options)
