"""The state of a job and of its components, whatever source knew it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddp_slurm.errors import DdpSlurmError

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
"""States that are not left again (squeue(1), JOB STATE CODES). PREEMPTED only of a job that is not
requeued: one that is goes to PENDING at once."""
WAITING_STATES = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
UNKNOWN = "UNKNOWN"
SILENCE_SECONDS = 600
"""How long a program that waits for a job bears that Slurm does not respond: slurmctld may be
restarted or moved meanwhile."""


class StateError(DdpSlurmError):
    """The state of a job cannot be found out."""

    exit_status = 1


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

    @property
    def offset(self) -> int:
        """The number of the component, 0 in a plain job."""
        return int(self.job_id.partition("+")[2] or 0)


@dataclass(frozen=True, slots=True)
class JobState:
    """A job as a whole and its components."""

    job_id: str
    state: str
    """One of Slurm's states, or UNKNOWN."""
    source: str
    """Which of the sources knew it."""
    components: tuple[ComponentState, ...] = ()
    note: str = ""
    """What else a person should know."""
    log: str | None = None
    """The path of the log file, where Slurm reported it."""

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES

    @property
    def exit_status(self) -> int | None:
        """Of the job script, 128 + signal where it was killed; None where it is not known."""
        if not self.components:
            return None
        leader = self.components[0]
        return 128 + leader.signal if leader.signal else leader.exit_status

    @property
    def reasons(self) -> str:
        """The reasons of all components, each once."""
        reasons = dict.fromkeys(component.reason for component in self.components)
        return ", ".join(reason for reason in reasons if reason)

    def describe(self) -> str:
        """``FAILED (exit status 3, NonZeroExitCode)``."""
        details = [self.reasons, self.note]
        if self.is_final and self.exit_status is not None:
            details.insert(0, f"exit status {self.exit_status}")
        text = ", ".join(detail for detail in details if detail)
        return f"{self.state} ({text})" if text else self.state

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "exit_status": self.exit_status}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "JobState":
        """The inverse of ``as_dict``. Raises KeyError or TypeError for anything else."""
        return cls(
            job_id=values["job_id"],
            state=values["state"],
            source=values["source"],
            components=tuple(ComponentState(**component) for component in values["components"]),
            note=values["note"],
            log=values["log"],
        )


def job_of(
    job_id: str, components: Sequence[ComponentState], source: str, log: str | None = None
) -> JobState:
    """The job that these components make, in any order."""
    in_order = tuple(sorted(components, key=lambda component: component.offset))
    return JobState(job_id, overall_state(in_order), source, in_order, log=log)


def overall_state(in_order: Sequence[ComponentState]) -> str:
    """The job's state: it has ended when all its components have, and failed when one has.

    Component 0 runs the job script, so its state is the first to count.
    """
    unfinished = [c.state for c in in_order if c.state not in FINAL_STATES]
    if unfinished:
        return unfinished[0]
    return next((c.state for c in in_order if c.state != "COMPLETED"), "COMPLETED")


class Patience:
    """How long Slurm has not responded to a program that waits for a job."""

    def __init__(
        self, limit_seconds: float = SILENCE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_seconds = limit_seconds
        self._clock = clock
        self._since: float | None = None

    def check(self, state: JobState) -> None:
        """Raise StateError when a job has been UNKNOWN for too long; the job is left alone."""
        if state.state != UNKNOWN:
            self._since = None
            return
        if self._since is None:
            self._since = self._clock()
        if self._clock() - self._since > self._limit_seconds:
            raise StateError(
                f"job {state.job_id}: Slurm has not responded for {self._limit_seconds:.0f} s "
                f"({state.note}); the job may still run: "
                f"ask again with ddp-slurm status {state.job_id}"
            )
