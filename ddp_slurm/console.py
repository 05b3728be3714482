"""The edge between the commands and the person: argparse, and the one place that turns a fault into a message."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar

from ddp_slurm.errors import DdpSlurmError, did_you_mean
from ddp_slurm.schema.schema import Reader

T = TypeVar("T")


def say(text: str) -> None:
    """A line for the person, on stderr: stdout belongs to what other programs read, such as the job id.

    Where nobody reads it any more, what is done goes on, and its exit status stays.
    """
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _silence(2)


def table(rows: Iterable[Sequence[str]]) -> str:
    """Rows of cells as lines of left-aligned columns; every row has the same number of cells.

    >>> print(table([("RANK", "NODE"), ("0", "gamma"), ("10", "a")]))
    RANK  NODE
    0     gamma
    10    a
    """
    lines = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(map(str.ljust, cells, widths)).rstrip()  # a width for each cell
        for cells in lines
    )


def _silence(stream: int) -> None:
    """Send a stream that cannot be written to nowhere, so that the flush at exit does not fail, too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Parser(argparse.ArgumentParser):
    """Options are written in full: an abbreviation would change its meaning with the next option that is added."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self.set_defaults(parser=self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses here what it does not know: only this parser knows what the person may have meant."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown)
        return known, []

    def error(self, message: str) -> NoReturn:
        say(f"error: {message}")
        say(f"{self.prog} --help shows what is accepted")
        sys.exit(2)

    def refuse(self, words: list[str]) -> NoReturn:
        """End with a message on words that no option has taken."""
        for word in words:
            if word.startswith("-"):
                name = word.partition("=")[0]
                self.error(
                    f"no such option: {name}{did_you_mean(name, list(self._option_string_actions))}"
                )
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
    """Run the command that was typed, and exit. A fault of the user or the machine becomes its text on stderr and its
    exit status."""
    _open_closed_streams()
    try:
        try:
            _run(parser)
        finally:
            sys.stdout.flush()
    except DdpSlurmError as fault:
        for line in str(fault).splitlines():
            say(f"error: {line}")
        sys.exit(fault.exit_status)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _silence(1)
        sys.exit(141)
    except OSError as fault:
        _silence(1)
        say(f"error: {_os_fault(fault)}")
        sys.exit(2)
    except UnicodeEncodeError as fault:
        say(f"error: {_unwritable(fault)}")
        sys.exit(2)


def _run(parser: Parser) -> None:
    arguments = vars(parser.parse_args())
    chosen: Parser = arguments.pop("parser")
    function = arguments.pop("function", None)
    if function is None:
        chosen.print_help(sys.stderr)
        sys.exit(2)
    function(**arguments)


def _open_closed_streams() -> None:
    """``>&-`` closes a stream, and the next file that is opened would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(
                sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode)
            )  # the lowest free number, its own


def _os_fault(fault: OSError) -> str:
    if isinstance(fault, FileNotFoundError) and fault.filename is None:  # os.getcwd()
        return "the current folder is gone; go to one that is there"
    return ": ".join(str(part) for part in (fault.filename, fault.strerror) if part) or repr(fault)


def _unwritable(fault: UnicodeEncodeError) -> str:
    """Names the line: the character alone, an undecodable byte of a file's name for example, says little."""
    line = (
        fault.object[: fault.start].rpartition("\n")[2]
        + fault.object[fault.start :].partition("\n")[0]
    )
    return f"{line!a}: {fault.object[fault.start]!a} cannot be written as {fault.encoding}"
