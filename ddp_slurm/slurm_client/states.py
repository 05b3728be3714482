"""The state of a job from what there is: squeue, ``scontrol show job``, sacct, the exit marker of its script.

A small lab has no accounting database, and slurmctld forgets a job minutes after its end (MinJobAge): each source
knows what the one before it does not. The parsers are pure; ``ask`` is the one function that runs a command.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.slurm_client.commands import clean_environ

FINAL_STATES = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""After these nothing follows. Slurm's own words (squeue(1), JOB STATE CODES); PREEMPTED only where it is not requeued:
a job that is goes to PENDING at once."""
WAITING_STATES = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
UNKNOWN = "UNKNOWN"

ASK_SECONDS = 90
"""A client gives up by itself after some ten seconds a controller; this is for one that hangs on a dead file system."""
SILENCE_SECONDS = 600
"""So long a waiting program bears that Slurm does not answer: slurmctld may be restarted or moved meanwhile."""
SQUEUE_FORMAT = "%i|%T|%N|%r"
SACCT_FIELDS = "JobID,State,ExitCode,NodeList"


class StateError(DdpSlurmError):
    """The state of a job cannot be found out."""

    exit_status = 1


class Answer(NamedTuple):
    """What a command said."""

    status: int
    out: str
    err: str


Ask = Callable[[Sequence[str]], Answer]


def ask(argv: Sequence[str]) -> Answer:
    """Run a client of Slurm. One that is missing or hangs is an answer too, with status 127 or 124."""
    environ = {
        k: v
        for k, v in clean_environ(os.environ).items()
        if not re.match(r"(SQUEUE|SACCT|SCONTROL)_", k)
    }
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=environ,
            timeout=ASK_SECONDS,
        )
    except OSError as fault:
        return Answer(127, "", f"{argv[0]}: {fault.strerror}")
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"{argv[0]} has not answered for {ASK_SECONDS} s")
    return Answer(done.returncode, done.stdout, done.stderr.strip())


@dataclass(frozen=True, slots=True)
class ComponentState:
    """One component of a heterogeneous job, or a plain job."""

    job_id: str
    """``48+0`` in a heterogeneous job, ``48`` in a plain one."""
    state: str
    nodes: str = ""
    """A host list; empty while nothing is allocated."""
    reason: str = ""
    """Why it waits or how it ended, in Slurm's words."""
    exit_status: int | None = None
    """Of the job script; None where it is not known."""
    signal: int = 0
    """The signal that ended the job script, 0 for none."""
    restarts: int | None = None


@dataclass(frozen=True, slots=True)
class JobState:
    """A job as a whole and its components."""

    job_id: str
    state: str
    """One of Slurm's state words, or UNKNOWN."""
    source: str
    """Which of the sources knew it."""
    components: tuple[ComponentState, ...] = ()
    note: str = ""
    """What a person should know besides."""
    log: str | None = None
    """The path of the log file, where Slurm told it."""

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES

    @property
    def exit_status(self) -> int | None:
        """Of the job script, 128 + signal where it was killed; None where it is not known."""
        for component in self.components[:1]:
            if component.signal:
                return 128 + component.signal
            return component.exit_status
        return None

    @property
    def reasons(self) -> str:
        """The reasons of all components, each once."""
        return ", ".join(dict.fromkeys(c.reason for c in self.components if c.reason))

    def describe(self) -> str:
        """``FAILED (exit status 3, NonZeroExitCode)``."""
        status = (
            f"exit status {self.exit_status}"
            if self.is_final and self.exit_status is not None
            else ""
        )
        words = ", ".join(word for word in (status, self.reasons, self.note) if word)
        return f"{self.state} ({words})" if words else self.state

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "exit_status": self.exit_status}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "JobState":
        """The inverse of ``as_dict``. Raises KeyError or TypeError for anything else."""
        components = tuple(ComponentState(**component) for component in values["components"])
        return cls(
            values["job_id"],
            values["state"],
            values["source"],
            components,
            values["note"],
            values["log"],
        )


def leader_of(job_id: str) -> str:
    """``48`` of the component ``48+1``."""
    return job_id.partition("+")[0]


def _offset(component: ComponentState) -> int:
    return int(component.job_id.partition("+")[2] or 0)


def overall_state(components: Sequence[ComponentState]) -> str:
    """The job's state from its components': it has ended when all have, and it has failed when one has.

    Component 0 runs the job script, so its word counts first.
    """
    in_order = sorted(components, key=_offset)
    running = [c.state for c in in_order if c.state not in FINAL_STATES]
    if running:
        return running[0]
    return next((c.state for c in in_order if c.state != "COMPLETED"), "COMPLETED")


