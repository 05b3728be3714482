"""A process that ends with the one that has started it. Linux only; standard library only."""

import ctypes
import signal

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def die_with_parent() -> None:
    """From now on this process is killed when the thread ends that has started it, also where that
    one is killed itself (prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
