"""The sources that know a job's state, in the order in which they are asked.

``scontrol show job`` knows jobs that wait, run, or ended a few minutes ago (MinJobAge). After that
it is sacct, where there is a slurmdbd, and what the job left in its run folder.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from ddp_slurm.ask import Answer, Ask
from ddp_slurm.slurm_client.absent_nodes import look_at_nodes
from ddp_slurm.slurm_client.commands import ask_slurm
from ddp_slurm.slurm_client.records import Record, number, read_records
from ddp_slurm.slurm_client.states import ENDED, UNKNOWN, ComponentState, JobState
from ddp_slurm.slurm_client.whole_job import job_of

SQUEUE_FORMAT = "%i|%T|%N|%n|%r"
SACCT_FIELDS = "JobID,State,ExitCode,NodeList"
SLURM_ID = re.compile(r"[0-9]+(\+[0-9]+)?")
"""A job's id, or that of a component, such as ``48+1``."""
KNOWN_SECONDS = 5
"""The limit of a question to Slurm about a job whose run folder has the answer, too."""


class Traces(Protocol):
    """What a job left in its run folder."""

    def exit_marker(self) -> str | None:
        """The text that the job script wrote at its end."""

    def last_look(self) -> JobState | None:
        """The final state that Slurm reported before."""

    def has_begun(self) -> bool:
        """Whether the job script began, and could write into the run folder."""

    def may_log_to(self, path: str | None) -> bool:
        """Whether the job may have this log: a later job can have the same number."""


class Shown(NamedTuple):
    """What Slurm reported of a job that it still knows; None where it does not."""

    job_id: str
    state: JobState | None
    answer: Answer

    @property
    def is_unknown(self) -> bool:
        """Slurm responded that it has no such job, which is not the same as no response."""
        return "Invalid job id" in self.answer.text


def leader_of(job_id: str) -> str:
    """``48`` of the component ``48+1``."""
    return job_id.partition("+")[0]


def read_state(job_id: str, traces: Traces | None = None, ask: Ask | None = None) -> JobState:
    """The state of a job from the first source that knows it; UNKNOWN where none does."""
    return conclude(show_job(job_id, traces, ask), traces, ask or ask_slurm)


def show_job(job_id: str, traces: Traces | None = None, ask: Ask | None = None) -> Shown:
    """Ask slurmctld; only for a short time where ``traces`` hold the job's end."""
    if ask is None:
        ask = ask_slurm if traces is None or _left(job_id, traces) is None else ask_shortly
    shown = _show(job_id, ask)
    if shown.state and shown.state.job_id != job_id:  # the id of a later component
        return _show(shown.state.job_id, ask)
    return shown


def ask_shortly(argv: Sequence[str]) -> Answer:
    """``ask_slurm`` where the answer is hardly needed."""
    return ask_slurm(argv, timeout_seconds=KNOWN_SECONDS)


def _show(job_id: str, ask: Ask) -> Shown:
    answer = ask(["scontrol", "show", "job", job_id])
    return Shown(job_id, parse_scontrol(answer.out) if answer.status == 0 else None, answer)


def conclude(shown: Shown, traces: Traces | None = None, ask: Ask = ask_slurm) -> JobState:
    """The state of a job by what slurmctld reported of it, else by the other sources."""
    job_id, state = shown.job_id, shown.state
    is_this_job = traces is None or state is None or traces.may_log_to(state.log)
    if state is not None and is_this_job:
        return look_at_nodes([state], ask)[0]
    left = _left(job_id, traces) if traces else None
    if left and not shown.is_unknown:
        return left
    note = shown.answer.text or "Slurm reports nothing about it"
    return _accounted(job_id, ask) or left or JobState(job_id, UNKNOWN, "none", note=note)


def _left(job_id: str, traces: Traces) -> JobState | None:
    seen = traces.last_look()
    if seen is not None:
        return seen._replace(source="last look")
    return by_exit_marker(job_id, traces.exit_marker() or "")


def by_exit_marker(job_id: str, text: str) -> JobState | None:
    """The final state that the text of an exit marker shows, None for any other text."""
    marker = parse_exit_marker(text)
    if marker is None:
        return None
    return JobState(job_id, marker.state, "exit marker", (marker._replace(job_id=job_id),))


def _accounted(job_id: str, ask: Ask) -> JobState | None:
    options = ["--allocations", "--noheader", "--parsable2"]
    answer = ask(["sacct", *options, f"--jobs={job_id}", f"--format={SACCT_FIELDS}"])
    components = parse_sacct(answer.out) if answer.status == 0 else []
    return job_of(leader_of(job_id), components, "sacct") if components else None


def settle(state: JobState, traces: Traces | None = None) -> JobState:
    """For a job that was submitted: one that Slurm has forgotten has ended.

    It has failed where its script began and did not reach its exit marker: it was killed with
    SIGKILL, or its node died. Else how it ended is not known.
    """
    if state.state != UNKNOWN or "Invalid job id" not in state.note:
        return state
    if traces is not None and traces.has_begun():
        note = (
            "Slurm no longer knows the job, and it left no exit marker: it was killed, or its "
            "first node died"
        )
        return state._replace(state="FAILED", note=note)
    note = (
        "Slurm no longer knows the job, and how it ended is not known: it never began, or its "
        "nodes could not write into its run folder; see its log"
    )
    return state._replace(state=ENDED, note=note)


