"""Everything written for Slurm comes from a Jinja2 template in ``slurm/``, the package ``ddp_slurm.templates``."""

import re
import shlex
from functools import cache
from importlib.resources import files

import jinja2

from .errors import DdpSlurmError
from .fields import CONTROL_CHARACTERS, memory_text


def shell_quote(value: object) -> str:
    """One word for a POSIX shell. Raises DdpSlurmError for a newline or another control character."""
    text = str(value)
    if CONTROL_CHARACTERS.search(text):
        raise DdpSlurmError(f"{text!r} has a newline or another control character in it; it must be one line")
    return shlex.quote(text)


def directive(value: str) -> str:
    """A value of an #SBATCH line. sbatch splits it at blanks, ends it at #, and knows quotes and backslashes.

    Source: get_argument() of Slurm's sbatch; the same on all releases from 20.11 to 26.05.
    """
    if CONTROL_CHARACTERS.search(value):
        raise DdpSlurmError(f"{value!r} has a newline or another control character in it; it must be one line")
    if re.fullmatch(r"[A-Za-z0-9_./:,=@%+\[\]&|!*()-]+", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


@cache
def _environment() -> jinja2.Environment:
    folder = files("ddp_slurm.templates")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8")),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"shell": shell_quote, "directive": directive, "memory": memory_text}
    return environment


def render_template(name: str, **values: object) -> str:
    """The text of the template ``slurm/NAME``; a name that the template asks for and is not given is an error."""
    return _environment().get_template(name).render(**values)
