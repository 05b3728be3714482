"""The edge between the commands and the person: argparse, tables, errors as messages."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar

from ddp_slurm.errors import DdpSlurmError, did_you_mean, printable

T = TypeVar("T")


def say(text: str) -> None:
    """Print a line for the person on stderr; stdout is for other programs, such as the job id.

    Where stderr cannot be written, the command goes on and its exit status stays.
    """
    try:
        print(printable(text), file=sys.stderr, flush=True)
    except OSError:
        _discard(2)


def show(text: str) -> None:
    """Print lines for the person on stdout, at once."""
    print(printable(text), flush=True)


def table(rows: Iterable[Sequence[str]]) -> str:
    """Rows of cells as lines of left-aligned columns; every row has the same number of cells.

    A cell is one line, whatever it holds.

    >>> print(table([("RANK", "NODE"), ("0", "gamma"), ("10", "a")]))
    RANK  NODE
    0     gamma
    10    a
    """
    lines = [[printable(cell).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(map(str.ljust, cells, widths)).rstrip()  # a width for each cell
        for cells in lines
    )


def _discard(stream: int) -> None:
    """Send what is written to a broken stream to nowhere: the flush at exit would fail, too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Parser(argparse.ArgumentParser):
    """Options are written in full: an abbreviation would change its meaning with a new option.

    With ``keeps_errors`` an unknown option does not end the program: the messages are the argument
    ``errors``, to be reported with those about the options' values.
    """

    keeps_errors = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self.set_defaults(parser=self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses unknown words here: only this parser knows what the person may have meant."""
        known, unknown = super().parse_known_args(args, namespace)
        errors = [self._unknown(word) for word in unknown if word.startswith("-")]
        if self.keeps_errors:
            known.errors = errors
        elif unknown:
            self.error(errors[0] if errors else f"unexpected {' '.join(map(repr, unknown))}")
        return known, []

    def _unknown(self, word: str) -> str:
        name = word.partition("=")[0]
        return f"no such option: {name}{did_you_mean(name, list(self._option_string_actions))}"

    def error(self, message: str) -> NoReturn:
        say(f"error: {message}")
        say(f"{self.prog} --help shows what is accepted")
        sys.exit(2)

    def add_commands(self) -> Commands:
        return self.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)


def add_command(commands: Commands, name: str, function: Callable[..., None]) -> Parser:
    """The parser of ``function``: its docstring is the help, its parameters are the arguments."""
    text = (function.__doc__ or "").replace("%", "%%")
    command = commands.add_parser(name, description=text, help=text.partition("\n")[0])
    command.set_defaults(function=function)
    return command


def typed(read: Callable[[Any], T]) -> Callable[[str], T]:
    """A reader of a schema as the ``type`` of an argument; its error is the message."""

    def parse(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def run(parser: Parser) -> None:
    """Run the command that was typed, and exit.

    An error of the user or the machine becomes a message on stderr and an exit status.
    """
    _open_closed_streams()
    try:
        try:
            _run(parser)
        finally:
            sys.stdout.flush()
    except DdpSlurmError as error:
        for line in str(error).splitlines():
            say(f"error: {line}")
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _discard(1)
        sys.exit(141)
    except OSError as error:
        _discard(1)
        say(f"error: {_system_error(error)}")
        sys.exit(2)
    except UnicodeEncodeError as error:
        say(f"error: {_unwritable(error)}")
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
            lowest_free_number = os.open(os.devnull, os.O_RDWR)  # the closed stream's own
            setattr(sys, name, os.fdopen(lowest_free_number, mode))


def _system_error(error: OSError) -> str:
    if isinstance(error, FileNotFoundError) and error.filename is None:  # os.getcwd()
        return "the current folder does not exist any more; go to another one"
    parts = [str(part) for part in (error.filename, error.strerror) if part]
    return ": ".join(parts) or repr(error)


def _unwritable(error: UnicodeEncodeError) -> str:
    """Names the line: one character, such as an undecodable byte, is hard to find."""
    before = error.object[: error.start].rpartition("\n")[2]
    after = error.object[error.start :].partition("\n")[0]
    return (
        f"{before + after!a}: {error.object[error.start]!a} cannot be written as {error.encoding}"
    )
