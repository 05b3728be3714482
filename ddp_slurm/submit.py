"""``python -m ddp_slurm.submit [OPTIONS] [-- COMMAND ...]``: plan a job and start it; also ``ddp-slurm submit``."""

import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from ddp_slurm import console
from ddp_slurm.backends import sbatch
from ddp_slurm.errors import counted
from ddp_slurm.files import write_whole
from ddp_slurm.job.log_path import make_log_folder, runs_folder
from ddp_slurm.job.options import JobOptions, OptionsError
from ddp_slurm.plan import Plan
from ddp_slurm.plan.request import DEFAULT_CLUSTER, Request, plan_request
from ddp_slurm.render import render_sbatch
from ddp_slurm.schema.schema import keys_of

BACKENDS = ("auto", "sbatch", "submitit", "torchrun", "local")


def add_job_options(parser: console.Parser) -> None:
    """Every key of JobOptions as an option: one schema makes job.yaml's keys, the options and their help.

    Texts go through unchanged, the schema checks them.
    """
    parser.usage = "%(prog)s [OPTIONS] [-- COMMAND ...]"
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="the machines; default ./cluster.yaml, else the live Slurm",
    )
    parser.add_argument(
        "--job", type=Path, metavar="FILE", help="a YAML file with any of the options below as keys"
    )
    for name, key in keys_of(JobOptions).items():
        default = "" if key.default in (None, (), {}) else f" [default: {key.default}]"
        text = f"{key.help}{default}".replace("%", "%%")
        if name == "command":  # the first word that is no option, and all behind it
            parser.add_argument(name, nargs="...", metavar=key.metavar, help=text)
        else:
            action = "append" if isinstance(key.default, tuple | dict) else "store"
            parser.add_argument(
                f"--{name.replace('_', '-')}", action=action, metavar=key.metavar, help=text
            )


def add_submit_options(parser: console.Parser) -> None:
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="auto: sbatch where it is on PATH, else the ranks run on this machine; submitit: through submitit, the "
        "exit status of each rank as its result; torchrun: on the nodes of cluster.yaml over ssh, without Slurm",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be submitted, and submit nothing"
    )
    parser.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="write the job script to FILE, for sbatch, and submit nothing",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="stay: the state, then the log on stderr, until the job ends; Ctrl-C detaches from it",
    )
    add_job_options(parser)


def _request(
    cluster: Path | None,
    job: Path | None,
    command: list[str],
    options: dict[str, Any],
    backend: str,
) -> Request:
    given = {name: value for name, value in options.items() if value is not None}
    words = command[1:] if command[:1] == ["--"] else command
    return Request(cluster, job, given | ({"command": words} if words else {}), backend)


def show_plan(
    *, cluster: Path | None, job: Path | None, command: list[str], **options: Any
) -> None:
    """Show who would run where: the table of nodes, ranks and shares. Submits nothing."""
    from ddp_slurm.plan.table import plan_table

    backend = "sbatch" if sbatch.is_available() else "local"
    request = _request(cluster, job, command, options, backend)
    print(plan_table(plan_request(request)), end="")


def submit(
    *,
    backend: str,
    dry_run: bool,
    script: Path | None,
    follow: bool,
    cluster: Path | None,
    job: Path | None,
    command: list[str],
    **options: Any,
) -> None:
    """Train on all GPUs of the cluster: plan the job, render it and start it. Prints the job's id on stdout."""
    if script is not None:
        if backend not in ("auto", "sbatch"):
            raise OptionsError(
                f"--script writes an sbatch script; it does not go with --backend {backend}"
            )
        if follow:
            raise OptionsError(
                "--script submits nothing that --follow could wait for; give one of them"
            )
        request = _request(cluster, job, command, options, "sbatch")
        _write_script(plan_request(request), script, dry_run=dry_run)
        return
    chosen = _choose(backend, dry_run)
    request = _request(cluster, job, command, options, chosen)
    if chosen == "torchrun" and request.cluster is None and not DEFAULT_CLUSTER.exists():
        raise OptionsError(
            "--backend torchrun needs a cluster.yaml with the machines, here or by --cluster FILE"
        )
    plan = plan_request(request)
    if not plan.options.command:
        raise OptionsError(
            "no command: put what every rank runs after --, as in: -- python train.py"
        )
    sbatch.check_setup(plan.options.setup)
    if chosen in ("local", "torchrun"):
        _run_in_the_terminal(plan, chosen, _cluster_file(request), dry_run=dry_run)
    else:
        _submit_to_slurm(plan, chosen, _cluster_file(request), dry_run=dry_run, follow=follow)


