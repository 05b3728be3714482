"""``ddp-slurm cluster ...``: from bare machines to a running Slurm."""

import json
from pathlib import Path

from ddp_slurm.cluster import Cluster
from ddp_slurm.console import Commands, Parser, add_command, say


def add_commands(commands: Commands) -> None:
    """``doctor``, and ``cluster`` with its own commands."""
    command = add_command(commands, "doctor", doctor)
    command.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="default ./cluster.yaml, else the live Slurm's nodes",
    )
    command.add_argument(
        "--python",
        default="python3",
        metavar="PATH",
        help="the interpreter that trains, the same path on all nodes [default: %(default)s]",
    )
    command.add_argument(
        "--via",
        choices=("ssh", "srun"),
        default="ssh",
        help="how to reach the nodes: ssh [default], or srun in a running Slurm",
    )
    command.add_argument("--json", action="store_true", dest="as_json", help="for other programs")

    about = "Machines to a running Slurm: probe, configs, install."
    own = commands.add_parser("cluster", help=about, description=about).add_commands()
    _add_configs_options(add_command(own, "configs", configs))
    _add_probe_options(add_command(own, "probe", probe))
    _add_install_options(add_command(own, "install", install))


def _add_cluster_option(command: Parser) -> None:
    command.add_argument(
        "--cluster",
        type=Path,
        default=Path("cluster.yaml"),
        metavar="FILE",
        help="[default: %(default)s]",
    )


def _add_configs_options(command: Parser) -> None:
    _add_cluster_option(command)
    command.add_argument(
        "--slurm-version",
        default="22.05",
        metavar="RELEASE",
        help="Slurm's release on all nodes, as 'slurmd -V' shows it [default: %(default)s]",
    )
    command.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="write the files into this folder instead of printing them",
    )
    command.add_argument(
        "--slurmdbd", action="store_true", help="with accounting in a database: slurmdbd.conf too"
    )
    command.add_argument(
        "--health-check", metavar="PATH", help="a program that slurmd runs every five minutes"
    )


def _add_probe_options(command: Parser) -> None:
    command.add_argument(
        "hosts",
        nargs="*",
        metavar="HOST",
        help="HOST, gpu[01-04], USER@HOST or NAME=ADDRESS; without any, the nodes of --cluster",
    )
    command.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="a cluster.yaml to bring up to date; without it and hosts, this machine",
    )
    command.add_argument(
        "--output",
        metavar="FILE",
        help="where to write; - for stdout; default the --cluster file, else cluster.yaml",
    )
    command.add_argument("--yes", action="store_true", help="write over the file without asking")


def _add_install_options(command: Parser) -> None:
    _add_cluster_option(command)
    command.add_argument(
        "--node", action="append", metavar="NAME", help="only on this node; may be given again"
    )
    command.add_argument(
        "--step", action="append", metavar="STEP", help="only this step; may be given again"
    )
    command.add_argument(
        "--dry-run", action="store_true", help="show what would change, change nothing"
    )
    command.add_argument(
        "--export-ansible",
        action="store_true",
        help="print an Ansible inventory of the cluster instead",
    )


def configs(
    cluster: Path, slurm_version: str, output: Path | None, slurmdbd: bool, health_check: str | None
) -> None:
    """Slurm's configuration files of a cluster.yaml, with the reason for each line."""
    from ddp_slurm.admin.configs import render_configs, write_configs

    files = render_configs(
        Cluster.load(cluster),
        slurm_version=slurm_version,
        slurmdbd=slurmdbd,
        health_check=health_check,
    )
    if output is None:
        print("\n".join(f"### {name} ###\n{text}" for name, text in files.items()), end="")
        return
    for path in write_configs(files, output):
        print(path)


def probe(hosts: list[str], cluster: Path | None, output: str | None, yes: bool) -> None:
    """Look at machines over ssh, before Slurm is there, and write their cluster.yaml.

    A file that is there already is read first: the nodes in it that are not asked stay, and so does what no probe can
    know. The difference is shown before anything is written over.
    """
    from ddp_slurm.admin.probe import probe as look

    look(hosts, cluster, output, yes=yes)


def install(
    cluster: Path,
    node: list[str] | None,
    step: list[str] | None,
    dry_run: bool,
    export_ansible: bool,
) -> None:
    """Install Slurm on the nodes over ssh, up to the first heterogeneous job; safe to run again.

    Steps: hosts, users, clock, packages, munge, slurmctld, slurmd, nodes, first_job.
    """
    from ddp_slurm.admin.ansible import ansible_inventory
    from ddp_slurm.admin.install import Outcome
    from ddp_slurm.admin.install import install as run_steps

    checked = Cluster.load(cluster)
    if export_ansible:
        print(ansible_inventory(checked), end="")
        return

    def report(outcome: Outcome) -> None:
        print(f"{outcome.step:<10} {outcome.node:<16} {outcome.result}", flush=True)
        for reason in outcome.reasons:
            print(f"{'':<10} {reason}", flush=True)

    outcomes = run_steps(
        checked, nodes=node or [], steps=step or [], dry_run=dry_run, report=report
    )
    changes = sum(outcome.result in ("changed", "would-change") for outcome in outcomes)
    say(
        "nothing to change"
        if not changes
        else f"{changes} {'would change' if dry_run else 'changed'}"
    )


def doctor(cluster: Path | None, python: str, via: str, as_json: bool) -> None:
    """Find what is wrong with the machines and their Slurm: a line a check, with cause and cure.

    Exit status: 0 all well, 1 warnings, 2 errors.
    """
    from ddp_slurm.admin import doctor as checks
    from ddp_slurm.admin.doctor.ask import cluster_to_ask, runner_of

    snapshot = checks.look(cluster_to_ask(cluster), python=python, runner=runner_of(via))
    findings = checks.diagnose(snapshot)
    if as_json:
        print(json.dumps(checks.as_json(findings), indent=2))
    else:
        print(checks.table(findings), end="")
    raise SystemExit(checks.exit_status(findings))
