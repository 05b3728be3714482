"""Writing the run folder of a job that was just submitted."""

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_slurm import __version__, trust
from ddp_slurm.ask import ask
from ddp_slurm.cluster import Cluster
from ddp_slurm.cluster.write import cluster_yaml
from ddp_slurm.console import say
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.files import write_own
from ddp_slurm.job.log_path import log_path
from ddp_slurm.job.options import JobOptions
from ddp_slurm.job.write import job_yaml
from ddp_slurm.plan import Plan
from ddp_slurm.runs.run_folder import RECORD, Run, RunError, utc_now
from ddp_slurm.slurm_client.commands import ask_slurm
from ddp_slurm.user import user_name

KEPT_PACKAGES = ("torch", "torchvision", "numpy", "submitit", "lightning", "accelerate")
VERSION_SECONDS = 3
"""The limit of a program that prints its version."""


@dataclass(frozen=True)
class Submission:
    """What was submitted from the current directory."""

    plan: Plan
    backend: str
    script: str
    submitted_at: float
    """time.time() just before the submission."""
    cluster_file: Path | None = None
    """Is copied; without a regular file cluster.yaml is written from the plan."""
    options: JobOptions | None = None
    """Those to repeat it with, where they are not the plan's."""
    log: str | None = None
    """Its path, where it is not the one of the plan's options."""
    process: Mapping[str, Any] | None = None
    """See ``Run.process``."""


def make_runs_folder(folder: Path) -> None:
    """Before anything is submitted. Raises RunError where no run could be kept there."""
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
        os.close(trust.open_folder(folder))
    except (OSError, trust.TrustError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunError(
            f"{folder}: the folder of the run folders cannot be made: {reason}; "
            "it is beside the log, whose place --output sets"
        ) from None


def keep_run(submission: Submission, runs: Path, job_id: str) -> Run | None:
    """Write the run folder of a job into the folder ``runs``.

    Its files may hold secrets (in the command, in values of --env), so only the user can read them.
    An error is reported and gives None: the job is on its way, and its id must be printed.
    """
    folder = runs / job_id
    try:
        make_runs_folder(runs)
        trust.make_folder(folder)
        _set_older_run_aside(folder, submission.submitted_at)
        run = _run_of(submission, folder)
        _write_files(run, submission)
    except (DdpSlurmError, OSError, UnicodeError) as error:
        say(f"job {job_id} is not kept in {runs}: {error}")
        return None
    return run


def _run_of(submission: Submission, folder: Path) -> Run:
    plan = submission.plan
    options = submission.options or plan.options
    files = ["--cluster", str(folder / "cluster.yaml"), "--job", str(folder / "job.yaml")]
    repeat = ["ddp-slurm", "submit", "--backend", submission.backend, *files]
    return Run(
        folder=folder,
        job_id=folder.name,
        backend=submission.backend,
        directory=os.getcwd(),
        log=submission.log or log_path(plan.options, plan.name, folder.name),
        submitted=utc_now(),
        command=options.command,
        repeat=tuple(repeat) if options.command else (),
        process=submission.process,
    )


def _write_files(run: Run, submission: Submission) -> None:
    options = submission.options or submission.plan.options
    record = {key: value for key, value in run._asdict().items() if key != "folder"}
    files = {
        "script.sh": submission.script,
        "plan.json": _json(plan_as_dict(submission.plan)),
        "job.yaml": job_yaml(_self_contained(options, run.folder)),
        "cluster.yaml": _cluster_text(submission),
        "versions.json": _json(versions()),
        RECORD: _json(record),
    }
    for name, text in files.items():
        write_own(run.folder / name, text)


def _json(values: Any) -> str:
    return json.dumps(values, indent=1) + "\n"


def _set_older_run_aside(folder: Path, submitted_at: float) -> None:
    """Move the files of an older job of this number: a new Slurm counts its jobs from 1 again."""
    if not (folder / RECORD).exists():
        return
    older = folder / time.strftime("before-%Y%m%dT%H%M%S", time.gmtime(submitted_at))
    older.mkdir(exist_ok=True)
    for path in folder.iterdir():
        # The new job may have begun, and ended.
        if path.is_file() and path.stat().st_mtime < submitted_at:
            os.replace(path, older / path.name)


def _self_contained(options: JobOptions, folder: Path) -> JobOptions:
    """The options with a copy of the file of speeds, which may change later."""
    if options.balance.file is None:
        return options
    copy = folder / "speeds.yaml"
    write_own(copy, Path(options.balance.file).read_bytes())
    return options.replaced(balance=options.balance.with_file(copy))


def _cluster_text(submission: Submission) -> str:
    file = submission.cluster_file
    if file is not None and file.is_file():
        return file.read_text(encoding="utf-8")
    # No file, or a pipe such as of <(...), which can be read only once.
    return cluster_yaml(planned_cluster(submission.plan))


def planned_cluster(plan: Plan) -> Cluster:
    """The part of the cluster that the plan uses: planned again, it gives the same plan."""
    nodes = []
    machines = iter(plan.machines)
    for component in plan.components:
        for _ in component.nodes:
            node = next(machines)._replace(
                gpus=component.gpus,
                cpus=component.cpus_per_node,
                memory_mb=component.memory_mb,
                interface=component.interface,
                partition=component.partition,
                constraint=component.constraint,
                env=component.env,
            )
            nodes.append(node)
    return Cluster(plan.cluster_name, tuple(nodes))


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """The plan for programs: components with their nodes and sizes, and every rank."""
    components = [
        {
            "nodes": list(component.nodes),
            "gres": component.gres,
            "tasks_per_node": component.tasks_per_node,
            "cpus_per_task": component.cpus_per_task,
            "memory_mb": component.memory_mb,
            "partition": component.partition,
            "constraint": component.constraint,
            "interface": component.interface,
        }
        for component in plan.components
    ]
    return {
        "name": plan.name,
        "cluster": plan.cluster_name,
        "world_size": plan.world_size,
        "components": components,
        "ranks": [{name: getattr(rank, name) for name in rank.__slots__} for rank in plan.ranks()],
        "step_env": plan.job_env().to_environ(),
        "launcher": plan.options.launcher,
    }


def versions() -> dict[str, Any]:
    """Of the submitting side: Python, packages, Slurm, and the git commit of the current folder."""
    from importlib import metadata  # a dry run does not need it, and it takes a tenth of its time

    packages = {"ddp_slurm": __version__}
    for name in KEPT_PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    slurm = ask_slurm(["scontrol", "--version"], timeout_seconds=VERSION_SECONDS)
    commit = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    git = ask(commit, timeout_seconds=VERSION_SECONDS)
    return {
        "python": sys.version.split()[0],
        "interpreter": sys.executable,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "user": user_name(),
        "packages": packages,
        "slurm": slurm.out.strip() if slurm.status == 0 and slurm.out.strip() else None,
        "git": git.out.strip() if git.status == 0 and git.out.strip() else None,
    }
