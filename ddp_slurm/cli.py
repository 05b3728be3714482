"""``ddp-slurm``: all commands in one."""

from . import __version__, console, jobs, submit
from .admin import commands as admin
from .discover import discover_command
from .lab import commands as lab


def make_parser() -> console.Parser:
    parser = console.Parser(
        prog="ddp-slurm", description="Train one PyTorch model on all the GPUs you own, however uneven."
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
