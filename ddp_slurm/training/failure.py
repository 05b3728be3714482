"""When one rank fails the others end too, within seconds, and the log names the one that was first.

A collective whose partner is gone waits for its time-out, with NCCL for minutes, and holds the GPUs. So the failing
rank says so through the rendezvous store, and a thread in every other rank waits for that word.
"""

import os
import sys
import threading
import traceback
from datetime import timedelta
from types import TracebackType

from torch.distributed import Store  # type: ignore[attr-defined]

from ..errors import DdpSlurmError

FOREVER = timedelta(days=365)


class FailureWatch:
    """Tells the other ranks of an uncaught exception here, and ends this process when another rank tells.

    Args:
        store: this rank's own store connection, for telling.
        waiting_store: a second connection, since a blocking wait holds the first.
        place: ``rank 3 on alpha``, for messages.
    """

    def __init__(self, store: Store, waiting_store: Store, rank: int, world_size: int, place: str) -> None:
        self._store, self._waiting_store = store, waiting_store
        self._rank, self._world_size, self._place = rank, world_size, place
        self._thread = threading.Thread(target=self._wait_for_word, name="ddp_slurm failure watch", daemon=True)
        self._previous_hook = sys.excepthook
        self._ended = False

    def start(self) -> None:
        sys.excepthook = self._on_uncaught
        self._thread.start()

    def end(self) -> None:
        """Stop watching: this rank has finished well."""
        self._ended = True
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._previous_hook
        try:
            self._store.set(f"word/{self._rank}", "finished")
        except RuntimeError:
            return  # rank 0 and its store are gone already; the thread sees that itself
        self._thread.join(timeout=10)

    def _wait_for_word(self) -> None:
        try:
            self._waiting_store.wait([f"word/{self._rank}"], FOREVER)
            word = self._waiting_store.get(f"word/{self._rank}").decode()
        except RuntimeError:
            word = "the host of rank 0 and its store are gone"
        if self._ended or word == "finished":
            return
        _last_words(f"{self._place}: ends, because {word}")
        os._exit(1)

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """End this process at once: a process group with a collective under way cannot be closed in order."""
        first = self._tell(f"{self._place} failed: {kind.__name__}: {error}")
        if first is not None:
            _last_words(f"{self._place}: ends, because {first}")
            os._exit(1)
        if isinstance(error, DdpSlurmError):
            _last_words(f"{self._place} failed: {error}")
            os._exit(error.exit_status)
        _last_words(
            "".join(traceback.format_exception(kind, error, trace)) + f"{self._place} failed: {kind.__name__}: {error}"
        )
        os._exit(1)

    def tell_exit(self, status: object) -> None:
        """``sys.exit`` with a bad status is a failure too, though no exception hook sees it."""
        self._tell(f"{self._place} exited with {status!r}")

    def _tell(self, word: str) -> str | None:
        """Give the word to all ranks; returns the word of another rank that was first, or None."""
        try:
            first = self._store.compare_set("first_failure", "", word).decode()
            if first != word:
                return first
            for rank in range(self._world_size):
                if rank != self._rank:
                    self._store.set(f"word/{rank}", word)
        except RuntimeError:
            return None  # no store any more: only the own failure is known
        return None


def _last_words(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()
