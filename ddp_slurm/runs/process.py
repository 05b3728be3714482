"""The launcher of a run that stays in the terminal, as a process of the machine it runs on."""

import os
import signal
from pathlib import Path

from ddp_slurm.runs.run_folder import STOPPED_BY_A_SIGNAL, JobError, Run
from ddp_slurm.slurm_client.sources import parse_exit_marker
from ddp_slurm.slurm_client.states import UNKNOWN, ComponentState, JobState


def process_start(pid: int) -> int | None:
    """When a process began, in clock ticks after boot (proc(5), stat); None without such a process.

    A pid is used again, a pid with its start is not.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def launcher_is_alive(run: Run) -> bool:
    process = run.process or {}
    return "pid" in process and process_start(process["pid"]) == int(process["started"])


def foreground_state(run: Run) -> JobState:
    """The state of a run of the local or torchrun backend."""
    host = str((run.process or {}).get("host", ""))
    marker = parse_exit_marker(run.exit_marker() or "")
    if marker is not None:
        is_cancelled = marker.exit_status in STOPPED_BY_A_SIGNAL
        state = "CANCELLED" if is_cancelled else marker.state
        component = ComponentState(run.job_id, state, host, exit_status=marker.exit_status)
        return JobState(run.job_id, state, "exit marker", (component,), log=run.log)
    if host != os.uname().nodename:
        note = f"it was started on {host}: ask there"
        return JobState(run.job_id, UNKNOWN, "none", note=note, log=run.log)
    if launcher_is_alive(run):
        component = ComponentState(run.job_id, "RUNNING", host)
        return JobState(run.job_id, "RUNNING", "process", (component,), log=run.log)
    note = "its launcher ended without an exit marker: it was killed, or the machine went down"
    component = ComponentState(run.job_id, "FAILED", host)
    return JobState(run.job_id, "FAILED", "process", (component,), note, run.log)


def end_launcher(run: Run) -> None:
    """Send SIGTERM to the launcher, which stops its ranks. Raises JobError.

    The handle of the process keeps the pid from meaning another process.
    """
    state = foreground_state(run)
    if state.state != "RUNNING":
        raise JobError(
            f"job {run.job_id} cannot be ended from here; its state is {state.describe()}"
        )
    try:
        handle = os.pidfd_open((run.process or {})["pid"])
    except ProcessLookupError:
        return  # it ended just now
    try:
        if launcher_is_alive(run):
            signal.pidfd_send_signal(handle, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError:
        raise JobError(
            f"job {run.job_id} cannot be ended from here: its launcher is another user's process"
        ) from None
    finally:
        os.close(handle)