def _cluster_file(request: Request) -> Path | None:
    return request.cluster or (DEFAULT_CLUSTER if DEFAULT_CLUSTER.exists() else None)


# What starts and keeps a job is imported where it is used: a dry run of a large one should not wait for it.


def _run_in_the_terminal(
    plan: Plan, backend: str, cluster_file: Path | None, *, dry_run: bool
) -> None:
    from ddp_slurm.backends import local, torchrun
    from ddp_slurm.runs.foreground import run_and_keep

    place = local if backend == "local" else torchrun
    text = place.describe(plan)
    if dry_run:
        print(text, end="")
        return
    if "output" in plan.options.given:
        make_log_folder(plan.options)
    status = run_and_keep(
        plan, backend=backend, script=text, run=place.run, cluster_file=cluster_file
    )
    raise SystemExit(status)


def _submit_to_slurm(
    plan: Plan, backend: str, cluster_file: Path | None, *, dry_run: bool, follow: bool
) -> None:
    runs = runs_folder(plan.options.output)
    job = None
    if backend == "submitit":
        from ddp_slurm.backends.submitit.executor import CommandJob

        job = CommandJob(plan, runs, cluster_file)
    script = job.script if job else render_sbatch(plan, runs)
    if dry_run:
        print(script, end="")
        return
    make_log_folder(plan.options)
    from ddp_slurm.runs.run_folder import keep_run, make_runs_folder

    make_runs_folder(runs)
    console.say(f"{plan.size} in {counted(len(plan.components), 'component')}")
    if job:
        job_id = job.submit()
    else:
        now = time.time()
        job_id = sbatch.submit(script)
        keep_run(
            plan,
            runs=runs,
            job_id=job_id,
            backend="sbatch",
            script=script,
            cluster_file=cluster_file,
            submitted_at=now,
        )
    values = {"%x": plan.name, "%j": job_id, "%%": "%"}
    console.say(
        f"submitted; the log is {re.sub('%[xj%]', lambda found: values[found[0]], plan.options.output)}"
    )
    print(job_id, flush=True)
    if follow:
        from ddp_slurm.runs import commands as jobs

        raise SystemExit(jobs.follow(jobs.Job.find(job_id, runs), sys.stderr))


def _choose(backend: str, dry_run: bool) -> str:
    if backend == "auto":
        if sbatch.is_available():
            return "sbatch"
        console.say("no sbatch on PATH: the ranks run on this machine (--backend local)")
        return "local"
    if backend in ("sbatch", "submitit") and not dry_run and not sbatch.is_available():
        raise sbatch.SubmitError(
            "no sbatch on PATH: is this a login node of the cluster? Without Slurm use --backend local"
        )
    return backend


def _write_script(plan: Plan, path: Path, *, dry_run: bool) -> None:
    sbatch.check_setup(plan.options.setup)
    if not dry_run:
        _check_script(path)
    text = render_sbatch(plan)
    if dry_run:
        print(text, end="")
        return
    make_log_folder(plan.options)
    has_values = plan.options.env or any(component.env for component in plan.components)
    write_whole(path, text, mode=0o700 if has_values else 0o755)  # the values may be secrets
    console.say(f"wrote {path}: {plan.size}; start it with: {shlex.join(['sbatch', str(path)])}")


def _check_script(path: Path) -> None:
    """Only what an earlier --script made is written over, or an empty file, such as mktemp's."""
    if str(path) in ("-", "/dev/stdout"):
        raise OptionsError(f"--script {path} names no file; --dry-run prints the script")
    if not path.is_file():
        return
    with path.open(errors="replace") as file:
        first, second = file.readline(), file.readline()
    if first and "Made by ddp-slurm submit" not in second:
        raise OptionsError(
            f"--script {path}: the file is there and not made by ddp-slurm; remove it, or name another"
        )


def main() -> None:
    parser = console.Parser(prog="python -m ddp_slurm.submit", description=submit.__doc__)
    parser.set_defaults(function=submit)
    add_submit_options(parser)
    console.run(parser)


if __name__ == "__main__":
    main()
