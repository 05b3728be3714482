"""``ddp-slurm status``, ``logs`` and ``cancel``."""

import json
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from ddp_slurm.console import Commands, Parser, add_command, say, show, table
from ddp_slurm.runs.fetched_log import FetchedLog, host_elsewhere
from ddp_slurm.runs.follow import all_lines, follow, open_log
from ddp_slurm.runs.job import Job, find_job
from ddp_slurm.runs.log import RankFilter
from ddp_slurm.runs.process import end_launcher
from ddp_slurm.runs.run_folder import JobError
from ddp_slurm.slurm_client.commands import ask_slurm
from ddp_slurm.slurm_client.states import FINAL_STATES, WAITS_FOR_NODE, ComponentState, JobState


def add_commands(commands: Commands) -> None:
    """status, logs and cancel."""
    of_status = _add_job_command(commands, "status", status)
    of_status.add_argument("--json", action="store_true", dest="as_json", help="for programs")
    of_logs = _add_job_command(commands, "logs", logs)
    of_logs.add_argument(
        "--follow",
        action="store_true",
        dest="follow_it",
        help="stay until the job ends; Ctrl-C detaches",
    )
    of_logs.add_argument("--rank", type=_rank, metavar="N", help="only this rank's lines")
    _add_job_command(commands, "cancel", cancel)


def _add_job_command(commands: Commands, name: str, function: Callable[..., None]) -> Parser:
    parser = add_command(commands, name, function)
    parser.add_argument("job_id", metavar="JOBID", help="the id that submit printed, such as 48")
    parser.add_argument(
        "--folder",
        type=Path,
        help="the folder of the job's log; default this one, and those in it",
    )
    return parser


def _rank(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ArgumentTypeError(f"{text!r} is not a whole number, such as 4")
    return int(text)


def status(job_id: str, folder: Path | None = None, as_json: bool = False) -> None:
    """Show a job's state: each component's nodes, reason, exit status and restarts."""
    job, state = find_job(job_id, folder)
    if as_json:
        print(json.dumps(_status_values(job, state), indent=1))
    else:
        show(status_text(job, state))


def status_text(job: Job, state: JobState) -> str:
    """A table of the components and what to do with the run."""
    rows: list[tuple[str, ...]] = [("JOB", "STATE", "NODES", "REASON", "EXIT", "RESTARTS")]
    for component in state.components or (ComponentState(job.id, state.state),):
        rows.append(_status_row(component))
    lines = [table(rows), f"job {job.id} is {state.describe()} (source: {state.source})"]
    run = job.run
    if run is not None:
        lines.append(f"submitted {run.submitted} by the {run.backend} backend: {run.what}")
        lines.append(f"log: {_log_place(job, state)}")
        lines.append(f"kept in: {run.folder}")
        if run.repeat:
            lines.append(f"repeat it: {run.repeat_line}")
        if run.repeat and state.state == WAITS_FOR_NODE:
            submit = f"{run.repeat_line} --shrink"
            lines.append(f"without the node: ddp-slurm cancel {job.id} && {submit}")
    elif state.log:
        lines.append(f"log: {_log_place(job, state)}")
    return "\n".join(lines)


def _log_place(job: Job, state: JobState) -> str:
    """Its path, behind ``HOST:`` where only that host has it."""
    path = (job.run.log if job.run else None) or state.log
    if path is None:
        return "not known"
    is_elsewhere = job.is_of_slurm and not state.is_waiting and not Path(path).exists()
    host = host_elsewhere(state, job.run) if is_elsewhere else None
    return f"{host}:{path}" if host else path


def _status_row(component: ComponentState) -> tuple[str, ...]:
    restarts = "-" if component.restarts is None else str(component.restarts)
    return (
        component.job_id,
        component.state,
        component.nodes or "-",
        component.reason or "-",
        _exit_text(component),
        restarts,
    )


def _exit_text(component: ComponentState) -> str:
    if component.state not in FINAL_STATES:
        return "-"  # of a requeued job Slurm still has its last end
    if component.signal:
        return f"signal {component.signal}"
    return "-" if component.exit_status is None else str(component.exit_status)


def _status_values(job: Job, state: JobState) -> dict[str, object]:
    values: dict[str, object] = state.as_dict()
    run = job.run
    if run is not None:
        values["log"] = run.log or state.log
        values["run_folder"] = str(run.folder)
        values["backend"] = run.backend
        values["repeat"] = run.repeat_line
    return values


def logs(
    job_id: str, follow_it: bool = False, rank: int | None = None, folder: Path | None = None
) -> None:
    """Print a job's log."""
    job, state = find_job(job_id, folder, needs_state=follow_it)
    select = all_lines if rank is None else _rank_filter(job, rank).lines
    if follow_it:
        raise SystemExit(follow(job, sys.stdout, select))
    log = open_log(job, state)
    if not log.path.exists() and not isinstance(log, FetchedLog):
        raise JobError(f"{log.path}: no such file; {_why_no_log(job, state)}")
    if isinstance(log, FetchedLog):
        log.fetch_now()
    for text in log.new_text(ended=True):
        sys.stdout.write(select(text))
    if isinstance(log, FetchedLog) and log.problem:
        raise JobError(f"{log.path}: {log.problem}; {_why_no_log(job, state)}")


def _why_no_log(job: Job, state: JobState) -> str:
    if state.is_waiting:
        return f"job {job.id} has not begun: {state.describe()}"
    return f"job {job.id} is {state.describe()}"


def _rank_filter(job: Job, rank: int) -> RankFilter:
    """Raises JobError for a rank that the job does not have, or whose lines have no label."""
    if job.run is None:
        return RankFilter(rank)
    plan = job.run.plan
    if rank >= plan["world_size"]:
        raise JobError(f"--rank {rank}: job {job.id} has the ranks 0 to {plan['world_size'] - 1}")
    if "torchrun" in (job.run.backend, plan["launcher"]):
        node = plan["ranks"][rank]["node"]
        raise JobError(
            f"--rank {rank}: torchrun writes the lines of all ranks of a node, here {node}, "
            "under one label"
        )
    return RankFilter(rank)


def cancel(job_id: str, folder: Path | None = None) -> None:
    """End a job: all of its components."""
    job, state = find_job(job_id, folder)
    if state.is_final:
        raise JobError(f"job {job.id} is not running; its state is {state.describe()}")
    if job.is_of_slurm:
        answer = ask_slurm(["scancel", job.id])
        if answer.status:
            raise JobError(
                f"job {job.id} cannot be cancelled: {answer.text or 'scancel gave no reason'}"
            )
    else:
        assert job.run is not None
        end_launcher(job.run)
    say(f"job {job.id} was asked to end; ddp-slurm status {job.id} shows its state")
