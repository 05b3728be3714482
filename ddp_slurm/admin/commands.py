"""``ddp-slurm cluster ...``: from bare machines to a running Slurm."""

from pathlib import Path
from typing import Annotated

import typer

from ..console import make_app

app = make_app("Machines to a running Slurm: probe, configs, install.")


@app.command()
def configs(
    cluster: Annotated[Path, typer.Option(help="The cluster.yaml.")] = Path("cluster.yaml"),
    slurm_version: Annotated[
        str, typer.Option(help="Slurm's release on all nodes, as 'slurmd -V' shows it.")
    ] = "22.05",
    output: Annotated[
        Path | None, typer.Option(help="Write the files into this folder instead of printing them.")
    ] = None,
    slurmdbd: Annotated[
        bool, typer.Option("--slurmdbd", help="With accounting in a database: slurmdbd.conf too.")
    ] = False,
    health_check: Annotated[
        str | None, typer.Option(help="Path of a program that slurmd runs every five minutes.")
    ] = None,
) -> None:
    """Slurm's configuration files of a cluster.yaml, with the reason for each line."""
    from ..cluster import Cluster
    from .configs import render_configs, write_configs

    files = render_configs(
        Cluster.load(cluster), slurm_version=slurm_version, slurmdbd=slurmdbd, health_check=health_check
    )
    if output is None:
        typer.echo("\n".join(f"### {name} ###\n{text}" for name, text in files.items()), nl=False)
        return
    for path in write_configs(files, output):
        typer.echo(str(path))


@app.command()
def probe(
    hosts: Annotated[
        list[str] | None,
        typer.Argument(help="HOST, gpu[01-04], USER@HOST or NAME=ADDRESS; without any, the nodes of --cluster."),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="A cluster.yaml to bring up to date; without it and hosts, this machine."),
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="Where to write; - for stdout.  [default: the --cluster file, else cluster.yaml]")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Write over the file without asking.")] = False,
) -> None:
    """Look at machines over ssh, before Slurm is there, and write their cluster.yaml.

    A file that is there already is read first: the nodes in it that are not asked stay, and so does what no probe can
    know. The difference is shown before anything is written over.
    """
    from .probe import probe as look

    look(hosts or [], cluster, output, yes=yes)


@app.command()
def install(
    cluster: Annotated[Path, typer.Option(help="The cluster.yaml.")] = Path("cluster.yaml"),
    node: Annotated[list[str] | None, typer.Option(help="Only on this node; may be given again.")] = None,
    step: Annotated[list[str] | None, typer.Option(help="Only this step; may be given again.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, change nothing.")] = False,
    export_ansible: Annotated[
        bool, typer.Option("--export-ansible", help="Print an Ansible inventory of the cluster instead.")
    ] = False,
) -> None:
    """Install Slurm on the nodes over ssh, up to the first heterogeneous job; safe to run again.

    Steps: hosts, users, clock, packages, munge, slurmctld, slurmd, nodes, first_job.
    """
    from ..cluster import Cluster
    from ..console import say
    from .ansible import ansible_inventory
    from .install import Outcome
    from .install import install as run_steps

    checked = Cluster.load(cluster)
    if export_ansible:
        typer.echo(ansible_inventory(checked), nl=False)
        return

    def report(outcome: Outcome) -> None:
        typer.echo(f"{outcome.step:<10} {outcome.node:<16} {outcome.result}")
        for reason in outcome.reasons:
            typer.echo(f"{'':<10} {reason}")

    outcomes = run_steps(checked, nodes=node or [], steps=step or [], dry_run=dry_run, report=report)
    changes = sum(outcome.result in ("changed", "would-change") for outcome in outcomes)
    say("nothing to change" if not changes else f"{changes} {'would change' if dry_run else 'changed'}")


def doctor(
    cluster: Annotated[
        Path | None, typer.Option(help="The cluster.yaml.  [default: ./cluster.yaml, else the live Slurm's nodes]")
    ] = None,
    python: Annotated[str, typer.Option(help="The interpreter that trains, the same path on all nodes.")] = "python3",
    via: Annotated[str, typer.Option(help="How to reach the nodes: ssh, or srun in a running Slurm.")] = "ssh",
    as_json: Annotated[bool, typer.Option("--json", help="For other programs.")] = False,
) -> None:
    """Find what is wrong with the machines and their Slurm: a line a check, with cause and cure.

    Exit status: 0 all well, 1 warnings, 2 errors.
    """
    import json

    from . import doctor as checks
    from .doctor.ask import cluster_to_ask, runner_of

    snapshot = checks.look(cluster_to_ask(cluster), python=python, runner=runner_of(via))
    findings = checks.diagnose(snapshot)
    if as_json:
        typer.echo(json.dumps(checks.as_json(findings), indent=2))
    else:
        typer.echo(checks.table(findings), nl=False)
    raise typer.Exit(checks.exit_status(findings))
