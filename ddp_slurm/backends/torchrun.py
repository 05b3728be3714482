"""Machines without Slurm: one torchrun a node, started over ssh, or here on this machine.

Each node's command runs under a small shell program, hold_ranks.sh, which stops it when this
process is killed or the network breaks. So nothing is left running on a node, and ssh needs no
terminal.
"""

import os
import shlex
import sys
from functools import cache
from importlib.resources import files

from ddp_slurm.backends.processes import HEARTBEAT_SECONDS, STOP_GRACE_SECONDS, Process, run_all
from ddp_slurm.cluster import Cluster, Node
from ddp_slurm.console import say
from ddp_slurm.data.token import find_token
from ddp_slurm.job_env import JobEnv, new_token
from ddp_slurm.plan import Plan, make_plan
from ddp_slurm.render.torchrun import NodeCommand, network_commands, render_torchrun
from ddp_slurm.ssh.command import destination, is_local, ssh_argv
from ddp_slurm.ssh.run import on_all
from ddp_slurm.ssh.run import run as run_on_node

SILENCE_SECONDS = 12 * HEARTBEAT_SECONDS
"""How long this process may be stopped, or the network down, before the nodes give up."""
PROBE_SECONDS = 15.0


def describe(plan: Plan) -> str:
    """The line to paste on each machine, for ``--dry-run``."""
    lines = [f"# once, for the containers' network, {line}\n" for line in network_commands(plan)]
    commands = _commands(plan, attempt=0)
    for node, command in zip(plan.machines, commands, strict=True):
        lines.append(f"# on {node.name} ({destination(node)}):\n{command.line}\n")
    return "".join(lines)


def run(plan: Plan) -> int:
    """Run torchrun on all nodes to the end. Returns 0, or the exit status of the first that failed.

    Where restarts are allowed, the nodes that still respond start again together: as a new plan,
    with other ranks and shares, where a node is lost. Ctrl-C stops all nodes.
    """
    max_restarts = plan.options.max_restarts
    attempt = 0
    while True:
        ending = run_all(_processes(plan, attempt), "node")
        if ending.status == 0 or ending.interrupted or attempt == max_restarts:
            return ending.status
        remaining_plan = _plan_of_remaining_nodes(plan)
        if remaining_plan is None:
            return ending.status
        plan = remaining_plan
        attempt += 1
        say(f"restart {attempt} of {max_restarts}: {plan.size}")


def holder_argv() -> list[str]:
    """The shell that runs hold_ranks.sh, which it reads from its standard input.

    Not as an argument: ssh's command must be one line.
    """
    program_bytes = len(_holder_program().encode())
    read_and_run = f'eval "$(head -c {program_bytes})"'
    return ["sh", "-c", read_and_run, "sh", str(SILENCE_SECONDS), str(STOP_GRACE_SECONDS)]


def holder_input(command: NodeCommand) -> str:
    """What hold_ranks.sh reads first, without the newline at the end."""
    return f"{_holder_program()}{command.line}\n{command.clean_up}"


@cache
def _holder_program() -> str:
    return files("ddp_slurm.backends").joinpath("hold_ranks.sh").read_text(encoding="utf-8")


def _commands(plan: Plan, attempt: int, secrets: JobEnv | None = None) -> tuple[NodeCommand, ...]:
    return render_torchrun(plan, os.getcwd(), sys.executable, attempt, secrets)


def _processes(plan: Plan, attempt: int) -> list[Process]:
    # The nodes need no file for the token of the data set's server.
    data_token = find_token() if plan.options.dataset else None
    secrets = JobEnv(token=new_token(), data_token=data_token)
    width = max(len(node.name) for node in plan.machines) + len("[] ")
    return [
        Process(
            argv=_argv(node),
            environ=os.environ,
            label=f"[{node.name}]".ljust(width),
            name=f"torchrun on {node.name}",
            lifeline=holder_input(command),
        )
        for node, command in zip(plan.machines, _commands(plan, attempt, secrets), strict=True)
    ]


def _argv(node: Node) -> list[str]:
    if is_local(node):
        return holder_argv()
    program, *arguments = ssh_argv(node, shlex.join(holder_argv()))
    # A dead node is found within seconds. ssh uses the first value that it is given.
    alive = ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
    return [program, *alive, *arguments]


def _plan_of_remaining_nodes(plan: Plan) -> Plan | None:
    """The plan for the nodes that still respond, or None where they have no GPU."""
    answers = on_all(plan.machines, _probe)
    remaining = []
    for node in plan.machines:
        error = answers[node.name]
        if error is None:
            remaining.append(node)
        else:
            say(f"node {node.name} is lost: {error}")
    if len(remaining) == len(plan.machines):
        return plan
    gpus = sum(node.gpu_count for node in remaining)
    if not gpus:
        return None
    wanted = plan.options.gpus
    options = plan.options.replaced(nodes=None, gpus=min(wanted, gpus) if wanted else None)
    return make_plan(Cluster(plan.cluster_name, tuple(remaining)), options)


def _probe(node: Node) -> None:
    """Raises RemoteError where the node does not respond."""
    run_on_node(node, ["true"], timeout_seconds=PROBE_SECONDS)
