"""``ddp-slurm status``, ``logs`` and ``cancel``, and ``submit --follow``: one way for the jobs of all backends."""

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ddp_slurm.console import Commands, add_command, say, table, typed
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.runs.log import GrowingLog, RankFilter
from ddp_slurm.runs.run_folder import Run, find_run
from ddp_slurm.schema.fields import whole_number
from ddp_slurm.slurm_client.states import (
    FINAL_STATES,
    UNKNOWN,
    WAITING_STATES,
    ComponentState,
    JobState,
    Patience,
    ask,
    leader_of,
    parse_exit_marker,
    read_state,
    settle,
    told_log,
)

LOG_SECONDS, STATE_SECONDS = 0.2, 2.0
"""How often the log is read and Slurm is asked while a job is followed."""


class JobError(DdpSlurmError):
    """A job cannot be found, or what was asked for does not apply to it."""


@dataclass(frozen=True)
class Job:
    """A job by its id, with its run folder where one is found."""

    id: str
    run: Run | None

    @classmethod
    def find(cls, job_id: str, beside: Path | None = None) -> "Job":
        """Raises JobError for what is no job id, and for an id that nobody knows."""
        if not re.fullmatch(r"[0-9]+(\+[0-9]+)?|[a-z]+-[0-9]{8}T[0-9]{6}-[0-9]+", job_id):
            raise JobError(f"{job_id!r} is not a job id, such as 48 or local-20260131T235900-4711")
        job = cls(leader_of(job_id), None)
        run = find_run(
            job.id, beside, told_log(job.id) if job.is_of_slurm and beside is None else None
        )
        if run is None and not job.is_of_slurm:
            raise JobError(
                f"no run {job_id!r} under this folder; go to where it was submitted, or name the folder: --folder DIR"
            )
        if run is None:
            state = read_state(job.id)
            job = cls(state.job_id, None)  # the id of a later component leads to the first one's
            run = find_run(job.id, beside, state.log)
            if run is None and state.state == UNKNOWN:
                raise JobError(
                    f"job {job_id}: Slurm does not know it ({state.note}), and no run folder of it is under this "
                    "folder; name the folder of its log: --folder DIR"
                )
        return cls(job.id, run)

    @property
    def is_of_slurm(self) -> bool:
        return self.id.isdigit()

    def state(self) -> JobState:
        """What is known now; a final state is kept in the run folder."""
        if not self.is_of_slurm:
            assert self.run is not None
            return foreground_state(self.run)
        if self.run is None:
            return read_state(self.id)
        state = settle(read_state(self.id, self.run.exit_marker, self.run.last_look))
        self.run.remember(state)
        return state

    def log(self, state: JobState) -> Path:
        """Raises JobError where nobody knows the log's path."""
        path = (self.run.log if self.run else None) or state.log
        if not path:
            raise JobError(
                f"job {self.id}: its log is not known: no run folder, and Slurm has forgotten the job"
            )
        return Path(path)


def foreground_state(run: Run) -> JobState:
    """Of a run of the local or torchrun backend, whose launcher is a process of the machine it was started on."""
    nodes = str((run.process or {}).get("host", ""))
    marker = parse_exit_marker(run.exit_marker() or "")
    if marker is not None:
        state = "CANCELLED" if marker.exit_status in (130, 143) else marker.state
        component = ComponentState(run.job_id, state, nodes, "", marker.exit_status)
        return JobState(run.job_id, state, "exit marker", (component,), log=run.log)
    if nodes != socket.gethostname():
        note = f"it was started on {nodes}: ask there"
        return JobState(run.job_id, UNKNOWN, "nobody", note=note, log=run.log)
    if launcher_is_alive(run):
        return JobState(
            run.job_id,
            "RUNNING",
            "process",
            (ComponentState(run.job_id, "RUNNING", nodes),),
            log=run.log,
        )
    note = "its launcher is gone and left no exit marker: it was killed, or the machine went down"
    return JobState(
        run.job_id,
        "FAILED",
        "process",
        (ComponentState(run.job_id, "FAILED", nodes),),
        note,
        run.log,
    )


