"""The state of a job and of its components, whatever source knew it."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
ENDED = "ENDED"
"""The state of a job that has ended; how is not known."""
CANNOT_START = "CANNOT_START"
"""The state of a job that waits in Slurm's queue for what will not happen."""
HELD = "HELD"
"""The state of a job that waits until somebody releases it."""
WAITS_FOR_NODE = "WAITS_FOR_NODE"
"""The state of a job that names a node on which Slurm starts no job now."""
SILENCE_SECONDS = 600
"""How long a program that waits for a job goes on while Slurm does not respond: slurmctld may be
restarted or moved meanwhile."""
CANNOT_START_SECONDS = 240
"""How long such a program waits for a job that cannot start. Longer than the two minutes for which
a requeued job waits, shorter than the five after which Slurm may forget that a component ended."""
NODE_SECONDS = 1800
"""How long such a program waits for an unavailable node: longer than a large machine boots."""


class StateError(DdpSlurmError):
    """The state of a job cannot be found out."""

    exit_status = 1


class ComponentState(NamedTuple):
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
    requested_nodes: str = ""
    """A host list: the nodes that it names, without which it does not start."""

    @property
    def offset(self) -> int:
        """The number of the component, 0 in a plain job."""
        return int(self.job_id.partition("+")[2] or 0)


class JobState(NamedTuple):
    """A job as a whole and its components."""

    job_id: str
    state: str
    """One of Slurm's states, UNKNOWN, ENDED, CANNOT_START, HELD or WAITS_FOR_NODE."""
    source: str
    """Which of the sources knew it."""
    components: tuple[ComponentState, ...] = ()
    note: str = ""
    """What else a person should know."""
    log: str | None = None
    """The path of the log file, where Slurm reported it."""

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES or self.state == ENDED

    @property
    def is_waiting(self) -> bool:
        return self.state in WAITING_STATES | {CANNOT_START, HELD, WAITS_FOR_NODE}

    @property
    def exit_status(self) -> int | None:
        """Of the job script, 128 + signal where it was killed.

        None where it is not known, or the job has not ended.
        """
        if not self.is_final or not self.components:
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
        details = [": ".join(text for text in (self.reasons, self.note) if text)]
        if self.is_final and self.exit_status is not None:
            details.insert(0, f"exit status {self.exit_status}")
        text = ", ".join(detail for detail in details if detail)
        return f"{self.state} ({text})" if text else self.state

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        components = [component._asdict() for component in self.components]
        return {**self._asdict(), "components": components, "exit_status": self.exit_status}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "JobState":
        """The inverse of ``as_dict``. Raises KeyError or TypeError for anything else."""
        kept = {name: values[name] for name in cls._fields}
        kept["components"] = tuple(ComponentState(**part) for part in kept["components"])
        return cls(**kept)


class Patience:
    """How long a program waits for a job whose state is unknown, or that cannot start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state = ""
        self._since = 0.0

    def check(self, state: JobState) -> None:
        """Raise StateError when the job is in such a state for too long; the job is left alone."""
        if state.state != self._state:
            self._state = state.state
            self._since = self._clock()
        limit = _PATIENCE_SECONDS.get(state.state)
        if limit is not None and self._clock() - self._since > limit:
            raise StateError(_impatience(state, limit))


_PATIENCE_SECONDS: dict[str, float] = {
    UNKNOWN: SILENCE_SECONDS,
    CANNOT_START: CANNOT_START_SECONDS,
    WAITS_FOR_NODE: NODE_SECONDS,
}


def _impatience(state: JobState, limit_seconds: float) -> str:
    if state.state in (CANNOT_START, WAITS_FOR_NODE):
        return (
            f"job {state.job_id} cannot start and is not waited for any longer: "
            f"{state.reasons or 'no reason'}: {state.note}"
        )
    return (
        f"job {state.job_id}: Slurm has not responded for {limit_seconds:.0f} s ({state.note}); "
        f"the job may still run: ask again with ddp-slurm status {state.job_id}"
    )
