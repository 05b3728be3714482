"""``python -m ddp_slurm.submit [OPTIONS] [-- COMMAND ...]``, the same as ``ddp-slurm submit``."""

import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from ddp_slurm import console
from ddp_slurm.backends import sbatch
from ddp_slurm.errors import counted
from ddp_slurm.job.log_path import make_log_folder
from ddp_slurm.job.options import NO_COMMAND, OptionsError
from ddp_slurm.job.runs_folder import runs_folder
from ddp_slurm.launchers import forgotten_run
from ddp_slurm.plan import Plan
from ddp_slurm.plan.commands import add_job_options, request_of
from ddp_slurm.plan.request import Reading, Request, read_request
from ddp_slurm.render import render_sbatch

BACKENDS = ("auto", "sbatch", "submitit", "torchrun", "local")
IN_THE_TERMINAL = ("local", "torchrun")


def add_commands(commands: console.Commands) -> None:
    add_submit_options(console.add_command(commands, "submit", submit))


def add_submit_options(parser: console.Parser) -> None:
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="auto: sbatch where it is on PATH, else the ranks run on this machine; "
        "submitit: through submitit, the exit status of each rank as its result; "
        "torchrun: on the nodes of cluster.yaml over ssh, without Slurm",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would be submitted, and submit nothing",
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


def submit(*, backend: str, dry_run: bool, script: Path | None, follow: bool, **typed: Any) -> None:
    """Train on all GPUs of the cluster: plan the job, render it and start it.

    Prints the job's id on stdout.
    """
    if script is not None:
        _check_goes_with_script(backend, follow=follow)
        backend = "sbatch"
    chosen = choose_backend(backend, submits=script is None and not dry_run)
    request = request_of(chosen, **typed)
    reading = read_request(request)
    _check_what_starts(reading)
    plan = reading.plan()
    if plan.shared_cpus_note:
        console.say(f"note: {plan.shared_cpus_note}")
    _say_if_run_was_forgotten(plan, chosen)
    if script is not None:
        _write_script(plan, script, dry_run=dry_run)
    else:
        raise SystemExit(start(plan, request, dry_run=dry_run, follow=follow))


def start(plan: Plan, request: Request, *, dry_run: bool = False, follow: bool = False) -> int:
    """Start the job with the request's backend. Returns the exit status, 0 for a job that waits.

    Args:
        dry_run: print what would be started instead.
        follow: of a Slurm job: stay until it ends.
    """
    if request.backend in IN_THE_TERMINAL:
        return _run_in_the_terminal(plan, request, dry_run=dry_run)
    return _submit_to_slurm(plan, request, dry_run=dry_run, follow=follow)


def _say_if_run_was_forgotten(plan: Plan, backend: str) -> None:
    options = plan.options
    if options.uneven or options.launcher == "torchrun" or backend == "torchrun":
        return
    line = forgotten_run(options.command)
    if line is not None:
        console.say(f"note: {line}")


def _check_goes_with_script(backend: str, *, follow: bool) -> None:
    if backend not in ("auto", "sbatch"):
        raise OptionsError(
            f"--script writes an sbatch script; it cannot be combined with --backend {backend}"
        )
    if follow:
        raise OptionsError("--script submits nothing; it cannot be combined with --follow")


def choose_backend(backend: str, *, submits: bool = True) -> str:
    """The backend that starts the job. Raises SubmitError where sbatch is needed and not here.

    Args:
        submits: False for what is only printed or written to a file.
    """
    if backend == "auto":
        if sbatch.is_available():
            return "sbatch"
        console.say("no sbatch on PATH: the ranks run on this machine (--backend local)")
        return "local"
    if backend not in IN_THE_TERMINAL and submits and not sbatch.is_available():
        raise sbatch.SubmitError(
            "no sbatch on PATH: is this a login node of the cluster? "
            "Without Slurm use --backend local"
        )
    return backend


def _check_what_starts(reading: Reading) -> None:
    """Add the errors of the command and of the setup lines, which a plan alone does not need."""
    options = reading.options
    if not options.command and "command" not in reading.unread:
        reading.errors.append(NO_COMMAND)
    with reading.collected():
        sbatch.check_setup(options.setup)


# What starts and keeps a job is imported where it is used: a dry run does not wait for it.


