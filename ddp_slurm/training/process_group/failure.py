"""When one rank fails the others end too, within seconds, and the log names the one that was first.

A collective whose partner is gone waits for its time-out, with NCCL for minutes, and holds the
GPUs. So the failing rank reports it through the rendezvous store, and a thread in every other rank
waits for that message. A rank that was killed reports nothing: the ranks whose collectives fail
call the roll through the store, and the one that does not answer is named. Where collectives do
not fail either, ``heartbeat`` finds it.
"""

import contextlib
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

import torch
from torch import distributed as dist

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.term_signal import has_term
from ddp_slurm.training.process_group.ending import Deadline, print_last
from ddp_slurm.training.process_group.heartbeat import Heartbeat, group_error_reader
from ddp_slurm.training.process_group.peers import (
    Ending,
    Message,
    Peers,
    ended_key,
    leaving_key,
    left_key,
    read_first_failure,
    report_failure,
    send,
    wait_for,
)

REPORT_SECONDS = 10.0
"""The longest that reporting to the other ranks may take; then the process ends without it."""
LAST_WORDS_SECONDS = 5.0
"""How long rank 0, whose store carries the messages, stays for the others to read them. It does not
wait for ranks that are known to be lost."""
LATE_SECONDS = 10.0
"""So long after one rank has left, the log names those that have not."""
JOIN_SECONDS = 5.0
LEAST_SILENCE_SECONDS = 20.0
"""A rank that is silent for a shorter time may only be busy."""

LOST_CONNECTION = re.compile(
    "gloo/transport|pair closure|NCCL|[Cc]onnection (closed|reset|refused)|[Tt]imed out|[Tt]imeout"
    "|Broken pipe|[Ss]ocket"
)


