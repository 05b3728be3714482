"""``ddp-slurm lab``: up, down, exec, kill and status."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ..cluster import Cluster
from ..console import make_app, say
from .lab import Lab, remove
from .machine import check_machine, with_system_programs

app = make_app("A real Slurm of several hosts on this machine, from a cluster.yaml (root, Debian or Ubuntu).")
Name = Annotated[str, typer.Option(help="Which lab; several run side by side under different names.")]


@app.command()
def up(
    cluster: Annotated[Path, typer.Option(help="The machines to play.")] = Path("cluster.yaml"),
    name: Name = "lab",
    slurm_root: Annotated[
        Path | None, typer.Option(help="Root folder of another system (debootstrap) whose Slurm is used.")
    ] = None,
) -> None:
    """Start a host of its own for every node of a cluster.yaml, with fake GPUs, and Slurm on all of them."""
    lab = Lab.up(Cluster.load(cluster), name, slurm_root)
    width = max(len(node.name) for node in lab.nodes)
    for node in lab.nodes:
        say(f"{node.name:{width}}  {node.address}  idle")
    named = "" if name == "lab" else f" --name {name}"
    say(f"{len(lab.nodes)} nodes are idle. Now, in any shell on this machine:")
    for key, value in lab.environ.items():
        print(f"export {key}={value}", flush=True)
    # This machine's own sbatch may not understand another release.
    say(f"ddp-slurm lab exec{named} {lab.nodes[0].name} sbatch test.sh" if lab.slurm_root else "sbatch test.sh")
    say(f"ddp-slurm lab down{named}")


@app.command()
def down(name: Name = "lab") -> None:
    """End every process of a lab and remove all that it made."""
    check_machine()
    remove(name)


@app.command(
    "exec",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def exec_(ctx: typer.Context, node: str, name: Name = "lab") -> None:
    """Run a command inside a node: its network, host name and hosts file."""
    lab = Lab.find(name)
    argv = lab.inside(lab.node(node), ctx.args)
    os.execvpe(argv[0], argv, with_system_programs({**os.environ, **lab.environ}))


@app.command()
def kill(node: str, name: Name = "lab") -> None:
    """Let a node die: its processes are killed and its link goes down."""
    Lab.find(name).kill(node)


@app.command()
def revive(node: str, name: Name = "lab") -> None:
    """Plug a killed node in again and start its slurmd."""
    Lab.find(name).revive(node)


@app.command()
def status(name: Name = "lab") -> None:
    """The nodes and Slurm's state of each."""
    for node, state in Lab.find(name).status().items():
        print(f"{node}\t{state}")
