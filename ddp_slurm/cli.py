"""``ddp-slurm``: all commands in one. A command's module is imported when the command is typed."""

import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import takewhile

from ddp_slurm import __version__, console

COMMANDS = {
    "ddp_slurm.submit": ("submit",),
    "ddp_slurm.plan.commands": ("plan",),
    "ddp_slurm.measure": ("measure",),
    "ddp_slurm.runs.commands": ("status", "logs", "cancel"),
    "ddp_slurm.cluster.discover": ("discover",),
    "ddp_slurm.admin.commands": ("doctor", "cluster"),
    "ddp_slurm.lab.commands": ("lab",),
    "ddp_slurm.verify": ("verify",),
    "ddp_slurm.data.commands": ("data",),
}
"""The commands of each module; its ``add_commands`` adds them to a parser."""


def make_parser(words: Sequence[str]) -> console.Parser:
    """The parser of a command line: knows the options of the command that is typed.

    Where the help is asked for, as in ``ddp-slurm --help``, it knows those of all.
    """
    parser = console.Parser(
        prog="ddp-slurm",
        description="Train one PyTorch model on all the GPUs you own, however uneven.",
    )
    parser.add_argument("--version", action="version", version=f"ddp-slurm {__version__}")
    commands = parser.add_commands()
    own_options = list(takewhile(lambda word: word.startswith("-"), words))
    typed = words[len(own_options)] if len(own_options) < len(words) else None
    lists_all = not words or "-h" in own_options or "--help" in own_options
    for module, names in COMMANDS.items():
        if lists_all or typed in names:
            import_module(module).add_commands(commands)
        else:
            for name in names:  # for the message on a name that does not exist
                commands.add_parser(name)
    return parser


def main() -> None:
    console.run(make_parser(sys.argv[1:]))


if __name__ == "__main__":
    main()