def _run_in_the_terminal(plan: Plan, request: Request, *, dry_run: bool) -> int:
    from ddp_slurm.backends import local, torchrun
    from ddp_slurm.runs.foreground import run_and_keep

    place = local if request.backend == "local" else torchrun
    text = place.describe(plan)
    if dry_run:
        print(text, end="")
        return 0
    if "output" in plan.options.given:
        make_log_folder(plan.options)
    return run_and_keep(
        plan,
        backend=request.backend,
        script=text,
        run=place.run,
        cluster_file=request.cluster_file,
    )


def _submit_to_slurm(plan: Plan, request: Request, *, dry_run: bool, follow: bool) -> int:
    runs = runs_folder(plan.options.output)
    job = None
    if request.backend == "submitit":
        from ddp_slurm.backends.submitit.executor import CommandJob

        job = CommandJob(plan, runs, request.cluster_file)
    script = job.script if job else render_sbatch(plan, runs)
    if dry_run:
        print(script, end="")
        return 0
    from ddp_slurm.runs.keep import make_runs_folder
    from ddp_slurm.runs.limits import warn_of_partition_limits

    warn_of_partition_limits(plan)
    unused = _sbatch_variables()
    if unused:
        console.say(f"not used: {', '.join(unused)}; give submit's own options instead")
    make_log_folder(plan.options)
    make_runs_folder(runs)
    console.say(f"{plan.size} in {counted(len(plan.components), 'component')}")
    job_id = job.submit() if job else _submit_script(plan, script, runs, request.cluster_file)
    console.say(f"submitted; the log is {_shown_log(plan, job_id)}")
    print(job_id, flush=True)
    if not follow:
        return 0
    from ddp_slurm.runs.follow import follow as follow_job
    from ddp_slurm.runs.job import find_job

    submitted, _ = find_job(job_id, runs)
    return follow_job(submitted, sys.stderr)


def _sbatch_variables() -> list[str]:
    """The variables of this shell that would be options of sbatch."""
    return sorted(name for name in os.environ if name.startswith("SBATCH_"))


def _submit_script(plan: Plan, script: str, runs: Path, cluster_file: Path | None) -> str:
    """Returns the job's id."""
    from ddp_slurm.runs.keep import Submission, keep_run

    now = time.time()
    job_id = sbatch.submit(script)
    keep_run(Submission(plan, "sbatch", script, now, cluster_file), runs, job_id)
    return job_id


def _shown_log(plan: Plan, job_id: str) -> str:
    values = {"%x": plan.name, "%j": job_id, "%%": "%"}
    return re.sub("%[xj%]", lambda pattern: values[pattern[0]], plan.options.output)


def _write_script(plan: Plan, path: Path, *, dry_run: bool) -> None:
    text = render_sbatch(plan)
    if dry_run:
        print(text, end="")
        return
    from ddp_slurm.files import write_whole

    _check_script(path)
    make_log_folder(plan.options)
    options = plan.options
    may_hold_secrets = (
        options.env or options.setup or any(component.env for component in plan.components)
    )
    write_whole(path, text, mode=0o700 if may_hold_secrets else 0o755)
    # sbatch takes these variables before the script's own lines.
    unset = [word for name in _sbatch_variables() for word in ("-u", name)]
    start = ["env", *unset, "sbatch", str(path)] if unset else ["sbatch", str(path)]
    console.say(f"wrote {path}: {plan.size}; start it with: {shlex.join(start)}")


def _check_script(path: Path) -> None:
    """Raises OptionsError for a file that --script did not make; an empty one may be replaced."""
    if str(path) in ("-", "/dev/stdout"):
        raise OptionsError(f"--script {path} is not a file; --dry-run prints the script")
    if not path.is_file():
        return
    with path.open(errors="replace") as file:
        first, second = file.readline(), file.readline()
    if first and "Made by ddp-slurm submit" not in second:
        raise OptionsError(
            f"--script {path}: already exists and was not made by ddp-slurm; "
            "remove it, or name another file"
        )


def main() -> None:
    parser = console.Parser(prog="python -m ddp_slurm.submit", description=submit.__doc__)
    parser.set_defaults(function=submit)
    add_submit_options(parser)
    console.run(parser)


if __name__ == "__main__":
    main()
