"""Staying with a job until it ends: its state while it changes, then its log."""

import time
from collections.abc import Callable
from typing import TextIO

from ddp_slurm.console import say
from ddp_slurm.runs.fetched_log import FetchedLog, host_elsewhere
from ddp_slurm.runs.job import Job
from ddp_slurm.runs.log import GrowingLog
from ddp_slurm.slurm_client.states import UNKNOWN, JobState, Patience

LOG_SECONDS = 0.2
STATE_SECONDS = 2.0
"""How often the log is read, and how often Slurm is asked."""

Select = Callable[[str], str]
"""Which of the lines of a text to print."""


def all_lines(text: str) -> str:
    return text


def follow(job: Job, out: TextIO, select: Select = all_lines) -> int:
    """Report the state while it changes and copy the log until the job ends.

    Returns the exit status of the command: 0 for COMPLETED, else the job's own, or 1. Ctrl-C
    detaches, and the job goes on. Raises StateError when Slurm has been silent for too long.
    """
    try:
        state = _follow_to_its_end(job, out, select)
    except KeyboardInterrupt:
        say(
            f"\ndetached; job {job.id} goes on. Come back: ddp-slurm logs {job.id} --follow   "
            f"end it: ddp-slurm cancel {job.id}"
        )
        return 130
    say(f"job {job.id} is {state.describe()}")
    return 0 if state.state == "COMPLETED" else state.exit_status or 1


def _follow_to_its_end(job: Job, out: TextIO, select: Select) -> JobState:
    watch = _StateWatch(job)
    log = None
    while True:
        state = watch.look()
        if log is None and not state.is_waiting and state.state != UNKNOWN:
            log = open_log(job, state)
        if isinstance(log, FetchedLog) and state.is_final:
            log.fetch_now()
        if log is not None:
            for text in log.new_text(ended=state.is_final):
                out.write(select(text))
            out.flush()
        if state.is_final:
            if isinstance(log, FetchedLog) and log.problem:
                say(f"the log could not be read: {log.problem}")
            return state
        time.sleep(LOG_SECONDS)


def open_log(job: Job, state: JobState) -> GrowingLog:
    """The log here, or on the host of rank 0 where there is no shared folder."""
    path = job.log(state)
    host = host_elsewhere(state, job.run) if job.is_of_slurm else None
    return FetchedLog(path, host) if host else GrowingLog(path)


class _StateWatch:
    """Asks for the state now and then, and reports it when it changes."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._patience = Patience()
        self._reported = ""
        self._next_look = time.monotonic()
        self._state = JobState(job.id, UNKNOWN, "none")

    def look(self) -> JobState:
        """Raises StateError when Slurm has been silent for too long."""
        if time.monotonic() < self._next_look:
            return self._state
        self._state = self._job.state()
        self._patience.check(self._state)
        self._next_look = time.monotonic() + STATE_SECONDS
        is_ending = self._state.is_final or self._state.state == "COMPLETING"
        text = self._state.describe()
        if text != self._reported and not is_ending:
            self._reported = text
            say(f"job {self._job.id} is {text}")
        return self._state
