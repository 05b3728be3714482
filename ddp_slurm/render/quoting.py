"""Quoting of what a user wrote: for a shell, and for an #SBATCH line."""

import re
import shlex

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.schema.fields import CONTROL_CHARACTERS


def shell_quote(value: object) -> str:
    """One word for a POSIX shell. Raises DdpSlurmError for a newline or another control character."""
    text = str(value)
    if CONTROL_CHARACTERS.search(text):
        raise DdpSlurmError(
            f"{text!r} has a newline or another control character in it; it must be one line"
        )
    return shlex.quote(text)


def directive(value: str) -> str:
    """A value of an #SBATCH line. sbatch splits it at blanks, ends it at #, and knows quotes and backslashes.

    Source: get_argument() of Slurm's sbatch; the same on all releases from 20.11 to 26.05.
    """
    if CONTROL_CHARACTERS.search(value):
        raise DdpSlurmError(
            f"{value!r} has a newline or another control character in it; it must be one line"
        )
    if re.fullmatch(r"[A-Za-z0-9_./:,=@%+\[\]&|!*()-]+", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
