"""``python -m ddp_slurm.submit [OPTIONS] [-- COMMAND ...]``: plan a job and start it; also ``ddp-slurm submit``."""

import inspect
import os
import re
import sys
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from . import console
from .backends import sbatch
from .files import write_whole
from .job import DEFAULT_CLUSTER, Request, plan_request
from .options import JobOptions, OptionsError
from .plan import Plan
from .render import render_sbatch
from .runs import keep_run, make_runs_folder, runs_folder


class Backend(str, Enum):
    """Where the ranks are started."""

    auto = "auto"
    sbatch = "sbatch"
    submitit = "submitit"
    torchrun = "torchrun"
    local = "local"


def takes_job_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command every field of JobOptions as an option, and pass them on as one Request in ``request``.

    One schema makes job.yaml's keys, the options and their help; texts go through unchanged, the schema checks them.
    """
    own = [p for p in inspect.signature(function).parameters.values() if p.name != "request"]
    file_options = [
        _option("cluster", Path | None, "the machines; default ./cluster.yaml, else the live Slurm"),
        _option("job", Path | None, "a YAML file with any of the options below as keys"),
    ]
    job_options = [
        _option(name, list[str] | None if _is_repeated(name) else str | None, _help(name))
        for name in JobOptions.model_fields
        if name != "command"
    ]
    words = Annotated[list[str] | None, typer.Argument(help="what every rank runs, after --", metavar="-- COMMAND")]
    command = inspect.Parameter("command", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=words)

    def wrapper(cluster: Path | None, job: Path | None, command: list[str] | None, **values: Any) -> None:
        kept = {p.name: values.pop(p.name) for p in own}
        options = {name: value for name, value in values.items() if value not in (None, [])}
        if command:
            options["command"] = command
        function(request=Request(cluster, job, options), **kept)

    parameters = [command, *file_options, *own, *job_options]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    wrapper.__doc__, wrapper.__name__ = function.__doc__, function.__name__
    return wrapper


def _option(name: str, kind: Any, text: str) -> inspect.Parameter:
    option = typer.Option(f"--{name.replace('_', '-')}", help=text, show_default=False)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _is_repeated(name: str) -> bool:
    return name in ("env", "setup", "sbatch", "mount")


def _help(name: str) -> str:
    field = JobOptions.model_fields[name]
    default = "" if field.default in (None, (), {}) else f" [default: {field.default}]"
    return f"{field.description}{default}"


@takes_job_options
def submit(
    request: Request,
    backend: Annotated[
        Backend,
        typer.Option(
            help="auto: sbatch where it is on PATH, else the ranks run on this machine; submitit: through submitit, "
            "the exit status of each rank as its result; torchrun: on the nodes of cluster.yaml over ssh, without Slurm"
        ),
    ] = Backend.auto,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what would be submitted, and submit nothing")
    ] = False,
    script: Annotated[
        Path | None, typer.Option(help="write the job script to this file, for sbatch, and submit nothing")
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="stay: the state, then the log on stderr, until the job ends; Ctrl-C detaches from it"
        ),
    ] = False,
) -> None:
    """Train on all GPUs of the cluster: plan the job, render it and start it. Prints the job's id on stdout."""
    if script is not None:
        if backend not in (Backend.auto, Backend.sbatch):
            raise OptionsError(f"--script writes an sbatch script; it does not go with --backend {backend.value}")
        _write_script(plan_request(request), script)
        return
    chosen = _choose(backend, dry_run)
    if chosen is Backend.torchrun and request.cluster is None and not DEFAULT_CLUSTER.exists():
        raise OptionsError("--backend torchrun needs a cluster.yaml with the machines, here or by --cluster FILE")
    plan = plan_request(request, local=chosen is Backend.local)
    if not plan.options.command:
        raise OptionsError("no command: put what every rank runs after --, as in: -- python train.py")
    if chosen in (Backend.local, Backend.torchrun):
        _run_in_the_terminal(plan, chosen, _cluster_file(request), dry_run=dry_run)
    else:
        plan = with_log_path(plan, make_folder=not dry_run)
        _submit_to_slurm(plan, chosen, _cluster_file(request), dry_run=dry_run, follow=follow)


