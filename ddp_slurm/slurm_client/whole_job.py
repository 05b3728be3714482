"""The state of a whole job by its components, and what keeps a waiting one from starting.

Slurm reports PENDING for a job that will never start, too. The reasons are those of squeue(1), JOB
REASON CODES.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from ddp_slurm.slurm_client.states import (
    CANNOT_START,
    FINAL_STATES,
    HELD,
    WAITING_STATES,
    ComponentState,
    JobState,
)


def job_of(
    job_id: str,
    components: Sequence[ComponentState],
    source: str,
    log: str | None = None,
    purged: Sequence[str] = (),
) -> JobState:
    """The job that these components make, in any order.

    Args:
        purged: components that have ended and that Slurm no longer lists.
    """
    in_order = tuple(sorted(components, key=lambda component: component.offset))
    state, note = find_obstacle(job_id, in_order, purged) or (overall_state(in_order), "")
    return JobState(job_id, state, source, in_order, note, log)


def overall_state(in_order: Sequence[ComponentState]) -> str:
    """The job's state: it has ended when all its components have, and failed when one has.

    Component 0 runs the job script, so its state is the first to count.
    """
    unfinished = [c.state for c in in_order if c.state not in FINAL_STATES]
    if unfinished:
        return unfinished[0]
    return next((c.state for c in in_order if c.state != "COMPLETED"), "COMPLETED")


class Obstacle(NamedTuple):
    """``state`` is CANNOT_START or HELD; ``note`` has the cause and the remedy."""

    state: str
    note: str


_NEVER = (
    ("DependencyNeverSatisfied", "a job that it depends on has failed; submit again without it"),
    ("BadConstraints", "no node has what it asks for; submit with other constraints or sizes"),
    (
        "PartitionNodeLimit",
        "more nodes than the partition's MaxNodes, or nodes that are down; "
        "submit with other nodes or to another partition",
    ),
    (
        "PartitionTimeLimit",
        "its time is longer than the partition's MaxTime; submit with a shorter --time",
    ),
    (
        "PartitionConfig",
        "the partition does not allow such a job; submit to another partition",
    ),
    ("ReservationDeleted", "its reservation was deleted; submit without it"),
    ("DeadLine", "it cannot end before its deadline; submit with a later one"),
    ("Invalid(Account|QOS)", "the account or QOS is not valid; submit with another one"),
    ("(QOS|Account)NotAllowed", "the partition does not allow its account or QOS"),
    (
        "MaxMemPerLimit|(QOS|Assoc)(Max|Min)\\w*(PerJob(Limit)?|PerNode)|QOSMin\\w+",
        "it is outside a limit that holds for each job; submit with another size",
    ),
)
_HELD = (
    ("JobHeldUser", "held by its user"),
    ("JobHeldAdmin", "held by an administrator"),
    ("JobHoldMaxRequeue", "requeued too often (MaxBatchRequeue), and held"),
    ("launch.failed.requeued.held", "could not be launched, and is held: see the log of slurmd"),
    (".*requeued.*held.*", "requeued, and held"),
)
_HOLD_STATES = {"REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}


def find_obstacle(
    job_id: str, components: Sequence[ComponentState], purged: Sequence[str] = ()
) -> Obstacle | None:
    """What keeps a waiting job from starting; None for one that runs, has ended, or may start."""
    waiting = [c for c in components if c.state in WAITING_STATES]
    ended = [c for c in components if c.state in FINAL_STATES]
    if not waiting or len(waiting) + len(ended) < len(components):
        return None
    if ended or purged:
        parts = [f"{c.job_id} is {c.state}" for c in ended] + [f"{p} has ended" for p in purged]
        note = (
            f"{', '.join(parts)}, and the others wait for it; scontrol requeue {job_id} starts "
            f"all components again, ddp-slurm cancel {job_id} ends them"
        )
        return Obstacle(CANNOT_START, note)
    return _of_reasons(job_id, waiting)


def _of_reasons(job_id: str, waiting: Sequence[ComponentState]) -> Obstacle | None:
    for component in waiting:
        cause = _matching(_NEVER, component.reason)
        if cause:
            return Obstacle(CANNOT_START, f"{cause} (ddp-slurm cancel {job_id} ends this one)")
    for component in waiting:
        cause = _matching(_HELD, component.reason)
        if cause is None and component.state in _HOLD_STATES:
            cause = "held"
        if cause:
            return Obstacle(HELD, f"{cause}; scontrol release {job_id} lets it start")
    return None


def _matching(table: Sequence[tuple[str, str]], reason: str) -> str | None:
    return next((cause for pattern, cause in table if re.fullmatch(pattern, reason)), None)
