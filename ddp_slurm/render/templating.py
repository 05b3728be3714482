"""Everything written for Slurm comes from a Jinja2 template in ``slurm/``, the package ``ddp_slurm.templates``."""

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from ddp_slurm.render.quoting import directive, shell_quote
from ddp_slurm.schema.fields import memory_text

if TYPE_CHECKING:
    import jinja2


@cache
def _environment() -> "jinja2.Environment":
    import jinja2  # here: only a command that renders should wait for it

    folder = files("ddp_slurm.templates")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(
            lambda name: folder.joinpath(name).read_text(encoding="utf-8")
        ),
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
