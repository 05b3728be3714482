"""The faults of the matrix: what breaks, and what should come of it."""

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from ddp_slurm.lab import network
from tests.slurm.fault_runs import EPOCHS, FaultRun, stopped
from tests.waiting import wait_until

RESTARTS = ("--max-restarts", "4")
SHORT_JOB = ("--time", "2", "--signal-seconds", "60", "--max-restarts", "20")
"""On a busy machine it takes several restarts."""
WAITS = "WAITS_FOR_NODE"
"""A job whose node stays away is not simply PENDING."""
Inject = Callable[[FaultRun], None]


@dataclass(frozen=True)
class Row:
    """A fault and what should come of it."""

    about: str
    inject: Inject = lambda run: None
    """Called when the training has begun."""
    options: tuple[str, ...] = ()
    """Of ``submit``."""
    planted: tuple[str, ...] = ()
    """Arguments of FAULTY, a rank and what it does; ``trigger`` then starts it."""
    end: str = "FAILED"
    named: str = ""
    """A regular expression that the log must match."""
    trains: bool = True
    """Whether the training begins at all."""
    epochs: int = EPOCHS
    slurm_conf: tuple[str, str] = ("", "")
    """Text of slurm.conf and what replaces it."""


def kill_rank(rank: int, number: int) -> Inject:
    return lambda run: run.signal_rank(rank, number)


def kill_node(node: str, seconds: float | None) -> Inject:
    """The node dies and comes back after some seconds; None: not before the job has ended."""

    def inject(run: FaultRun) -> None:
        run.lab.kill(node)
        if seconds is not None:
            time.sleep(seconds)
            run.lab.revive(node)

    return inject


def pull_cable(node: str, seconds: float | None) -> Inject:
    def inject(run: FaultRun) -> None:
        index = run.lab.node(node).index
        network.plug(run.lab.switch, index, up=False)
        if seconds is not None:
            time.sleep(seconds)
            network.plug(run.lab.switch, index, up=True)

    return inject


def trigger(run: FaultRun) -> None:
    """Let the planted fault happen at the next step."""
    (run.folder / "fault").touch()


def cancel(run: FaultRun) -> None:
    run.cli("cancel", run.job_id)


def no_controller_during_the_requeue(run: FaultRun) -> None:
    stop_line = "stopped by a signal after step"
    wait_until(lambda: stop_line in run.log(), lambda: run.log(), seconds=240)
    with stopped(run.lab, "slurmctld", 25):
        pass


def preempt(run: FaultRun) -> None:
    """A job of a partition of higher priority takes all nodes for some seconds."""
    wait = ["sbatch", "--wait", "--partition=urgent", "--nodes=3", "--exclusive", "--time=2"]
    run.slurm(*wait, "--output=/dev/null", "--wrap=sleep 5")


PREEMPTION = """\
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP
PartitionName=all GraceTime=30 PriorityTier=1 """


def fill_disk(run: FaultRun) -> None:
    """Leave no byte on the small disk that the folder is on."""
    with contextlib.suppress(OSError), open(run.folder / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


ROWS = {
    "kill-9": Row("rank 1: kill -9", kill_rank(1, signal.SIGKILL), named="rank 1 on beta"),
    "segfault": Row("rank 2: SIGSEGV", kill_rank(2, signal.SIGSEGV), named="rank 2 on alpha"),
    "exception": Row(
        "rank 1: exception",
        trigger,
        planted=("1", "exception"),
        named="rank 1 on beta failed: RuntimeError: planted",
    ),
    "exit-3": Row("rank 1: sys.exit(3)", trigger, planted=("1", "3"), named="rank 1 on beta.* 3"),
    "leave-0": Row(
        "rank 0: sys.exit(0) in the middle", trigger, planted=("0", "0"), named="rank 0 on gamma"
    ),
    "stop-0": Row(
        "rank 0: kill -STOP", kill_rank(0, signal.SIGSTOP), named="rank 0 on gamma.*(respond|hang)"
    ),
    "stop-1": Row(
        "rank 1: kill -STOP", kill_rank(1, signal.SIGSTOP), named="rank 1 on beta.*(respond|hang)"
    ),
    "cancel": Row("ddp-slurm cancel", cancel, end="CANCELLED", named="CANCELLED"),
    "time-limit": Row(
        "time limit, 60 s signal",
        options=SHORT_JOB,
        end="COMPLETED",
        named="stopped early with a snapshot",
        epochs=3 * EPOCHS,
    ),
    "requeue-no-slurmctld": Row(
        "slurmctld away for 25 s during the requeue",
        no_controller_during_the_requeue,
        options=SHORT_JOB,
        end="COMPLETED",
        named="stopped early with a snapshot",
        epochs=3 * EPOCHS,
    ),
    "preempted": Row(
        "preempted, 30 s of grace",
        preempt,
        options=RESTARTS,
        end="COMPLETED",
        named="stopped early with a snapshot; requeued",
        slurm_conf=("PartitionName=all ", PREEMPTION),
    ),
    "preempted-workers": Row(
        "preempted, 30 s of grace, loaders with workers",
        preempt,
        options=RESTARTS,
        planted=("none", "workers"),
        end="COMPLETED",
        named="stopped early with a snapshot; requeued",
        slurm_conf=("PartitionName=all ", PREEMPTION),
    ),
    "setup": Row("a --setup line fails", options=("--setup", "false"), named="false", trains=False),
    "disk-full": Row("disk of log and snapshot full", fill_disk, named="No space|ENOSPC|space"),
}
for _node, _place in (("gamma", "first"), ("beta", "middle"), ("alpha", "last")):
    for _key, _seconds in (("8", 8.0), ("45", 45.0), ("for-good", None)):
        _duration = f"for {_seconds:g} s" if _seconds else "for good"
        ROWS[f"node-{_place}-{_key}"] = Row(
            f"{_place} node lost {_duration}",
            kill_node(_node, _seconds),
            options=RESTARTS,
            end="COMPLETED" if _seconds else WAITS,
            # With the first node the script dies that could write a line.
            named="" if _place == "first" else f"a node was lost|Node failure on {_node}",
        )
ROWS["cable-10"] = Row(
    "rank 1's cable pulled for 10 s", pull_cable("beta", 10), end="FAILED|COMPLETED"
)
ROWS["cable-for-good"] = Row(
    "rank 1's cable pulled for good",
    pull_cable("beta", None),
    options=RESTARTS,
    end=WAITS,
)