def _cluster_file(request: Request) -> Path | None:
    return request.cluster or (DEFAULT_CLUSTER if DEFAULT_CLUSTER.exists() else None)


# The backends are imported where they are used: a dry run of a large job should not wait for all of them.


def _run_in_the_terminal(plan: Plan, backend: Backend, cluster_file: Path | None, *, dry_run: bool) -> None:
    from .backends import local, torchrun
    from .foreground import run_and_keep

    place = local if backend is Backend.local else torchrun
    if "output" in plan.options.model_fields_set:
        plan = with_log_path(plan, make_folder=not dry_run)
    text = place.describe(plan)
    if dry_run:
        print(text, end="")
        return
    status = run_and_keep(plan, backend=backend.value, script=text, run=place.run, cluster_file=cluster_file)
    raise SystemExit(status)


def _submit_to_slurm(plan: Plan, backend: Backend, cluster_file: Path | None, *, dry_run: bool, follow: bool) -> None:
    runs = runs_folder(plan.options.output)
    if backend is Backend.submitit:
        from .backends.submitit import CommandJob

        job = CommandJob(plan, runs, cluster_file)
        text, start = job.script, job.submit
    else:
        text = render_sbatch(plan, runs)

        def start() -> str:
            now = time.time()
            job_id = sbatch.submit(text)
            keep_run(plan, runs=runs, job_id=job_id, backend="sbatch", script=text, cluster_file=cluster_file,
                     submitted_at=now)  # fmt: skip
            return job_id

    if dry_run:
        print(text, end="")
        return
    make_runs_folder(runs)
    console.say(f"{plan.world_size} ranks on {plan.node_count} nodes in {len(plan.components)} components")
    job_id = start()
    console.say(f"submitted; the log is {plan.options.output.replace('%x', plan.name).replace('%j', job_id)}")
    print(job_id, flush=True)
    if follow:
        from . import jobs

        raise SystemExit(jobs.follow(jobs.Job.find(job_id, runs), sys.stderr))


def _choose(backend: Backend, dry_run: bool) -> Backend:
    if backend is Backend.auto:
        if sbatch.is_available():
            return Backend.sbatch
        console.say("no sbatch on PATH: the ranks run on this machine (--backend local)")
        return Backend.local
    if backend in (Backend.sbatch, Backend.submitit) and not dry_run and not sbatch.is_available():
        raise sbatch.SubmitError(
            "no sbatch on PATH: is this a login node of the cluster? Without Slurm use --backend local"
        )
    return backend


def _write_script(plan: Plan, path: Path) -> None:
    write_whole(path, render_sbatch(with_log_path(plan, make_folder=True)), mode=0o755)
    console.say(f"wrote {path}: {plan.world_size} ranks on {plan.node_count} nodes; start it with: sbatch {path}")


def with_log_path(plan: Plan, *, make_folder: bool) -> Plan:
    """The plan with ``~`` and ``$USER`` in the log's path expanded: Slurm takes them as they stand, and a job whose log
    folder is missing dies without a word."""
    path = os.path.expandvars(os.path.expanduser(plan.options.output))
    unknown = re.search(r"\$\w+|\$\{[^}]*\}", path)
    if unknown:
        raise OptionsError(f"--output: {plan.options.output!r}: the variable {unknown[0]} is not set here")
    folder = os.path.dirname(path)
    if make_folder and folder and "%" not in folder:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as fault:
            raise OptionsError(f"--output: the folder {folder!r} cannot be made: {fault.strerror}") from None
    return plan.with_output(path)


def main() -> None:
    app = console.make_app("Plan a job on uneven nodes and start it.")
    app.command(context_settings={"allow_interspersed_args": False})(submit)
    console.run(app)


if __name__ == "__main__":
    main()