def active_states(job_ids: Iterable[str], ask: Ask = ask_slurm) -> dict[str, JobState]:
    """The jobs of these that have not ended, by one call of squeue for all, and one of scontrol
    for the nodes that they wait for.

    Of a heterogeneous job also the components that have ended: the others may wait for them.
    """
    jobs_option = f"--jobs={','.join(job_ids)}"
    options = ["--noheader", "--states=all", jobs_option, f"--format={SQUEUE_FORMAT}"]
    answer = ask(["squeue", *options])
    jobs = parse_squeue(answer.out) if answer.status == 0 else {}
    states = [job_of(leader, components, "squeue") for leader, components in jobs.items()]
    active = [state for state in states if not state.is_final]
    return {state.job_id: state for state in look_at_nodes(active, ask)}


def parse_scontrol(text: str) -> JobState | None:
    """The job of ``scontrol show job``; None where the text has no job record."""
    records = [record for record in read_records(text, "JobId") if _is_job(record)]
    if not records:
        return None
    components = [_component(record) for record in records]
    leader = leader_of(components[0].job_id)
    log = next((record["StdOut"] for record in records if "StdOut" in record), None)
    return job_of(leader, components, "scontrol", log, _purged(leader, records))


def _is_job(record: Record) -> bool:
    numbers = [record.get(key, "0") for key in ("JobId", "HetJobId", "HetJobOffset")]
    return "JobState" in record and all(re.fullmatch("[0-9]{1,10}", text) for text in numbers)


def _purged(leader: str, records: Sequence[Record]) -> list[str]:
    """The components that Slurm no longer lists, by the ids in ``HetJobIdSet=48-50``."""
    job_ids = records[0].get("HetJobIdSet", "")
    if len(records) == 1 and records[0]["JobId"] != leader:
        return []  # asked for one later component
    listed = {record["JobId"] for record in records}
    missing = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", job_ids):
        for job_id in range(int(first), int(last or first) + 1):
            if str(job_id) not in listed:
                missing.append(f"{leader}+{job_id - int(leader)}")
    return missing


def _component(record: Record) -> ComponentState:
    status, signal = _exit_code(record.get("ExitCode", ""))
    job_id = record["JobId"]
    if "HetJobId" in record:
        job_id = f"{record['HetJobId']}+{record.get('HetJobOffset', '0')}"
    return ComponentState(
        job_id=job_id,
        state=record["JobState"],
        nodes=record.get("NodeList", ""),
        reason=_reason(record.get("Reason", "")),
        exit_status=status,
        signal=signal,
        restarts=number(record, "Restarts"),
        requested_nodes=record.get("ReqNodeList", ""),
    )


def _exit_code(text: str) -> tuple[int | None, int]:
    """Exit status and signal of ``3:0``."""
    match = re.fullmatch("([0-9]+):([0-9]+)", text)
    return (int(match[1]), int(match[2])) if match else (None, 0)


def _reason(text: str) -> str:
    return "" if text in ("None", "(null)") else text


def parse_squeue(text: str) -> dict[str, list[ComponentState]]:
    """Components by leader, from ``squeue --noheader --format='%i|%T|%N|%n|%r'``."""
    jobs: dict[str, list[ComponentState]] = {}
    for line in text.splitlines():
        fields = line.split("|", 4)
        if len(fields) != 5 or not SLURM_ID.fullmatch(fields[0]):
            continue  # an element of an array, or a warning of a site's wrapper
        job_id, state, nodes, requested, reason = fields
        component = ComponentState(job_id, state, nodes, _reason(reason), requested_nodes=requested)
        jobs.setdefault(leader_of(job_id), []).append(component)
    return jobs


def parse_sacct(text: str) -> list[ComponentState]:
    """Components from ``sacct -X --noheader --parsable2 --format=JobID,State,ExitCode,NodeList``.

    A requeued job has several records; its last one comes last.
    """
    components: dict[str, ComponentState] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) < 4 or not SLURM_ID.fullmatch(fields[0]):
            continue
        job_id, state, code, nodes = fields[:4]
        status, signal = _exit_code(code)
        components[job_id] = ComponentState(
            job_id=job_id,
            state=next(iter(state.split()), UNKNOWN),  # "CANCELLED by 1000"
            nodes="" if nodes == "None assigned" else nodes,
            exit_status=status,
            signal=signal,
        )
    return sorted(components.values(), key=lambda component: component.offset)


def parse_exit_marker(text: str) -> ComponentState | None:
    """What the job script wrote at its end: ``status=3``, ``terminated=no``, ``restarts=0``, ...

    None where there is no status. ``terminated=yes``: the script itself got SIGTERM, with which
    Slurm cancels a job and ends it at its time limit.
    """
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    status = values.get("status", "")
    if not re.fullmatch(r"[0-9]{1,3}", status):
        return None
    terminated = values.get("terminated") == "yes"
    failed = "CANCELLED" if terminated else "FAILED"
    return ComponentState(
        job_id="",
        state=failed if int(status) else "COMPLETED",
        reason="ended by SIGTERM: cancelled, or its time was up" if terminated else "",
        exit_status=int(status),
        restarts=number(values, "restarts"),
    )
