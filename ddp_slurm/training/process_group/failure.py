"""When one rank fails the others end too, within seconds, and the log names the one that was first.

A collective whose partner is gone waits for its time-out, with NCCL for minutes, and holds the GPUs. So the failing
rank says so through the rendezvous store, and a thread in every other rank waits for that word.
"""

import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from types import TracebackType

from torch.distributed import Store  # type: ignore[attr-defined]

from ddp_slurm.errors import DdpSlurmError

FOREVER = timedelta(days=365)
FINISHED = "0 finished"
LAST_WORDS_SECONDS = 2.0
"""How long rank 0, whose store carries the word, stays for the others to read it."""


def tell_all(store: Store, world_size: int, rank: int, text: str, status: int = 1) -> str | None:
    """Give all other ranks the word that ends them; returns another rank's word where that was first, or None.

    A word is the exit status for all ranks, a space, and what happened: whichever rank a launcher looks at, it sees
    the status of the failure and not of what followed from it.
    """
    word = f"{status} {text}"
    try:
        first: str = store.compare_set("first_failure", "", word).decode()
        if first != word:
            return first
        for other in range(world_size):
            if other != rank:
                store.set(f"word/{other}", word)
    except RuntimeError:
        return None  # no store any more: only the own failure is known
    return None


def print_faults_plainly(place: str) -> None:
    """From now on an uncaught DdpSlurmError is its text and its exit status, without a traceback."""
    previous = sys.excepthook

    def on_uncaught(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, DdpSlurmError):
            previous(kind, error, trace)
            return
        text = str(error)
        _last_words(text if text.startswith(place) else f"{place} failed: {text}")
        os._exit(error.exit_status)  # a hook cannot change the status in another way

    sys.excepthook = on_uncaught


class FailureWatch:
    """Tells the other ranks of an uncaught exception here, and ends this process when another rank tells.

    Args:
        store: this rank's own store connection, for telling.
        waiting_store: a second connection, since a blocking wait holds the first.
        place: ``rank 3 on alpha``, for messages.
    """

    def __init__(
        self, store: Store, waiting_store: Store, rank: int, world_size: int, place: str
    ) -> None:
        self._store, self._waiting_store = store, waiting_store
        self._rank, self._world_size, self._place = rank, world_size, place
        self._thread = threading.Thread(
            target=self._wait_for_word, name="ddp_slurm failure watch", daemon=True
        )
        self._previous_hook = sys.excepthook
        self._ended = False
        self._leaving = (
            threading.Lock()
        )  # one thread has the last word, the other waits for the end

    def start(self) -> None:
        sys.excepthook = self._on_uncaught
        self._thread.start()

    def end(self) -> None:
        """Stop watching: this rank has finished well."""
        self._ended = True
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._previous_hook
        try:
            self._store.set(f"word/{self._rank}", FINISHED)
        except RuntimeError:
            return  # rank 0 and its store are gone already; the thread sees that itself
        self._thread.join(timeout=10)

    def tell_exit(self, status: object) -> None:
        """``sys.exit`` with a bad status is a failure too, though no exception hook sees it."""
        # True is an int, too, and the system would take 256 for 0
        number = (int(status) & 0xFF if isinstance(status, int) else 1) or 1
        tell_all(
            self._store,
            self._world_size,
            self._rank,
            f"{self._place} exited with {status!r}",
            number,
        )
        self._linger()

    def _wait_for_word(self) -> None:
        try:
            self._waiting_store.wait([f"word/{self._rank}"], FOREVER)
            word = self._waiting_store.get(f"word/{self._rank}").decode()
        except RuntimeError:
            word = "1 the host of rank 0 and its store are gone"
        if self._ended or word == FINISHED:
            return
        self._leaving.acquire()
        status, _, text = word.partition(" ")
        _last_words(f"{self._place}: ends, because {text}")
        self._linger()
        os._exit(int(status))

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """End this process at once: a process group with a collective under way cannot be closed in order."""
        if self._ended:  # torch's hook, which wraps this one, may outlive the group
            self._previous_hook(kind, error, trace)
            return
        self._leaving.acquire()
        status, text = 1, f"{self._place} failed: {kind.__name__}: {error}"
        report = "".join(traceback.format_exception(kind, error, trace)) + text
        if isinstance(error, DdpSlurmError):
            status, report = error.exit_status, f"{self._place} failed: {error}"
            text = report
        first = tell_all(self._store, self._world_size, self._rank, text, status)
        if first is not None:
            word, _, text = first.partition(" ")
            status, report = int(word), f"{self._place}: ends, because {text}"
        _last_words(report)
        self._linger()
        os._exit(status)

    def _linger(self) -> None:
        """Rank 0's end is the store's end: it waits until the others have read why they end."""
        try:
            self._store.add("ended", 1)
            deadline = time.monotonic() + LAST_WORDS_SECONDS
            while (
                self._rank == 0
                and self._store.add("ended", 0) < self._world_size
                and time.monotonic() < deadline
            ):
                time.sleep(0.02)
        except RuntimeError:
            return  # the store is gone, and so are its readers


def _last_words(text: str) -> None:
    sys.stdout.flush()
    # To the descriptor: torch wraps the exception hook and catches sys.stderr until the hook returns.
    os.write(2, (text.rstrip("\n") + "\n").encode(errors="backslashreplace"))
