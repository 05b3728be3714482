"""The edge between the commands and the person: argparse, and the one place that turns a fault into a message."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias, TypeVar

from .errors import DdpSlurmError, did_you_mean
from .schema import Reader

T = TypeVar("T")


def say(text: str) -> None:
    """A line for the person, on stderr: stdout belongs to what other programs read, such as the job id."""
    print(text, file=sys.stderr, flush=True)


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Parser(argparse.ArgumentParser):
    """Options are written in full: an abbreviation would change its meaning with the next option that is added."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        say(f"error: {message}")
        say(f"{self.prog} --help shows what is accepted")
        sys.exit(2)

    def refuse(self, words: list[str]) -> NoReturn:
        """End with a message on words that no option has taken."""
        for word in words:
            if word.startswith("-"):
                name = word.partition("=")[0]
                self.error(f"no such option: {name}{did_you_mean(name, list(self._option_string_actions))}")
        self.error(f"unexpected {' '.join(map(repr, words))}")

    def add_commands(self) -> Commands:
        return self.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)


def add_command(commands: Commands, name: str, function: Callable[..., None]) -> Parser:
    """The parser of ``function``, whose docstring is the help and whose parameters are the arguments' names."""
    text = (function.__doc__ or "").replace("%", "%%")
    command = commands.add_parser(name, description=text, help=text.partition("\n")[0])
    command.set_defaults(function=function)
    return command


def typed(read: Reader[T]) -> Callable[[str], T]:
    """A reader as the ``type`` of an argument, its own words as the message."""

    def parse(text: str) -> T:
        try:
            return read(text)
        except ValueError as fault:
            raise argparse.ArgumentTypeError(str(fault)) from None

    return parse


def run(parser: Parser) -> None:
    """Run the command that was typed, and exit. A DdpSlurmError becomes its text on stderr and its exit status."""
    namespace, unknown = parser.parse_known_args()
    arguments = vars(namespace)
    chosen: Parser = arguments.pop("parser")
    function = arguments.pop("function", None)
    if unknown:
        chosen.refuse(unknown)
    if function is None:
        chosen.print_help(sys.stderr)
        sys.exit(2)
    try:
        function(**arguments)
    except DdpSlurmError as fault:
        for line in str(fault).splitlines():
            say(f"error: {line}")
        sys.exit(fault.exit_status)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit stays silent
        sys.exit(141)
