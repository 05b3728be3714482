"""Quoting of what a user wrote: for a shell, and for an #SBATCH line."""

import re
import shlex
from collections.abc import Iterable

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.schema.fields import CONTROL_CHARACTERS


def shell_quote(value: object) -> str:
    """One word for a POSIX shell. Raises DdpSlurmError for control characters."""
    text = str(value)
    _check_one_line(text)
    return shlex.quote(text)


def shell_words(values: Iterable[object]) -> str:
    """Several words for a POSIX shell. Raises DdpSlurmError for control characters."""
    return " ".join(shell_quote(value) for value in values)


def shell_value(value: object) -> str:
    """A value in an assignment. zsh expands A==eth0 to the path of a program eth0.

    Raises DdpSlurmError for control characters.
    """
    quoted = shell_quote(value)
    return f"'{quoted}'" if quoted.startswith("=") else quoted


def directive(value: str) -> str:
    """A value of an #SBATCH line. Raises DdpSlurmError for control characters.

    sbatch splits the line at blanks, ends it at #, and interprets quotes and backslashes.
    Source: get_argument() of Slurm's sbatch; the same on all releases from 20.11 to 26.05.
    """
    _check_one_line(value)
    if re.fullmatch(r"[A-Za-z0-9_./:,=@%+\[\]&|!*()-]+", value):
        return value
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'"{escaped}"'


def _check_one_line(text: str) -> None:
    if CONTROL_CHARACTERS.search(text):
        raise DdpSlurmError(
            f"{text!r} has a newline or another control character in it; it must be one line"
        )
