"""The base of all errors that the user can fix, and the words that messages share."""

import re
from collections.abc import Iterable
from functools import cache

MAX_QUOTED = 500
"""Characters of a value that a message shows."""

MAX_KNOWN = 50
"""Known words that a message lists."""


class DdpSlurmError(Exception):
    """An error that the user can fix. Its text: what is wrong, where, the value, what is valid.

    The command line prints the text and exits with ``exit_status``, without a traceback.
    """

    exit_status = 2


def counted(number: int, noun: str) -> str:
    """``1 node``, ``3 nodes``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def quoted(value: object) -> str:
    """The value as messages show it; the beginning of a very long one."""
    text = repr(value)
    if len(text) <= MAX_QUOTED:
        return text
    return f"{text[:MAX_QUOTED]}... ({len(text)} characters)"


CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f"
DIRECTIONS = "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_UNPRINTABLE = re.compile(f"[{CONTROLS}{DIRECTIONS}]")


def printable(text: str) -> str:
    """The text with escapes for what would change the screen or the order of the characters.

    Texts of other users and machines may hold commands for a terminal. Newlines and tabs stay.

    >>> printable("\\x1b]0;a new title\\x07")
    '\\\\x1b]0;a new title\\\\x07'
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'gpus'?"`` for a mistyped word, or the known words if none is similar."""
    return _did_you_mean(word, tuple(known))


@cache
def _did_you_mean(word: str, known: tuple[str, ...]) -> str:
    import difflib

    near = difflib.get_close_matches(word, known, n=1)
    if near:
        return f"; did you mean '{near[0]}'?"
    more = f" and {len(known) - MAX_KNOWN} more" if len(known) > MAX_KNOWN else ""
    return f"; known are {', '.join(sorted(known)[:MAX_KNOWN])}{more}"
