"""Runs that stay in the terminal (the local and torchrun backends), kept in a run folder."""

import io
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ddp_slurm.console import say
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.files import own_target
from ddp_slurm.job.log_path import log_path
from ddp_slurm.job.runs_folder import runs_folder
from ddp_slurm.plan import Plan
from ddp_slurm.runs.keep import Submission, keep_run
from ddp_slurm.runs.process import process_start
from ddp_slurm.runs.run_folder import Run

LOG = "log"


def run_and_keep(
    plan: Plan, *, backend: str, script: str, run: Callable[[Plan], int], cluster_file: Path | None
) -> int:
    """Run a plan to its end and keep what was run, its output and its exit status.

    Returns the exit status. Where the folder cannot be made the plan is run anyway, and a
    message reports it.
    """
    kept = _keep(plan, backend, script, cluster_file)
    if kept is None or kept.log is None:
        with _copied_into(os.devnull):
            return run(plan)
    say(f"run {kept.job_id}, kept in {os.path.relpath(kept.folder)}")
    status = 1
    try:
        with _copied_into(kept.log):
            status = run(plan)
    except DdpSlurmError as error:
        status = error.exit_status
        raise
    finally:
        with suppress(DdpSlurmError):  # a disk that is full must not change the ranks' exit status
            kept.leave_exit_marker(status)
    return status


def _keep(plan: Plan, backend: str, script: str, cluster_file: Path | None) -> Run | None:
    now = time.time()
    pid = os.getpid()
    job_id = f"{backend}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}-{pid}"
    runs = runs_folder(plan.options.output)
    log: str | None = str(runs / job_id / LOG)
    if "output" in plan.options.given:
        log = log_path(plan.options, plan.name, job_id) or log
    submission = Submission(
        plan=plan,
        backend=backend,
        script=script,
        submitted_at=now,
        cluster_file=cluster_file,
        log=log,
        process={"host": socket.gethostname(), "pid": pid, "started": process_start(pid)},
    )
    return keep_run(submission, runs, job_id)


class _Copier(io.RawIOBase):
    """Writes to a terminal or pipe, and to the log first.

    Where one of them cannot be written (the terminal is closed, the disk is full), the other is
    still written, and the training goes on.
    """

    def __init__(self, terminal: BinaryIO, log: BinaryIO) -> None:
        self._terminal = terminal
        self._log = log

    def writable(self) -> bool:
        return True

    def write(self, text: bytes, /) -> int:  # type: ignore[override]
        error = _write_or_give_up(self._log, text)
        if error:
            note = f"the log {self._log.name} cannot be written: {error}; the run goes on without\n"
            text += note.encode()
        _write_or_give_up(self._terminal, text)
        return len(text)


def _write_or_give_up(file: BinaryIO, text: bytes) -> str | None:
    """Returns why the file cannot be written; what is written to it later is then discarded."""
    try:
        file.write(text)
        file.flush()
    except OSError as error:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), file.fileno())
        return error.strerror
    return None


@contextmanager
def _copied_into(path: str) -> Iterator[None]:
    """Copy both standard streams of this process into a log.

    Raises DdpSlurmError where the log cannot be written.
    """
    try:
        log = open(own_target(Path(path)), "ab")  # noqa: SIM115 # closed below
    except OSError as error:
        raise DdpSlurmError(f"--output: {path}: cannot be written: {error.strerror}") from None
    streams = sys.stdout, sys.stderr
    with log:
        sys.stdout, sys.stderr = (_copying(stream.buffer, log) for stream in streams)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams


def _copying(terminal: BinaryIO, log: BinaryIO) -> io.TextIOWrapper:
    copier = _Copier(terminal, log)
    return io.TextIOWrapper(copier, write_through=True)  # type: ignore[arg-type]