def is_failed_collective(error: BaseException) -> bool:
    """Whether an exception may be the consequence of another rank's end."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(LOST_CONNECTION.search(str(error)))


def end_if_terminated() -> None:
    """After SIGTERM all ranks end: broken connections to the others are no failure to report."""
    if has_term():
        os._exit(128 + signal.SIGTERM)


class FailureWatch:
    """Reports an uncaught exception of this process to the other ranks, and ends this process when
    another rank reports one."""

    def __init__(self, peers: Peers, timeout_seconds: float) -> None:
        """``timeout_seconds``: the longest that any collective may take."""
        self.peers = peers
        self.timeout_seconds = timeout_seconds
        self._thread = threading.Thread(
            target=self._watch, name="ddp_slurm failure watch", daemon=True
        )
        self._previous_hook = sys.excepthook
        self._group_error: Callable[[], str | None] = lambda: None
        limit = max(timeout_seconds, LEAST_SILENCE_SECONDS)
        self._heartbeat = Heartbeat(peers, limit, self._end_without, self._look_at_group)
        self._is_leaving = False
        self._ended = False
        self._late_timer: threading.Timer | None = None
        # the thread that has it ends the process; the other one waits for that
        self._leaving = threading.Lock()

    def start(self) -> None:
        sys.excepthook = self._on_uncaught
        self._thread.start()
        self._heartbeat.start()

    def look_at_group(self, device: torch.device) -> None:
        """Look at the default group, too: an NCCL collective that ran out of time raises no
        exception in the thread that waits for it, and torch may take minutes to end the process."""
        self._group_error = group_error_reader(device)

    def announce_leaving(self) -> None:
        """Before this rank closes its process group, which breaks a collective of the others."""
        self._is_leaving = True
        with self._deadline(1), contextlib.suppress(RuntimeError):
            self.peers.store.set(leaving_key(self.peers.rank), "")

    def finish(self) -> None:
        """Stop watching: this rank leaves in order. Its leaving is recorded in the store."""
        self._ended = True
        if self._late_timer is not None:
            self._late_timer.cancel()
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._previous_hook
        self._heartbeat.stop(JOIN_SECONDS)
        store, rank = self.peers.store, self.peers.rank
        # Where rank 0 and its store are gone already the thread sees that itself.
        with contextlib.suppress(RuntimeError):
            store.set(left_key(rank), "")
            if rank != 0:
                send(store, 0, Message("left"))
            send(store, rank, Message("finished"))
        self._thread.join(timeout=JOIN_SECONDS)

    def report_exit(self, status: object) -> None:
        """``sys.exit`` with a status other than 0 is a failure too, though no exception hook sees
        it."""
        # True is an int, too, and the system would take 256 for 0
        number = (int(status) & 0xFF if isinstance(status, int) else 1) or 1
        with self._deadline(number):
            with contextlib.suppress(RuntimeError):  # the store is gone, and so are its readers
                self._report(Ending(number, f"{self.peers.place} exited with {status!r}"))
            self._linger()
            # No thread may be inside the store when the interpreter ends: it would abort.
            self.finish()
        if self._thread.is_alive():
            print_last(f"{self.peers.place} exited with {status!r}")
            os._exit(number)

    def _watch(self) -> None:
        while True:
            message = self.peers.receive()
            if self._ended or message.kind == "finished":
                return
            if message.kind == "roll call":
                self.peers.answer(message.text)
            elif message.kind == "left":
                self._start_late_timer()
            else:
                self._end_because_of(Ending(message.status, message.text))

    def _end_without(self, lost: list[int]) -> None:
        """End all ranks, in the thread of the heartbeat."""
        self._leaving.acquire()
        with self._deadline(1):
            with contextlib.suppress(RuntimeError):  # the store is gone
                self.peers.count_as_ended(lost)
            first = self._settle(Ending(1, self.peers.lost(lost)), is_consequence=False)
            print_last(self.peers.ends_because(first.text))
            self._linger()
        os._exit(first.status)

    def _look_at_group(self) -> None:
        """In the thread of the heartbeat: end all ranks where a collective has failed."""
        error = None if self._is_leaving else self._group_error()
        if error is None:
            return
        self._leaving.acquire()
        own = Ending(1, f"{self.peers.place} failed: NCCL reports {error} for a collective")
        self._report_and_end(own, own.text, is_consequence=True)

    def _end_because_of(self, ending: Ending) -> None:
        self._leaving.acquire()
        if ending.text == self.peers.rank_0_is_gone():
            end_if_terminated()
        print_last(self.peers.ends_because(ending.text))
        with self._deadline(ending.status):
            self._linger()
        os._exit(ending.status)

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """End this process at once: a process group with a collective under way cannot be closed in
        order."""
        if self._ended:  # torch's hook, which wraps this one, may outlive the group
            self._previous_hook(kind, error, trace)
            return
        self._leaving.acquire()
        place = self.peers.place
        own = Ending(1, f"{place} failed: {kind.__name__}: {error}")
        report = "".join(traceback.format_exception(kind, error, trace)) + own.text
        if is_failed_collective(error):
            end_if_terminated()
            short = f"{place}: a collective failed: {kind.__name__}: {error}"
            self._report_and_end(own, short, is_consequence=True, report_of_cause=report)
        if isinstance(error, DdpSlurmError):
            own = Ending(error.exit_status, f"{place} failed: {error}")
            report = own.text
        self._report_and_end(own, report, is_consequence=False)

    def _report_and_end(
        self, own: Ending, report: str, *, is_consequence: bool, report_of_cause: str = ""
    ) -> NoReturn:
        """Print ``report``, end all ranks, and print why: another rank's failure that was first, or
        ``report_of_cause`` where this rank's is the cause."""
        with self._deadline(own.status):
            print_last(report)  # first: what follows depends on rank 0
            first = self._settle(own, is_consequence)
            if first is not own:
                print_last(self.peers.ends_because(first.text))
            elif report_of_cause:
                print_last(report_of_cause)
            self._linger()
        os._exit(first.status)

    def _settle(self, own: Ending, is_consequence: bool) -> Ending:
        """What ends all ranks, after it was reported to them."""
        try:
            return self._report(self._find_cause(own) if is_consequence else own)
        except RuntimeError:  # the store is gone
            return Ending(1, self.peers.rank_0_is_gone()) if is_consequence else own

    def _find_cause(self, own: Ending) -> Ending:
        """Why a collective of this rank failed: another rank's end, or ``own``."""
        peers = self.peers
        first = read_first_failure(peers.store)
        if first is not None:
            return first
        found = peers.call_roll("failure")
        if found.lost:
            return Ending(1, peers.lost(found.lost))
        if found.leaving:
            return Ending(
                1,
                f"{peers.name(found.leaving)} had left the training normally, while {peers.place} "
                "still waited in a collective: every rank must take the same number of steps",
            )
        return own

    def _report(self, ending: Ending) -> Ending:
        peers = self.peers
        return report_failure(peers.store, peers.rank, len(peers.places), ending)

    def _linger(self) -> None:
        """Rank 0's end is the store's end: it waits until the others have read why they end."""
        peers = self.peers
        with contextlib.suppress(RuntimeError):  # the store is gone, and so are its readers
            peers.count_as_ended([peers.rank])
            if peers.rank == 0:
                wait_for(peers.store, list(map(ended_key, peers.others)), LAST_WORDS_SECONDS)

    def _deadline(self, status: int) -> Deadline:
        reason = self.peers.rank_0_does_not_respond()
        if self.peers.rank == 0:
            reason = f"reporting to the others took longer than {REPORT_SECONDS:.0f} s"
        return Deadline(REPORT_SECONDS, self.peers.ends_because(reason), status)

    def _start_late_timer(self) -> None:
        if self._late_timer is None:
            self._late_timer = threading.Timer(LATE_SECONDS, self._name_late_ranks)
            self._late_timer.daemon = True
            self._late_timer.start()

    def _name_late_ranks(self) -> None:
        """On rank 0: name the ranks that have left and those that may wait for them."""
        peers = self.peers
        left = peers.ranks_with(leaving_key)
        late = [rank for rank in range(len(peers.places)) if rank not in left]
        if self._ended or not late or 0 in left:
            return
        print_last(
            f"note: {peers.name(left)} left the training {LATE_SECONDS:.0f} s ago or earlier, "
            f"{peers.name(late)} did not; a collective that waits for the former fails after "
            f"{self.timeout_seconds:.0f} s"
        )
