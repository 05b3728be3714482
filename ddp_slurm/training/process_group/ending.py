"""How a process ends when something went wrong: with its last line in the log, and in bounded
time."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.parent import die_with_parent

LINE_SECONDS = 2.0
TORCHRUN = (b"torchrun", b"torch.distributed.run", b"ddp_slurm.torchrun_agent")
GLOO_SECONDS = 5.0
GLOO_THREAD = "pt_gloo_runloop"
"""Linux's name of the threads that run gloo's collectives."""


def print_last(text: str) -> None:
    """Print a line on stderr at once: it is not lost where the process ends right after."""
    sys.stdout.flush()
    # To the descriptor: torch wraps the exception hook and catches sys.stderr until it returns.
    os.write(2, (text.rstrip("\n") + "\n").encode(errors="backslashreplace"))


def print_errors_plainly(place: str) -> None:
    """From now on an uncaught DdpSlurmError prints its text and sets the exit status, without a
    traceback."""
    previous = sys.excepthook

    def on_uncaught(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, DdpSlurmError):
            previous(kind, error, trace)
            return
        text = str(error)
        print_last(text if text.startswith(place) else f"{place} failed: {text}")
        os._exit(error.exit_status)  # a hook cannot change the status in another way

    sys.excepthook = on_uncaught


def die_with_torchrun() -> None:
    """torchrun ends its ranks itself, unless it is killed."""
    parent = Path(f"/proc/{os.getppid()}/cmdline")
    with contextlib.suppress(OSError):
        words = parent.read_bytes().split(b"\0")
        if any(os.path.basename(word) in TORCHRUN for word in words):
            die_with_parent()


class Deadline:
    """Ends this process, with ``text`` on stderr, where the block runs for longer than ``seconds``.

    For calls to rank 0's store: where rank 0 is stopped, or the link to it is cut, they do not
    return, whatever time-out they were given, and no exception can reach the thread inside them.
    """

    def __init__(self, seconds: float, text: str, status: int = 1) -> None:
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._text = text
        self._status = status

    def __enter__(self) -> None:
        with contextlib.suppress(RuntimeError):  # at exit Python 3.12 starts no thread any more
            self._timer.start()

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        # in a thread of its own: standard output may belong to a file system that hangs
        line = threading.Thread(target=print_last, args=(self._text,), daemon=True)
        line.start()
        line.join(LINE_SECONDS)
        os._exit(self._status)


def let_gloo_rest() -> None:
    """Wait until gloo's threads have nothing to do, some seconds at most; before Python ends.

    Such a thread may still hold a collective of a backward for which nobody waits any more. To drop
    it the thread needs the interpreter, and an interpreter that is ending aborts the process
    instead, with "terminate called without an active exception" (pytorch issue 190489).
    """
    give_up = time.monotonic() + GLOO_SECONDS
    rests = 0
    while rests < 2 and time.monotonic() < give_up and any(_gloo_states()):
        time.sleep(0.01)  # a thread that waits for the interpreter now gets it
        rests = rests + 1 if set(_gloo_states()) == {"S"} else 0


def _gloo_states() -> Iterator[str]:
    """Of each of gloo's threads: R for one that runs or waits for a core, S for one that sleeps."""
    for thread in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            name, _, rest = thread.read_text().partition("(")[2].rpartition(")")
            if name == GLOO_THREAD:
                yield rest.split()[0]
