"""``ddp-slurm doctor`` and ``ddp-slurm cluster``: from bare machines to a running Slurm."""

from dataclasses import replace
from pathlib import Path

from ddp_slurm.console import Commands, Parser, add_command, say, show

CLUSTER_FILE = Path("cluster.yaml")
ABOUT = "Machines to a running Slurm: probe, advise, install, configs."


def add_commands(commands: Commands) -> None:
    add_doctor_options(add_command(commands, "doctor", doctor))
    cluster = commands.add_parser("cluster", help=ABOUT, description=ABOUT).add_commands()
    add_configs_options(add_command(cluster, "configs", configs))
    add_probe_options(add_command(cluster, "probe", probe))
    _add_cluster_option(add_command(cluster, "advise", advise))
    add_install_options(add_command(cluster, "install", install))


def _add_cluster_option(
    command: Parser, default: Path | None = CLUSTER_FILE, help: str = "[default: %(default)s]"
) -> None:
    command.add_argument("--cluster", type=Path, default=default, metavar="FILE", help=help)


def configs(
    cluster: Path, slurm_version: str, output: Path | None, slurmdbd: bool, health_check: str | None
) -> None:
    """Slurm's configuration files of a cluster.yaml, with the reason for each line."""
    from ddp_slurm.admin.configs import render_configs, write_configs
    from ddp_slurm.cluster import Cluster

    files = render_configs(
        Cluster.load(cluster),
        slurm_version=slurm_version,
        slurmdbd=slurmdbd,
        health_check=health_check,
    )
    if output is None:
        texts = [f"### {name} ###\n{text}" for name, text in files.items()]
        print("\n".join(texts), end="")
        return
    for path in write_configs(files, output):
        print(path)


def add_configs_options(command: Parser) -> None:
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
        "--slurmdbd",
        action="store_true",
        help="with accounting in a database: slurmdbd.conf too",
    )
    command.add_argument(
        "--health-check", metavar="PATH", help="a program that slurmd runs every five minutes"
    )


def probe(hosts: list[str], cluster: Path | None, output: str | None, yes: bool) -> None:
    """Look at machines over ssh, before Slurm exists, and write their cluster.yaml.

    An existing file is read first: nodes in it that are not asked stay, and so does what no probe
    can know. The difference is shown before anything is overwritten.
    """
    from ddp_slurm.admin.probe import probe as probe_hosts

    probe_hosts(hosts, cluster, output, yes=yes)


def add_probe_options(command: Parser) -> None:
    command.add_argument(
        "hosts",
        nargs="*",
        metavar="HOST",
        help="HOST, gpu[01-04], USER@HOST or NAME=ADDRESS; without any, the nodes of --cluster",
    )
    about = "a cluster.yaml to update; without it and without hosts, this machine"
    _add_cluster_option(command, None, about)
    command.add_argument(
        "--output",
        metavar="FILE",
        help="where to write; - for stdout; default the --cluster file, else cluster.yaml",
    )
    command.add_argument("--yes", action="store_true", help="overwrite the file without asking")


def advise(cluster: Path) -> None:
    """Driver branch, the line for pip, Python and Slurm that go together on all nodes.

    Exit status: 0, or 2 where some of these machines cannot go together.
    """
    from ddp_slurm.admin.advise import advise as lines_of
    from ddp_slurm.admin.probe import load_known
    from ddp_slurm.console import table

    lines = lines_of(load_known(cluster))
    rows = []
    for line in lines:
        mark = "problem" if line.is_problem else "ok"
        rows.append((mark, line.subject, line.choice, line.reason))
    print(table(rows))
    raise SystemExit(2 if any(line.is_problem for line in lines) else 0)


def install(
    cluster: Path,
    node: list[str] | None,
    step: list[str] | None,
    dry_run: bool,
    python: str | None,
) -> None:
    """Install Slurm on the nodes over ssh, up to the first heterogeneous job; safe to repeat.

    Steps: hosts, users, clock, packages, munge, slurmctld, slurmd, nodes, first_job.
    """
    from ddp_slurm.admin.install import Outcome
    from ddp_slurm.admin.install import install as run_steps
    from ddp_slurm.cluster import Cluster

    def report(outcome: Outcome) -> None:
        show(f"{outcome.step:<10} {outcome.node:<16} {outcome.result}")
        for reason in outcome.reasons:
            show(f"{'':<10} {reason}")

    outcomes = run_steps(
        Cluster.load(cluster),
        nodes=node or [],
        steps=step or [],
        dry_run=dry_run,
        python=python,
        report=report,
    )
    changes = [o for o in outcomes if o.result in ("changed", "would-change")]
    verb = "would change" if dry_run else "changed"
    say(f"{len(changes)} {verb}" if changes else "nothing to change")


def add_install_options(command: Parser) -> None:
    _add_cluster_option(command)
    command.add_argument(
        "--node", action="append", metavar="NAME", help="only on this node; may be repeated"
    )
    command.add_argument(
        "--step", action="append", metavar="STEP", help="only this step; may be repeated"
    )
    command.add_argument(
        "--dry-run", action="store_true", help="show what would change, change nothing"
    )
    command.add_argument(
        "--python",
        metavar="PATH",
        help="the interpreter that trains: the first job then computes on every GPU and measures "
        "an all-reduce over all ranks",
    )


def doctor(cluster: Path | None, python: str, via: str, as_json: bool) -> None:
    """Find what is wrong with the machines and their Slurm: a line a check, with cause and fix.

    Exit status: 0 all well, 1 warnings, 2 errors.
    """
    import json

    from ddp_slurm.admin.doctor import checks
    from ddp_slurm.admin.doctor.ask import cluster_to_ask, prove, run_by_srun
    from ddp_slurm.admin.doctor.snapshot import look

    to_ask = cluster_to_ask(cluster)
    if via == "srun":
        snapshot = look(to_ask, python=python, runner=run_by_srun)
        snapshot = replace(snapshot, proof=prove(to_ask, python))
    else:
        snapshot = look(to_ask, python=python)
    findings = checks.diagnose(snapshot)
    if as_json:
        print(json.dumps(checks.as_json(findings), indent=2))
    else:
        print(checks.table(findings), end="")
    raise SystemExit(checks.exit_status(findings))


def add_doctor_options(command: Parser) -> None:
    _add_cluster_option(command, None, "default ./cluster.yaml, else the live Slurm's nodes")
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
