"""Everything written for Slurm comes from a Jinja2 template in ``slurm/``.

That folder is the package ``ddp_slurm.templates``.
"""

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from ddp_slurm.render.quoting import shell_quote, shell_value

if TYPE_CHECKING:
    import jinja2


def render_template(name: str, **values: object) -> str:
    """The text of the template ``slurm/NAME``.

    Raises jinja2.UndefinedError for a name that the template uses and that is not in ``values``.
    """
    return _environment().get_template(name).render(**values)


@cache
def _environment() -> "jinja2.Environment":
    import jinja2  # here: only a command that renders waits for it

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template_text),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["shell"] = shell_quote
    environment.filters["shell_value"] = shell_value
    return environment


def _template_text(name: str) -> str:
    return files("ddp_slurm.templates").joinpath(name).read_text(encoding="utf-8")
