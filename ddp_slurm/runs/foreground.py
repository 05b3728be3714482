"""Runs that stay in the terminal (the local and torchrun backends), kept in a run folder like those of Slurm."""

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
from ddp_slurm.job.log_path import log_path, runs_folder
from ddp_slurm.plan import Plan
from ddp_slurm.runs.commands import process_start
from ddp_slurm.runs.run_folder import Run, keep_run

LOG = "log"


def run_and_keep(
    plan: Plan, *, backend: str, script: str, run: Callable[[Plan], int], cluster_file: Path | None
) -> int:
    """Run a plan to its end and keep what was run, its output and its exit status. Returns the exit status.

    Where the folder cannot be made the plan is run all the same, saying so.
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
    except DdpSlurmError as fault:
        status = fault.exit_status
        raise
    finally:
        with suppress(DdpSlurmError):  # a disk that is full must not change the ranks' exit status
            kept.leave_exit_marker(status)
    return status


def _keep(plan: Plan, backend: str, script: str, cluster_file: Path | None) -> Run | None:
    now, pid = time.time(), os.getpid()
    job_id = f"{backend}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}-{pid}"
    runs = runs_folder(plan.options.output)
    asked_for = (
        log_path(plan.options, plan.name, job_id) if "output" in plan.options.given else None
    )
    return keep_run(
        plan,
        runs=runs,
        job_id=job_id,
        backend=backend,
        script=script,
        cluster_file=cluster_file,
        submitted_at=now,
        log=asked_for or str(runs / job_id / LOG),
        process={"host": socket.gethostname(), "pid": pid, "started": process_start(pid)},
    )


class _Copier(io.RawIOBase):
    """Writes to a terminal or pipe, and to the log first. Neither must cost the other, or end the training: the
    terminal may go away, and a disk may be full."""

    def __init__(self, terminal: BinaryIO, log: BinaryIO) -> None:
        self._terminal, self._log = terminal, log

    def writable(self) -> bool:
        return True

    def write(self, text: bytes, /) -> int:  # type: ignore[override]
        fault = _write_or_give_up(self._log, text)
        if fault:
            text += f"the log {self._log.name} cannot be written: {fault}; the run goes on without it\n".encode()
        _write_or_give_up(self._terminal, text)
        return len(text)


def _write_or_give_up(file: BinaryIO, text: bytes) -> str | None:
    """Returns why the file cannot be written; what is still written to it then goes nowhere."""
    try:
        file.write(text)
        file.flush()
    except OSError as fault:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), file.fileno())
        return fault.strerror
    return None


@contextmanager
def _copied_into(path: str) -> Iterator[None]:
    """Both standard streams of this process are copied into the log. Raises DdpSlurmError where there can be none."""
    try:
        log = open(path, "ab")  # noqa: SIM115 # closed below
    except OSError as fault:
        raise DdpSlurmError(f"--output: {path}: cannot be written: {fault.strerror}") from None
    streams = sys.stdout, sys.stderr
    with log:
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(_Copier(stream.buffer, log), write_through=True)  # type: ignore[type-var]
            for stream in streams
        )
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams
