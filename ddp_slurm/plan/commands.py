"""``ddp-slurm plan``, and the options that it shares with ``submit``."""

import shutil
from pathlib import Path
from typing import Any

from ddp_slurm.console import Commands, Parser, add_command, say
from ddp_slurm.job.options import JobOptions
from ddp_slurm.plan.request import Request, plan_request
from ddp_slurm.plan.table import plan_table
from ddp_slurm.schema.schema import Key, keys_of


def add_commands(commands: Commands) -> None:
    add_job_options(add_command(commands, "plan", show_plan))


def add_job_options(parser: Parser) -> None:
    """Every key of JobOptions as an option: one schema makes job.yaml's keys, options and help.

    Values stay texts, which the schema checks; all errors are reported together.
    """
    parser.keeps_errors = True
    parser.usage = "%(prog)s [OPTIONS] [-- COMMAND ...]"
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="the machines; default ./cluster.yaml, else the live Slurm",
    )
    parser.add_argument(
        "--job",
        type=Path,
        metavar="FILE",
        help="a YAML file with any of the options below as keys",
    )
    parser.add_argument(
        "--shrink",
        action="store_true",
        help="leave out the nodes that Slurm cannot use now, naming them on stderr; the global "
        "batch stays the same",
    )
    for name, key in keys_of(JobOptions).items():
        _add_option(parser, name, key)


def _add_option(parser: Parser, name: str, key: Key) -> None:
    default = "" if key.default in (None, (), {}, False) else f" [default: {key.default}]"
    text = f"{key.help}{default}".replace("%", "%%")
    if name == "command":  # the first word that is not an option, and all words after it
        parser.add_argument(name, nargs="...", metavar=key.metavar, help=text)
        return
    option = f"--{name.replace('_', '-')}"
    if key.default is False:
        parser.add_argument(option, action="store_const", const="true", help=text)
        return
    action = "append" if isinstance(key.default, tuple | dict) else "store"
    parser.add_argument(option, action=action, metavar=key.metavar, help=text)


def show_plan(**typed: Any) -> None:
    """Show who would run where: the table of nodes, ranks and shares. Submits nothing."""
    backend = "sbatch" if shutil.which("sbatch") else "local"
    plan = plan_request(request_of(backend, **typed))
    if plan.shared_cpus_note:
        say(f"note: {plan.shared_cpus_note}")
    print(plan_table(plan), end="")


def request_of(
    backend: str,
    *,
    cluster: Path | None,
    job: Path | None,
    command: list[str],
    errors: list[str],
    shrink: bool,
    **options: Any,
) -> Request:
    """A Request from the arguments of a parser with the job options."""
    given = {name: value for name, value in options.items() if value is not None}
    words = command[1:] if command[:1] == ["--"] else command
    if words:
        given["command"] = words
    return Request(cluster, job, given, backend, shrink, tuple(errors))