def parse_squeue(text: str) -> dict[str, list[ComponentState]]:
    """Components by leader, from ``squeue --noheader --format='%i|%T|%N|%r'``."""
    jobs: dict[str, list[ComponentState]] = {}
    for line in text.splitlines():
        job_id, *rest = line.split("|", 3)
        if len(rest) != 3 or not re.fullmatch(r"[0-9]+(\+[0-9]+)?", job_id):
            continue  # an array's element, or a warning of a site's wrapper
        state, nodes, reason = rest
        component = ComponentState(job_id, state, nodes, _reason(reason))
        jobs.setdefault(leader_of(job_id), []).append(component)
    return jobs


def _reason(text: str) -> str:
    return "" if text in ("None", "(null)") else text


def parse_scontrol(text: str) -> tuple[list[ComponentState], str | None]:
    """Components and the log's path from ``scontrol --oneliner show job``, in the order of the components."""
    components, log = [], None
    for line in text.splitlines():
        head = re.match(r"JobId=([0-9]+) (?:HetJobId=([0-9]+) HetJobOffset=([0-9]+) )?", line)
        state = re.search(r" JobState=([A-Z_]+) Reason=(.*?) (?:FailedNode=\S* )?Dependency=", line)
        code = re.search(r" Restarts=([0-9]+) .*? ExitCode=([0-9]+):([0-9]+) ", line)
        if not (head and state and code):
            continue
        job_id, leader, offset = head.groups()
        # " NodeList=", not "ReqNodeList="
        nodes = re.search(r" NodeList=(\S*)", line)
        components.append(
            ComponentState(
                job_id=f"{leader}+{offset}" if leader else job_id,
                state=state[1],
                nodes=nodes[1].replace("(null)", "") if nodes else "",
                reason=_reason(state[2]),
                exit_status=int(code[2]),
                signal=int(code[3]),
                restarts=int(code[1]),
            )
        )
        path = re.search(r" StdOut=(.*?)(?: [A-Z]\w*=|\s*$)", line)
        log = log or (path[1] if path else None)
    return sorted(components, key=_offset), log


def parse_sacct(text: str) -> list[ComponentState]:
    """Components from ``sacct -X --noheader --parsable2 --format=JobID,State,ExitCode,NodeList``."""
    components: dict[str, ComponentState] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) < 4 or not re.fullmatch(r"[0-9]+(\+[0-9]+)?", fields[0]):
            continue
        code = re.fullmatch(r"([0-9]+):([0-9]+)", fields[2])
        components[fields[0]] = ComponentState(  # a requeued job's last record comes last
            job_id=fields[0],
            state=fields[1].split()[0] if fields[1] else UNKNOWN,  # "CANCELLED by 1000"
            nodes="" if fields[3] == "None assigned" else fields[3],
            exit_status=int(code[1]) if code else None,
            signal=int(code[2]) if code else 0,
        )
    return sorted(components.values(), key=_offset)


def parse_exit_marker(text: str) -> ComponentState | None:
    """What the job script left: lines ``status=3``, ``terminated=no``, ``restarts=0``; None where that is not there.

    ``terminated=yes``: the script itself got SIGTERM, with which Slurm cancels a job and ends it at its time limit.
    """
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    status, restarts = values.get("status", ""), values.get("restarts", "")
    if not re.fullmatch(r"[0-9]{1,3}", status):
        return None
    code, terminated = int(status), values.get("terminated") == "yes"
    state = "COMPLETED" if code == 0 else "CANCELLED" if terminated else "FAILED"
    return ComponentState(
        job_id="",
        state=state,
        reason="ended by SIGTERM: cancelled, or its time was up" if terminated else "",
        exit_status=code,
        restarts=int(restarts) if restarts.isdigit() else None,
    )


def active_states(job_ids: Iterable[str], ask: Ask = ask) -> dict[str, JobState]:
    """The jobs that squeue lists, which are those that have not ended; one call for all of them."""
    return _active_states(job_ids, ask)[0]


def _active_states(job_ids: Iterable[str], ask: Ask) -> tuple[dict[str, JobState], Answer]:
    answer = ask(
        ["squeue", "--noheader", f"--jobs={','.join(job_ids)}", f"--format={SQUEUE_FORMAT}"]
    )
    jobs = parse_squeue(answer.out) if answer.status == 0 else {}
    return {
        leader: _job(leader, components, "squeue") for leader, components in jobs.items()
    }, answer


def _job(
    leader: str, components: Sequence[ComponentState], source: str, log: str | None = None
) -> JobState:
    in_order = tuple(sorted(components, key=_offset))
    return JobState(leader, overall_state(in_order), source, in_order, log=log)


