"""A job by its id: one way for the jobs of all backends."""

import re
from pathlib import Path
from typing import NamedTuple

from ddp_slurm.runs.fetched_log import exit_marker_elsewhere, host_elsewhere
from ddp_slurm.runs.process import foreground_state
from ddp_slurm.runs.run_folder import JobError, Run, find_run_beside, find_runs
from ddp_slurm.slurm_client.sources import (
    SLURM_ID,
    Shown,
    ask_shortly,
    by_exit_marker,
    conclude,
    leader_of,
    settle,
    show_job,
)
from ddp_slurm.slurm_client.states import ENDED, UNKNOWN, JobState

FOREGROUND_ID = r"[a-z]+-[0-9]{8}T[0-9]{6}-[0-9]+"


class Job(NamedTuple):
    """A job, with its run folder where one is found."""

    id: str
    run: Run | None

    @property
    def is_of_slurm(self) -> bool:
        return self.id.isdecimal()

    def state(self) -> JobState:
        """What is known now; a final state is kept in the run folder."""
        if not self.is_of_slurm:
            assert self.run is not None
            return foreground_state(self.run)
        return self.state_from(show_job(self.id, self.run))

    def state_from(self, shown: Shown) -> JobState:
        """The state by what slurmctld reported, else by what else is known."""
        state = conclude(shown, self.run)
        if self.run is not None:
            state = settle(state, self.run)
            if state.state == ENDED:
                state = self._by_marker_elsewhere(self.run, state) or state
            self.run.remember(state)
        return state

    def _by_marker_elsewhere(self, run: Run, state: JobState) -> JobState | None:
        """Without a shared folder log and exit marker are on the host of the job script."""
        has_log = run.log is not None and Path(run.log).exists()
        host = None if has_log else host_elsewhere(state, run)
        return by_exit_marker(self.id, exit_marker_elsewhere(run, host)) if host else None

    def log(self, state: JobState) -> Path:
        """Raises JobError where the log's path is not known."""
        path = (self.run.log if self.run else None) or state.log
        if not path:
            raise JobError(
                f"job {self.id}: its log is not known: no run folder, and Slurm has forgotten it"
            )
        return Path(path)


def find_job(
    job_id: str, folder: Path | None = None, *, needs_state: bool = True
) -> tuple[Job, JobState]:
    """The job of an id, and its state. The id of any component will do.

    Raises JobError for an id that no job has.

    Args:
        folder: the folder of its log; without one the run folder is looked for under the current
            folder, and beside the log that Slurm reports.
        needs_state: otherwise Slurm is asked for a short time only where a run folder is found.
    """
    if SLURM_ID.fullmatch(job_id):
        return _find_slurm_job(leader_of(job_id), folder, needs_state)
    if not re.fullmatch(FOREGROUND_ID, job_id):
        raise JobError(f"{job_id!r} is not a job id, such as 48 or local-20260131T235900-4711")
    runs = find_runs(job_id, folder)
    if not runs:
        raise JobError(
            f"no run {job_id!r} under this folder; go to where it was submitted, "
            "or name the folder: --folder DIR"
        )
    return Job(job_id, runs[0]), foreground_state(runs[0])


def _find_slurm_job(job_id: str, folder: Path | None, needs_state: bool) -> tuple[Job, JobState]:
    runs = find_runs(job_id, folder)
    ask = ask_shortly if runs and not needs_state else None
    shown = show_job(job_id, runs[0] if runs else None, ask)
    if shown.job_id != job_id:  # the id of a later component
        job_id = shown.job_id
        runs = find_runs(job_id, folder)
    job = Job(job_id, _run_of(job_id, runs, shown.state, folder))
    state = job.state_from(shown)
    if job.run is None and state.state == UNKNOWN:
        raise JobError(
            f"job {job_id}: Slurm does not know it ({state.note}), and this folder has no run "
            "folder of it; name the folder of its log: --folder DIR"
        )
    return job, state


def _run_of(
    job_id: str, runs: list[Run], state: JobState | None, folder: Path | None
) -> Run | None:
    """The run whose log Slurm reports; where Slurm knows no log, or a folder is given, the latest.

    A folder that is given may hold an older job of the number.
    """
    log = state.log if state else None
    matching = [run for run in runs if run.may_log_to(log)]
    if matching:
        return matching[0]
    if folder is not None:
        return runs[0] if runs else None
    return find_run_beside(log, job_id) if log else None
