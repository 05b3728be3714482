"""The edge between the commands and the person: the one place that turns a fault into a message and an exit status."""

import os
import sys
from collections.abc import Callable

import typer

from .errors import DdpSlurmError


def say(text: str) -> None:
    """A line for the person, on stderr: stdout belongs to what other programs read, such as the job id."""
    print(text, file=sys.stderr, flush=True)


def make_app(help_text: str) -> typer.Typer:
    """An app whose faults are left to ``run``."""
    return typer.Typer(
        help=help_text,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


def run(app: Callable[[], object]) -> None:
    """Run an app and exit. A DdpSlurmError becomes its text on stderr and its exit status; Ctrl-C becomes 130."""
    try:
        app()
    except DdpSlurmError as fault:
        for line in str(fault).splitlines():
            say(f"error: {line}")
        sys.exit(fault.exit_status)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit stays silent
        sys.exit(141)
