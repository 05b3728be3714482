"""``ddp-slurm``: all commands in one."""

from ddp_slurm import __version__, console, submit
from ddp_slurm.admin import commands as admin
from ddp_slurm.cluster.discover import discover_command
from ddp_slurm.lab import commands as lab
from ddp_slurm.runs import commands as jobs


def make_parser() -> console.Parser:
    parser = console.Parser(
        prog="ddp-slurm",
        description="Train one PyTorch model on all the GPUs you own, however uneven.",
    )
    parser.add_argument("--version", action="version", version=f"ddp-slurm {__version__}")
    commands = parser.add_commands()
    submit.add_submit_options(console.add_command(commands, "submit", submit.submit))
    submit.add_job_options(console.add_command(commands, "plan", submit.show_plan))
    jobs.add_commands(commands)
    console.add_command(commands, "discover", discover_command)
    admin.add_commands(commands)
    lab.add_commands(commands)
    return parser


def main() -> None:
    console.run(make_parser())


if __name__ == "__main__":
    main()
