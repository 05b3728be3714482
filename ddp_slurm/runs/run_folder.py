"""The run folder: what was submitted, kept beside the log, so that a run can be read and repeated a month later.

``ddp_slurm_runs/JOBID/`` holds script.sh, plan.json, cluster.yaml, job.yaml, versions.json, run.json, and in the end
the exit marker ``exit`` of the job script. Its files are made by this module, the marker by the script itself.
"""

import json
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_slurm import __version__
from ddp_slurm.cluster import Cluster
from ddp_slurm.cluster.write import cluster_yaml
from ddp_slurm.console import say
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.files import write_whole
from ddp_slurm.job.log_path import RUNS_FOLDER, log_path, runs_folder
from ddp_slurm.job.options import JobOptions
from ddp_slurm.job.write import job_yaml
from ddp_slurm.plan import Plan
from ddp_slurm.slurm_client.states import JobState
from ddp_slurm.user import user_name

RECORD = "run.json"
EXIT_MARKER = "exit"
LAST_LOOK = "state.json"
KEPT_PACKAGES = ("torch", "torchvision", "numpy", "submitit", "lightning", "accelerate")
PROBE_SECONDS = 3


class RunError(DdpSlurmError):
    """A run folder cannot be found, read or made."""


@dataclass(frozen=True)
class Run:
    """A submitted job and its folder."""

    folder: Path
    job_id: str
    backend: str
    directory: str
    """Where it was submitted."""
    log: str | None
    """Path of the log; None where only Slurm knows it."""
    submitted: str
    """UTC, ISO 8601."""
    command: tuple[str, ...]
    repeat: tuple[str, ...]
    """The words of the command that submits the same again, in ``directory``."""
    process: Mapping[str, Any] | None = None
    """Of the local backend: ``host``, ``pid`` and ``started`` (clock ticks after boot, /proc/PID/stat)."""

    @property
    def what(self) -> str:
        """What every rank runs."""
        return shlex.join(self.command) or "a Python function"

    @property
    def repeat_line(self) -> str:
        return f"cd {shlex.quote(self.directory)} && {shlex.join(self.repeat)}"

    @property
    def plan(self) -> dict[str, Any]:
        """plan.json: ``world_size``, ``components``, ``ranks`` (each with ``rank``, ``node``, ``local_rank``, ...)."""
        plan = _read_json(self.folder / "plan.json")
        if not isinstance(plan, dict) or not {"world_size", "ranks", "launcher"} <= plan.keys():
            raise RunError(f"{self.folder / 'plan.json'}: not the plan of a run")
        return plan

    def exit_marker(self) -> str | None:
        """The text of the marker, None as long as there is none."""
        try:
            return (self.folder / EXIT_MARKER).read_text(errors="replace")
        except OSError:
            return None

    def leave_exit_marker(self, status: int) -> None:
        """The local backend's way; under Slurm the job script does it."""
        terminated = "yes" if status in (130, 143) else "no"
        text = f"status={status}\nterminated={terminated}\nended={_utc()}\nhost={socket.gethostname()}\nrestarts=0\n"
        write_whole(self.folder / EXIT_MARKER, text)

    def may_log_to(self, path: str | None) -> bool:
        """Whether that log, as Slurm tells it, can be this run's and not that of a later job of the same number.

        True where either is not known; Slurm tells some patterns as they stand.
        """
        if not path or not self.log or "%" in path:
            return True
        return os.path.realpath(path) == os.path.realpath(self.log)

    def last_look(self) -> JobState | None:
        """The final state that was seen before, None where none was."""
        try:
            return JobState.from_dict(json.loads((self.folder / LAST_LOOK).read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remember(self, state: JobState) -> None:
        """Keep a final state that Slurm told: it forgets it soon, and the marker does not know all it says."""
        told = state.source in ("squeue", "scontrol", "sacct") and self.may_log_to(state.log)
        if state.is_final and told and self.last_look() is None:
            try:
                write_whole(self.folder / LAST_LOOK, json.dumps(state.as_dict(), indent=1) + "\n")
            except DdpSlurmError:
                return  # somebody else's run: it can be read all the same


def _utc() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as fault:
        raise RunError(f"{path}: cannot be read: {fault.strerror}") from None
    except ValueError as fault:
        raise RunError(f"{path}: not JSON: {fault}") from None


def make_runs_folder(folder: Path) -> None:
    """Before anything is submitted. Raises RunError, with the path and the reason, where a run could not be kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as fault:
        raise RunError(
            f"{folder}: the folder for what was submitted cannot be made: {fault.strerror}; it stands beside the log, "
            "which --output places"
        ) from None


def keep_run(
    plan: Plan,
    *,
    runs: Path,
    job_id: str,
    backend: str,
    script: str,
    cluster_file: Path | None,
    submitted_at: float,
    log: str | None = None,
    process: Mapping[str, Any] | None = None,
    options: JobOptions | None = None,
) -> Run | None:
    """Write the run folder of a job that was just submitted from the current directory.

    ``cluster_file`` is copied; without a regular one cluster.yaml is written from the plan. ``submitted_at`` is the
    time.time() just before the submission. ``options`` are those to repeat it with, where they are not the plan's. The
    files may hold secrets (in the command, in values of --env), and are for the user alone.
    A fault is said and gives None: the job is on its way, and its id must be printed.
    """
    asked = options or plan.options
    try:
        folder = runs / job_id
        make_runs_folder(folder)
        _set_older_run_aside(folder, submitted_at)
        repeat = (
            [
                "ddp-slurm",
                "submit",
                "--backend",
                backend,
                "--cluster",
                str(folder / "cluster.yaml"),
                "--job",
                str(folder / "job.yaml"),
            ]
            if asked.command
            else []
        )
        run = Run(
            folder,
            job_id,
            backend,
            os.getcwd(),
            log or log_path(plan.options, plan.name, job_id),
            _utc(),
            asked.command,
            tuple(repeat),
            process,
        )
        _write(run, plan, asked, script, cluster_file)
        return run
    except (DdpSlurmError, OSError, UnicodeError) as fault:
        say(f"job {job_id} is not kept in {runs}: {fault}")
        return None


def _write(
    run: Run, plan: Plan, options: JobOptions, script: str, cluster_file: Path | None
) -> None:
    if cluster_file is not None and not cluster_file.is_file():
        cluster_file = None  # a pipe, such as of <(...), can be read only once, and was
    if cluster_file:
        cluster = cluster_file.read_text(encoding="utf-8")
    else:
        cluster = cluster_yaml(planned_cluster(plan))
    files = {
        "script.sh": script,
        "plan.json": _json(plan_as_dict(plan)),
        "job.yaml": job_yaml(_self_contained(options, run.folder)),
        "cluster.yaml": cluster,
        "versions.json": _json(versions()),
        RECORD: _json({k: v for k, v in vars(run).items() if k != "folder"}),
    }
    for name, text in files.items():
        write_whole(run.folder / name, text, 0o600)


def _json(values: Any) -> str:
    return json.dumps(values, indent=1) + "\n"


def _set_older_run_aside(folder: Path, submitted_at: float) -> None:
    """A new Slurm counts its jobs from 1 again; what an older job of this number left is not lost."""
    record = folder / RECORD
    if not record.exists():
        return
    older = folder / time.strftime("before-%Y%m%dT%H%M%S", time.gmtime(submitted_at))
    older.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if (
            path.is_file() and path.stat().st_mtime < submitted_at
        ):  # the new job may have begun, and ended
            os.replace(path, older / path.name)


def _self_contained(options: JobOptions, folder: Path) -> JobOptions:
    """The options with a copy of the file of speeds, which may be another one next month."""
    if options.balance.file is None:
        return options
    copy = folder / "speeds.yaml"
    shutil.copyfile(options.balance.file, copy)
    return options.replaced(balance=options.balance.with_file(copy))


def planned_cluster(plan: Plan) -> Cluster:
    """The part of the cluster that the plan uses: planned again, it gives the same plan."""
    machines = iter(plan.machines)
    nodes = [
        next(machines)._replace(
            gpus=component.gpus,
            cpus=component.cpus_per_task * component.tasks_per_node,
            memory_mb=component.memory_mb,
            interface=component.interface,
            partition=component.partition,
            constraint=component.constraint,
            env=component.env,
        )
        for component in plan.components
        for _ in component.nodes
    ]
    return Cluster(plan.cluster_name, tuple(nodes))


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """The plan for programs: components with their nodes and sizes, and every rank."""
    return {
        "name": plan.name,
        "cluster": plan.cluster_name,
        "world_size": plan.world_size,
        "components": [
            {
                "nodes": list(c.nodes),
                "gres": c.gres,
                "tasks_per_node": c.tasks_per_node,
                "cpus_per_task": c.cpus_per_task,
                "memory_mb": c.memory_mb,
                "partition": c.partition,
                "constraint": c.constraint,
                "interface": c.interface,
            }
            for c in plan.components
        ],
        "ranks": [{name: getattr(rank, name) for name in rank.__slots__} for rank in plan.ranks()],
        "step_env": plan.job_env().to_environ(),
        "launcher": plan.options.launcher,
    }


def versions() -> dict[str, Any]:
    """Of the submitting side: Python, packages, Slurm, and the commit of the current directory where it is in git."""
    from importlib import metadata  # here: it costs a dry run a tenth of its time

    packages = {"ddp_slurm": __version__}
    for name in KEPT_PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": sys.version.split()[0],
        "interpreter": sys.executable,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "user": user_name(),
        "packages": packages,
        "slurm": _said(["scontrol", "--version"]),
        "git": _said(["git", "describe", "--always", "--dirty", "--abbrev=40"]),
    }


def _said(argv: list[str]) -> str | None:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=PROBE_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def load_run(folder: Path) -> Run:
    """Read a run folder. Raises RunError."""
    values = _read_json(folder / RECORD)
    try:
        values["command"], values["repeat"] = tuple(values["command"]), tuple(values["repeat"])
        return Run(folder=folder, **values)
    except (KeyError, TypeError):
        raise RunError(f"{folder / RECORD}: not the record of a run") from None


def find_run(job_id: str, beside: Path | None = None, log: str | None = None) -> Run | None:
    """The run of a job: under the current directory, one folder below it, or beside ``log``, which Slurm tells.

    ``beside`` is the folder of the logs, where the user names it. Every new Slurm counts its jobs from 1 again: of
    several runs it is the one of that log, else the latest.
    """
    if beside is not None:
        places = [beside, beside / RUNS_FOLDER]
    else:
        places = [Path(RUNS_FOLDER), *Path().glob(f"*/{RUNS_FOLDER}")]
        places += [runs_folder(log)] if log else []
    # the record of another user's run cannot be read; of a Slurm job Slurm tells much the same
    folders = [place / job_id for place in places if os.access(place / job_id / RECORD, os.R_OK)]
    found = [
        run for run in (load_run(folder.absolute()) for folder in folders) if run.may_log_to(log)
    ]
    return max(found, key=lambda run: run.submitted, default=None)
