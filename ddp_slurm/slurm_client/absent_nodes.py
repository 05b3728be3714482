"""Nodes that a waiting job names and on which Slurm starts no job now.

Slurm reports PENDING (Resources), as for a job that waits for its turn. No other node can take the
place of one that the job names.
"""

from collections.abc import Sequence

from ddp_slurm.ask import Ask
from ddp_slurm.hostlist import compress_hostlist, expand_hostlist
from ddp_slurm.slurm_client.records import NodeRecord, read_nodes, unavailable_words
from ddp_slurm.slurm_client.states import (
    CANNOT_START,
    HELD,
    WAITING_STATES,
    WAITS_FOR_NODE,
    JobState,
)

PASSING = {"MAINT", "MAINTENANCE"}
"""States that end without anybody's help: a reservation for maintenance has an end, and Slurm's own
reason names it."""
MOST_NAMES = 3


def look_at_nodes(jobs: Sequence[JobState], ask: Ask) -> list[JobState]:
    """The jobs; those that wait for an unavailable node become WAITS_FOR_NODE, with a note.

    Slurm is asked once, and only where a job waits.
    """
    awaited = [_awaited_nodes(job) for job in jobs]
    names = sorted(set().union(*awaited))
    if not names:
        return list(jobs)
    answer = ask(["scontrol", "--all", "show", "node", compress_hostlist(names)])
    nodes = read_nodes(answer.out)
    absent = {node.name: node for node in nodes if unavailable_words(node.state) - PASSING}
    return [
        _waiting(job, [absent[name] for name in names if name in absent])
        for job, names in zip(jobs, awaited, strict=True)
    ]


def _awaited_nodes(job: JobState) -> list[str]:
    if job.state in (CANNOT_START, HELD):
        return []  # what is known already comes first
    lists = [part.requested_nodes for part in job.components if part.state in WAITING_STATES]
    return [node for nodes in lists if nodes for node in expand_hostlist(nodes)]


def _waiting(job: JobState, absent: Sequence[NodeRecord]) -> JobState:
    if not absent:
        return job
    described = [_described(node) for node in absent[:MOST_NAMES]]
    if len(absent) > MOST_NAMES:
        described.append(f"{len(absent) - MOST_NAMES} more nodes are unavailable")
    note = f"{', '.join(described)}; the job starts when it can use all its nodes"
    holding = [part.job_id for part in job.components if part.state == "RUNNING"]
    if holding:
        note += f", and until then {', '.join(holding)} keep theirs"
    note += f"; to go on without: ddp-slurm cancel {job.job_id}, and submit it again with --shrink"
    return job._replace(state=WAITS_FOR_NODE, note=note)


def _described(node: NodeRecord) -> str:
    text = f"node {node.name} is {node.state}"
    if node.reason_since:
        text += f" since {node.reason_since}"
    return f"{text} ({node.reason})" if node.reason else text
