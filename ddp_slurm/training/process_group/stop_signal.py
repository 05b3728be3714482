"""SIGUSR2, sent ahead of the job's time limit, asks the ranks to stop instead of ending them; and
so does the SIGTERM of a preemption."""

import os
import signal
import threading
from types import FrameType

from ddp_slurm.term_signal import TermWatch

_received: list[int] = []
"""Of the process, not of a world: the signal may come before its world has met. A list and not an
Event, whose lock a handler that interrupts itself would wait for forever."""


def catch_stop_signal() -> None:
    """From now on SIGUSR2 is a request to stop, unless the script has a handler of its own."""
    if not _may_set_handlers():
        return
    if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, _request)


def ignore_stop_signal() -> None:
    """For the end of the process: Python then gives up its handlers, and SIGUSR2 would kill a rank
    whose work is done."""
    if _may_set_handlers() and signal.getsignal(signal.SIGUSR2) is _request:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def stop_when_preempted(rank: int, local_rank: int) -> None:
    """From now on the SIGTERM of a preemption under Slurm is a request to stop, too.

    Any other SIGTERM ends this process, at the latest after some seconds. Handlers that the script
    has set for SIGTERM or SIGUSR2 stay.
    """
    has_defaults = (
        signal.getsignal(signal.SIGUSR2) is _request
        and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )
    if not (_may_set_handlers() and has_defaults and "SLURM_STEP_ID" in os.environ):
        return
    signal.signal(signal.SIGTERM, _leave_to_the_watch)
    os.register_at_fork(after_in_child=_end_by_term_again)
    TermWatch(
        signal.SIGUSR2, is_rank_0=rank == 0, is_first_of_node=local_rank == 0, all_save=True
    ).start()


def is_stop_requested() -> bool:
    """Whether this process got SIGUSR2 since ``catch_stop_signal``."""
    return bool(_received)


def _may_set_handlers() -> bool:
    """Python allows it in the main thread only."""
    return threading.current_thread() is threading.main_thread()


def _leave_to_the_watch(signum: int, frame: FrameType | None) -> None:
    pass


def _end_by_term_again() -> None:
    if signal.getsignal(signal.SIGTERM) is _leave_to_the_watch:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _request(signum: int, frame: FrameType | None) -> None:
    _received.append(signum)