def process_start(pid: int) -> int | None:
    """When a process began, in clock ticks after boot (proc(5), stat): a pid is used again, this pair is not."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def launcher_is_alive(run: Run) -> bool:
    process = run.process or {}
    return "pid" in process and process_start(process["pid"]) == int(process["started"])


def follow(job: Job, out: TextIO, keep: Callable[[str], bool] = lambda line: True) -> int:
    """Say the state while it changes and copy the log until the job ends; returns the exit status to give.

    Ctrl-C detaches: the job goes on. Raises StateError when Slurm has been silent for too long.
    """
    patience, said, log = Patience(), "", None
    next_look = time.monotonic()
    state = job.state()
    try:
        while True:
            if time.monotonic() >= next_look:
                state = job.state()
                patience.check(state)
                next_look = time.monotonic() + STATE_SECONDS
                if state.describe() != said and not (state.is_final or state.state == "COMPLETING"):
                    said = state.describe()
                    say(f"job {job.id} is {said}")
            if log is None and state.state not in WAITING_STATES and state.state != UNKNOWN:
                log = GrowingLog(job.log(state))
            if log is not None:
                for line in log.new_lines(ended=state.is_final):
                    if keep(line):
                        print(line, file=out)
                out.flush()
            if state.is_final:
                break
            time.sleep(LOG_SECONDS)
    except KeyboardInterrupt:
        say(
            f"\ndetached; job {job.id} goes on. Come back: ddp-slurm logs {job.id} --follow   "
            f"end it: ddp-slurm cancel {job.id}"
        )
        return 130
    say(f"job {job.id} is {state.describe()}")
    return 0 if state.state == "COMPLETED" else state.exit_status or 1


def status_text(job: Job, state: JobState) -> str:
    """A table of the components and what to do with the run."""
    rows = [("JOB", "STATE", "NODES", "REASON", "EXIT", "RESTARTS")]
    for c in state.components or (ComponentState(job.id, state.state),):
        code = "-" if c.exit_status is None or c.state not in FINAL_STATES else str(c.exit_status)
        code = f"signal {c.signal}" if c.signal else code
        restarts = "-" if c.restarts is None else str(c.restarts)
        rows.append((c.job_id, c.state, c.nodes or "-", c.reason or "-", code, restarts))
    lines = [table(rows)]
    lines.append(f"job {job.id} is {state.describe()}, says {state.source}")
    if job.run is not None:
        lines += [
            f"submitted {job.run.submitted} by the {job.run.backend} backend: {job.run.what}",
            f"log: {job.run.log or state.log}",
            f"kept in: {job.run.folder}",
            *([f"repeat it: {job.run.repeat_line}"] if job.run.repeat else []),
        ]
    elif state.log:
        lines.append(f"log: {state.log}")
    return "\n".join(lines) + "\n"


def add_commands(commands: Commands) -> None:
    """status, logs and cancel."""
    one, log, end = (
        add_command(commands, function.__name__, function) for function in (status, logs, cancel)
    )
    for command in (one, log, end):
        command.add_argument(
            "job_id", metavar="JOBID", help="the id that submit printed, such as 48"
        )
        command.add_argument(
            "--folder",
            type=Path,
            help="the folder of the job's log; default this one, and those in it",
        )
    one.add_argument("--json", action="store_true", dest="as_json", help="for programs")
    log.add_argument(
        "--follow",
        action="store_true",
        dest="follow_it",
        help="stay until the job ends; Ctrl-C detaches",
    )
    log.add_argument("--rank", type=typed(whole_number), metavar="N", help="only this rank's lines")


def status(job_id: str, folder: Path | None = None, as_json: bool = False) -> None:
    """Show a job's state: each component's nodes, reason, exit status and restarts."""
    job = Job.find(job_id, folder)
    state = job.state()
    if not as_json:
        print(status_text(job, state), end="")
        return
    run = job.run
    kept = (
        {"run_folder": str(run.folder), "backend": run.backend, "repeat": run.repeat_line}
        if run
        else {}
    )
    print(
        json.dumps(
            {**state.as_dict(), "log": (run.log if run else None) or state.log, **kept}, indent=1
        )
    )


def logs(
    job_id: str, follow_it: bool = False, rank: int | None = None, folder: Path | None = None
) -> None:
    """Print a job's log."""
    job = Job.find(job_id, folder)
    keep = _rank_filter(job, rank)
    if follow_it:
        raise SystemExit(follow(job, sys.stdout, keep))
    path = Path(job.run.log) if job.run and job.run.log else job.log(job.state())
    if not path.exists():
        raise JobError(f"{path}: no such file; {_why_no_log(job)}")
    for line in GrowingLog(path).new_lines(ended=True):
        if keep(line):
            print(line)


def _why_no_log(job: Job) -> str:
    state = job.state()
    if state.state in WAITING_STATES:
        return f"job {job.id} has not begun: {state.describe()}"
    return f"job {job.id} is {state.describe()}"


def _rank_filter(job: Job, rank: int | None) -> Callable[[str], bool]:
    if rank is None:
        return lambda line: True
    if job.run is None:
        return RankFilter(rank)
    plan = job.run.plan
    if rank >= plan["world_size"]:
        raise JobError(f"--rank {rank}: job {job.id} has the ranks 0 to {plan['world_size'] - 1}")
    if "torchrun" in (job.run.backend, plan["launcher"]):
        node = plan["ranks"][rank]["node"]
        raise JobError(
            f"--rank {rank}: torchrun writes the lines of all ranks of a node, here {node}, under one label"
        )
    return RankFilter(rank)


def cancel(job_id: str, folder: Path | None = None) -> None:
    """End a job: all of its components."""
    job = Job.find(job_id, folder)
    state = job.state()
    if state.is_final:
        raise JobError(f"job {job.id} does not run: it is {state.describe()}")
    if job.is_of_slurm:
        answer = ask(["scancel", job.id])
        if answer.status:
            raise JobError(f"job {job.id} cannot be cancelled: {answer.err or 'no reason given'}")
    else:
        assert job.run is not None
        _end_launcher(job.run)
    say(f"job {job.id}: asked to end; ddp-slurm status {job.id} shows it")


def _end_launcher(run: Run) -> None:
    """SIGTERM to the launcher, which stops its ranks. The handle keeps the pid from meaning another process."""
    state = foreground_state(run)
    if state.state != "RUNNING":
        raise JobError(f"job {run.job_id} cannot be ended from here: it is {state.describe()}")
    try:
        handle = os.pidfd_open((run.process or {})["pid"])
        try:
            if launcher_is_alive(run):
                signal.pidfd_send_signal(handle, signal.SIGTERM)
        finally:
            os.close(handle)
    except ProcessLookupError:
        return  # it ended by itself just now
    except PermissionError:
        raise JobError(
            f"job {run.job_id} cannot be ended from here: its launcher is another user's process"
        ) from None
