"""The one family of exceptions that a user's input or machine can cause, and words that messages share."""


class DdpSlurmError(Exception):
    """A fault the user can mend. Its text says what is wrong, where, the value, and what would be right.

    The command line prints the text and exits with ``exit_status``; it never shows a traceback for it.
    """

    exit_status = 2


def counted(number: int, noun: str) -> str:
    """``1 node``, ``3 nodes``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def did_you_mean(word: str, known: list[str]) -> str:
    """``"; did you mean 'gpus'?"`` for a mistyped word, or the known words where none is near."""
    import difflib

    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean '{near[0]}'?" if near else f"; known are {', '.join(sorted(known))}"
