"""Run folders: what is kept of a job beside its log, so that it can be read and repeated later.

``ddp_slurm_runs/JOBID/`` holds script.sh, plan.json, cluster.yaml, job.yaml, versions.json and
run.json (``ddp_slurm.runs.keep``), in the end the exit marker of the job script, and the final
state that Slurm reported.

Named tuples, not dataclasses, whose import takes as long as the rest of ``ddp-slurm status``.
"""

import json
import os
import re
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ddp_slurm import trust
from ddp_slurm.console import say
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.job.runs_folder import names_of_runs_folder, place_of_runs
from ddp_slurm.runs.log import tail
from ddp_slurm.slurm_client.states import JobState

RECORD = "run.json"
EXIT_MARKER = "exit"
MARKER_ROOM = ".exit"
STOPPED_BY_A_SIGNAL = (129, 130, 131, 143)
"""Exit statuses of a launcher that ended by SIGHUP, SIGINT, SIGQUIT or SIGTERM."""
LAST_LOOK = "state.json"


class RunError(DdpSlurmError):
    """A run folder cannot be found, read or made."""


class JobError(DdpSlurmError):
    """A job cannot be found, or what was asked for does not apply to it."""


class Run(NamedTuple):
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
    """Of the local backend: ``host``, ``pid`` and ``started`` (clock ticks after boot)."""

    @property
    def what(self) -> str:
        """What every rank runs."""
        return shlex.join(self.command) or "a Python function"

    @property
    def repeat_line(self) -> str:
        """``repeat`` for a shell; empty for a job that no command submits again."""
        return (
            f"cd {shlex.quote(self.directory)} && {shlex.join(self.repeat)}" if self.repeat else ""
        )

    @property
    def plan(self) -> dict[str, Any]:
        """plan.json: ``world_size``, ``components``, ``ranks`` and more. Raises RunError."""
        plan = _read_json(self.folder / "plan.json")
        if not isinstance(plan, dict) or not {"world_size", "ranks", "launcher"} <= plan.keys():
            raise RunError(f"{self.folder / 'plan.json'}: not the plan of a run")
        return plan

    def exit_marker(self) -> str | None:
        """The text of the marker, None as long as there is none.

        Where the job script could not write it, the last line of the log has the same.
        """
        try:
            return trust.read_text(self.folder / EXIT_MARKER)
        except OSError:
            last_line = tail(Path(self.log), 1) if self.log else ""
        match = re.search(r"^job script: no exit marker in .*: (status=\d+ .*)$", last_line)
        return "\n".join(match[1].split()) if match else None

    def has_begun(self) -> bool:
        """Whether the job script began and could write here: it has made room for its marker."""
        try:
            return (self.folder / MARKER_ROOM).stat().st_size > 0
        except OSError:
            return False

    def leave_exit_marker(self, status: int) -> None:
        """For backends that stay in the terminal; under Slurm the job script does it."""
        terminated = "yes" if status in STOPPED_BY_A_SIGNAL else "no"
        lines = [
            f"status={status}",
            f"terminated={terminated}",
            f"ended={utc_now()}",
            f"host={os.uname().nodename}",
            "restarts=0",
        ]
        from ddp_slurm.files import write_own  # not needed to look at a job

        write_own(self.folder / EXIT_MARKER, "\n".join(lines) + "\n", 0o644)

    def may_log_to(self, path: str | None) -> bool:
        """Whether a log that Slurm reports can be this run's, and not a later job's of this number.

        True where either is not known; Slurm reports some patterns unchanged.
        """
        if not path or not self.log or "%" in path:
            return True
        return os.path.realpath(path) == os.path.realpath(self.log)

    def last_look(self) -> JobState | None:
        """The final state that was seen before, None where none was."""
        try:
            return JobState.from_dict(json.loads(trust.read_text(self.folder / LAST_LOOK)))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remember(self, state: JobState) -> None:
        """Keep a final state that Slurm reported.

        Slurm forgets it soon, and the exit marker does not have all of it.
        """
        is_from_slurm = state.source in ("squeue", "scontrol", "sacct")
        is_of_this_run = self.may_log_to(state.log)
        if not (state.is_final and is_from_slurm and is_of_this_run) or self.last_look():
            return
        from ddp_slurm.files import write_own

        try:
            write_own(self.folder / LAST_LOOK, json.dumps(state.as_dict(), indent=1) + "\n", 0o644)
        except DdpSlurmError:
            return  # a full disk, or one that is mounted to be read: reading it still works


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _read_json(path: Path) -> Any:
    try:
        return json.loads(trust.read_text(path))
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RunError(f"{path}: not JSON: {error}") from None


def load_run(folder: Path) -> Run:
    """Read a run folder. Raises RunError, or TrustError where others can write it."""
    values = _read_json(folder / RECORD)
    try:
        values["command"] = tuple(values["command"])
        values["repeat"] = tuple(values["repeat"])
        return Run(folder=folder, **values)
    except (KeyError, TypeError):
        raise RunError(f"{folder / RECORD}: not the record of a run") from None


def find_runs(job_id: str, folder: Path | None = None) -> list[Run]:
    """The runs of this number, the latest first: every new Slurm counts its jobs from 1 again.

    They are looked for in ``folder``, the folder of the logs, else under the current folder and
    one folder below it.
    """
    if folder is not None:
        places = [folder, *(folder / name for name in names_of_runs_folder())]
    else:
        places = []
        for name in names_of_runs_folder():
            places += [Path(name), *Path().glob(f"*/{name}")]
    runs = _runs_in(places, job_id)
    return sorted(runs, key=lambda run: run.submitted, reverse=True)


def find_run_beside(log: str, job_id: str) -> Run | None:
    """The run of a job whose log Slurm reports."""
    place = place_of_runs(log)
    runs = _runs_in([place / name for name in names_of_runs_folder()], job_id)
    return next((run for run in runs if run.may_log_to(log)), None)


def _runs_in(places: list[Path], job_id: str) -> list[Run]:
    """Those of other users are left out: of a Slurm job, Slurm reports much the same."""
    runs = []
    for place in places:
        folder = (place / job_id).absolute()
        if not os.access(folder / RECORD, os.R_OK):
            continue
        try:
            runs.append(load_run(folder))
        except trust.TrustError as error:
            say(f"not used: {error}")
    return runs
