"""``ddp-slurm``: all commands in one."""

from typing import Annotated

import typer

from . import __version__, console, jobs
from .admin import commands as admin
from .backends import sbatch
from .discover import discover_command
from .job import Request, plan_request
from .lab import commands as lab
from .submit import submit, takes_job_options


@takes_job_options
def plan(request: Request) -> None:
    """Show who would run where: the table of nodes, ranks and shares. Submits nothing."""
    from .show import plan_table

    print(plan_table(plan_request(request, local=not sbatch.is_available())), end="")


def _version(asked: bool) -> None:
    if asked:
        print(f"ddp-slurm {__version__}")
        raise typer.Exit


def make_app() -> typer.Typer:
    app = console.make_app("Train one PyTorch model on all the GPUs you own, however uneven.")

    @app.callback()
    def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
        pass

    for command in (submit, plan):
        app.command(context_settings={"allow_interspersed_args": False})(command)
    for command in (jobs.status, jobs.logs, jobs.cancel):
        app.command()(command)
    app.command("discover")(discover_command)
    app.command()(admin.doctor)
    app.add_typer(admin.app, name="cluster")
    app.add_typer(lab.app, name="lab")
    return app


def main() -> None:
    console.run(make_app())


if __name__ == "__main__":
    main()
