"""``ddp-slurm lab``: up, down, exec, kill and status."""

import os
from pathlib import Path

from ddp_slurm.cluster import Cluster
from ddp_slurm.console import Commands, add_command, say
from ddp_slurm.lab.errors import LabError
from ddp_slurm.lab.lab import Lab, remove
from ddp_slurm.lab.machine import check_machine, with_system_programs


def add_commands(commands: Commands) -> None:
    about = "A real Slurm of several hosts on this machine, from a cluster.yaml (root, Debian or Ubuntu)."
    own = commands.add_parser("lab", help=about, description=about).add_commands()
    for name, function in (
        ("up", up),
        ("down", down),
        ("exec", exec_),
        ("kill", kill),
        ("revive", revive),
        ("status", status),
    ):
        command = add_command(own, name, function)
        command.add_argument(
            "--name",
            default="lab",
            help="which lab; several run side by side [default: %(default)s]",
        )
        if function is up:
            command.add_argument(
                "--cluster",
                type=Path,
                default=Path("cluster.yaml"),
                metavar="FILE",
                help="the machines to play [default: %(default)s]",
            )
            command.add_argument(
                "--slurm-root",
                type=Path,
                metavar="FOLDER",
                help="root folder of another system (debootstrap) whose Slurm is used",
            )
        elif function in (exec_, kill, revive):
            command.add_argument("node", metavar="NODE")
        if function is exec_:
            command.add_argument(
                "command",
                nargs="...",
                metavar="COMMAND",
                help="with its arguments; options stand before NODE",
            )


def up(cluster: Path, name: str, slurm_root: Path | None) -> None:
    """Start a host of its own for every node of a cluster.yaml, with fake GPUs, and Slurm on all of them."""
    lab = Lab.up(Cluster.load(cluster), name, slurm_root)
    width = max(len(node.name) for node in lab.nodes)
    for node in lab.nodes:
        say(f"{node.name:{width}}  {node.address}  idle")
    named = "" if name == "lab" else f" --name {name}"
    say("All nodes are idle. Now, in any shell on this machine:")
    for key, value in lab.environ.items():
        print(f"export {key}={value}", flush=True)
    # This machine's own sbatch may not understand another release.
    say(
        f"ddp-slurm lab exec{named} {lab.nodes[0].name} sbatch test.sh"
        if lab.slurm_root
        else "sbatch test.sh"
    )
    say(f"ddp-slurm lab down{named}")


def down(name: str) -> None:
    """End every process of a lab and remove all that it made."""
    check_machine()
    remove(name)


def exec_(node: str, command: list[str], name: str) -> None:
    """Run a command inside a node: its network, host name and hosts file."""
    words = command[1:] if command[:1] == ["--"] else command
    if not words:
        raise LabError(f"no command: what is to run on {node}?")
    if command[0] != "--" and command[0].startswith("-"):
        raise LabError(
            f"{command[0]!r} stands where the command begins; options of lab exec stand before {node}"
        )
    lab = Lab.find(name)
    argv = lab.inside(lab.node(node), words)
    os.execvpe(argv[0], argv, with_system_programs({**os.environ, **lab.environ}))


def kill(node: str, name: str) -> None:
    """Let a node die: its processes are killed and its link goes down."""
    Lab.find(name).kill(node)


def revive(node: str, name: str) -> None:
    """Plug a killed node in again and start its slurmd."""
    Lab.find(name).revive(node)


def status(name: str) -> None:
    """The nodes and Slurm's state of each."""
    for node, state in Lab.find(name).status().items():
        print(f"{node}\t{state}")
