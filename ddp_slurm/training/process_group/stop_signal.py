"""SIGUSR2, sent ahead of the job's time limit, asks the ranks to stop instead of ending them."""

import signal
import threading
from types import FrameType

_received: list[int] = []
"""Of the process, not of a world: the signal may come before its world has met. A list and not an
Event, whose lock a handler that interrupts itself would wait for without end."""


def catch_stop_signal() -> None:
    """From now on SIGUSR2 is a request to stop, unless the script has a handler of its own."""
    if threading.current_thread() is not threading.main_thread():
        return  # Python allows handlers in the main thread only
    if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, _request)


def is_stop_requested() -> bool:
    """Whether this process got SIGUSR2 since ``catch_stop_signal``."""
    return bool(_received)


def _request(signum: int, frame: FrameType | None) -> None:
    _received.append(signum)