def read_state(
    job_id: str,
    exit_marker: Callable[[], str | None] = lambda: None,
    last_look: Callable[[], JobState | None] = lambda: None,
    ask: Ask = ask,
) -> JobState:
    """The state of a job, from the first of the sources that knows it.

    ``exit_marker`` gives the text of the marker in the run folder, ``last_look`` the final state that was seen before;
    both are asked only where Slurm itself has forgotten the job or does not answer. A job that nobody knows is
    UNKNOWN, with Slurm's words as its note.
    """
    active, answer = _active_states([job_id], ask)
    if answer.status and not _says_unknown(answer):
        # slurmctld is down or gone: scontrol would only wait for it once more
        return (
            _left_behind(job_id, exit_marker, last_look)
            or _accounted(job_id, ask)
            or _unknown(job_id, answer)
        )
    answer = _shown(job_id, ask)
    details, log = parse_scontrol(answer.out) if answer.status == 0 else ([], None)
    if active:
        state = next(iter(active.values()))
        return _job(state.job_id, _merged(state.components, details), "squeue", log)
    if details:
        return _job(leader_of(details[0].job_id), details, "scontrol", log)
    return (
        _accounted(job_id, ask)
        or _left_behind(job_id, exit_marker, last_look)
        or _unknown(job_id, answer)
    )


def told_log(job_id: str, ask: Ask = ask) -> str | None:
    """The path of a job's log, None where Slurm does not know the job."""
    return parse_scontrol(_shown(job_id, ask).out)[1]


def _shown(job_id: str, ask: Ask) -> Answer:
    return ask(["scontrol", "--oneliner", "show", "job", job_id])


def _says_unknown(answer: Answer) -> bool:
    return "Invalid job id" in answer.err


def _accounted(job_id: str, ask: Ask) -> JobState | None:
    argv = [
        "sacct",
        "--allocations",
        "--noheader",
        "--parsable2",
        f"--jobs={job_id}",
        f"--format={SACCT_FIELDS}",
    ]
    answer = ask(argv)
    records = parse_sacct(answer.out) if answer.status == 0 else []
    return _job(leader_of(job_id), records, "sacct") if records else None


def _left_behind(
    job_id: str, exit_marker: Callable[[], str | None], last_look: Callable[[], JobState | None]
) -> JobState | None:
    if (seen := last_look()) is not None:
        return replace(seen, source="last look")
    marker = parse_exit_marker(exit_marker() or "")
    if marker is None:
        return None
    return JobState(job_id, marker.state, "exit marker", (replace(marker, job_id=job_id),))


def _unknown(job_id: str, answer: Answer) -> JobState:
    return JobState(job_id, UNKNOWN, "nobody", note=answer.err or "Slurm says nothing of it")


def _merged(
    listed: Iterable[ComponentState], details: Iterable[ComponentState]
) -> list[ComponentState]:
    """squeue's components with what only scontrol says, and those that squeue lists no more since they have ended."""
    merged = {component.job_id: component for component in details}
    for component in listed:
        known = merged.get(component.job_id, component)
        merged[component.job_id] = replace(
            component, exit_status=known.exit_status, signal=known.signal, restarts=known.restarts
        )
    return list(merged.values())


def is_forgotten(state: JobState) -> bool:
    """Slurm answered that it has no such job, which is not the same as no answer."""
    return state.state == UNKNOWN and "Invalid job id" in state.note


def settle(state: JobState) -> JobState:
    """For a job that was submitted: when Slurm has forgotten it and nothing tells its end, it has failed.

    Its script did not get as far as the exit marker: it was killed with SIGKILL, its node died, or it never began.
    """
    if not is_forgotten(state):
        return state
    note = (
        "Slurm no longer knows the job and it left no exit marker: killed, or its first node died"
    )
    return replace(state, state="FAILED", note=note)


class Patience:
    """How long Slurm has not answered a program that waits for a job."""

    def __init__(
        self, limit_seconds: float = SILENCE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_seconds, self._clock = limit_seconds, clock
        self._since: float | None = None

    def check(self, state: JobState) -> None:
        """Raises StateError when a job has been UNKNOWN for too long; the job itself is left alone."""
        if state.state != UNKNOWN:
            self._since = None
            return
        self._since = self._clock() if self._since is None else self._since
        if self._clock() - self._since > self._limit_seconds:
            raise StateError(
                f"job {state.job_id}: Slurm has not answered for {self._limit_seconds:.0f} s ({state.note}); the job "
                f"may still run: ask again with ddp-slurm status {state.job_id}"
            )
