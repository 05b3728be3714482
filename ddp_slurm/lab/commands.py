"""``ddp-slurm lab``: up, down, exec, kill, revive and status."""

import os
from pathlib import Path

from ddp_slurm.console import Commands, Parser, add_command, say
from ddp_slurm.lab.errors import LabError
from ddp_slurm.lab.lab import Lab
from ddp_slurm.lab.machine import check_machine, with_system_programs
from ddp_slurm.lab.registry import remove

ABOUT = "A real Slurm of several hosts on this machine (needs root, Debian or Ubuntu)."


def add_commands(commands: Commands) -> None:
    lab = commands.add_parser("lab", help=ABOUT, description=ABOUT).add_commands()
    _add_up_options(add_command(lab, "up", up))
    _add_name(add_command(lab, "down", down))
    _add_exec_options(add_command(lab, "exec", exec_))
    for name, function in (("kill", kill), ("revive", revive)):
        command = add_command(lab, name, function)
        _add_name(command)
        _add_node(command)
    _add_name(add_command(lab, "status", status))


def _add_name(command: Parser) -> None:
    command.add_argument(
        "--name",
        default="lab",
        help="which lab; several can run side by side [default: %(default)s]",
    )


def _add_node(command: Parser) -> None:
    command.add_argument("node", metavar="NODE")


def _add_up_options(command: Parser) -> None:
    _add_name(command)
    command.add_argument(
        "--cluster",
        type=Path,
        default=Path("cluster.yaml"),
        metavar="FILE",
        help="the machines to simulate [default: %(default)s]",
    )
    command.add_argument(
        "--slurm-root",
        type=Path,
        metavar="FOLDER",
        help="root folder of another system (debootstrap) whose Slurm is used",
    )


def _add_exec_options(command: Parser) -> None:
    _add_name(command)
    _add_node(command)
    command.add_argument(
        "command",
        nargs="...",
        metavar="COMMAND",
        help="with its arguments; options of lab exec are written before NODE",
    )


def up(cluster: Path, name: str, slurm_root: Path | None) -> None:
    """Start a host for every node of a cluster.yaml, with fake GPUs, and Slurm on all of them."""
    from ddp_slurm.cluster import Cluster

    lab = Lab.up(Cluster.load(cluster), name, slurm_root)
    width = max(len(node.name) for node in lab.nodes)
    for node in lab.nodes:
        say(f"{node.name:{width}}  {node.address}  idle")
    say("All nodes are idle. Now, in any shell on this machine:")
    for key, value in lab.environ.items():
        print(f"export {key}={value}", flush=True)
    name_option = "" if name == "lab" else f" --name {name}"
    if lab.slurm_root:  # this machine's own sbatch may not understand another release
        say(f"ddp-slurm lab exec{name_option} {lab.nodes[0].name} sbatch test.sh")
    else:
        say("sbatch test.sh")
    say(f"ddp-slurm lab down{name_option}")


def down(name: str) -> None:
    """End every process of a lab and remove all that it made."""
    check_machine()
    remove(name)


def exec_(node: str, command: list[str], name: str) -> None:
    """Run a command inside a node: its network, host name and hosts file."""
    words = command[1:] if command[:1] == ["--"] else command
    if not words:
        raise LabError(f"no command; write it after {node}")
    if command[0] != "--" and command[0].startswith("-"):
        raise LabError(
            f"expected a command after {node}, got the option {command[0]!r}; "
            f"options of lab exec are written before {node}"
        )
    lab = Lab.find(name)
    argv = lab.inside(lab.node(node), words)
    os.execvpe(argv[0], argv, with_system_programs({**os.environ, **lab.environ}))


def kill(node: str, name: str) -> None:
    """Let a node die: its processes are killed and its link goes down."""
    Lab.find(name).kill(node)


def revive(node: str, name: str) -> None:
    """Plug in a killed node again and start its slurmd."""
    Lab.find(name).revive(node)


def status(name: str) -> None:
    """Print each node and its state in Slurm."""
    for node, state in Lab.find(name).status().items():
        print(f"{node}\t{state}")
