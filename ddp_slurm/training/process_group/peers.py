"""What the ranks say to each other about failures, through rank 0's store."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

FOREVER = timedelta(days=365)
POLL_SECONDS = 0.02
MOST_NAMES = 8
ROLL_CALL_SECONDS = 3.0
"""How long a rank has to answer. A running one answers within milliseconds, unless a long call into
C holds Python's interpreter lock."""


class Ending(NamedTuple):
    """Why the ranks end: the exit status for all of them, so that a launcher sees the status of
    the failure and not of what followed from it, and what happened."""

    status: int
    """1 to 255: ranks that end because of another one have failed, whatever it reports."""
    text: str

    @classmethod
    def reported(cls, status: object, text: object) -> "Ending":
        """From the values of another rank's report."""
        if isinstance(status, int) and 0 < status < 256:
            return cls(status, str(text))
        return cls(1, str(text))


class Message(NamedTuple):
    """``kind`` is ``end`` (with status and text), ``roll call`` (``text`` is its name), ``left``,
    or ``finished`` (from the rank itself)."""

    kind: str
    status: int = 0
    text: str = ""


class RollCall(NamedTuple):
    """What a roll call found about the other ranks."""

    leaving: list[int]
    """Those that leave or have left in order."""
    lost: list[int]
    """Those that do not respond."""


@dataclass
class Peers:
    """The ranks of one world, as one of them reaches the others.

    All methods but ``receive`` may raise RuntimeError where the store is gone, and do not return
    where it does not respond: see ``ending.Deadline``.
    """

    rank: int
    places: list[str]
    """``rank 3 on alpha`` for each rank, for messages."""
    store: Store
    waiting_store: Store
    """A second connection to the same store: a blocking wait holds the one that it uses."""
    _received: int = 0

    @property
    def place(self) -> str:
        return self.places[self.rank]

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(len(self.places)) if rank != self.rank]

    def name(self, ranks: Sequence[int]) -> str:
        """``rank 3 on alpha, rank 5 on beta``; a long list is cut."""
        names = ", ".join(self.places[rank] for rank in ranks[:MOST_NAMES])
        rest = len(ranks) - MOST_NAMES
        return f"{names} and {rest} more" if rest > 0 else names

    def receive(self) -> Message:
        """The next message for this rank; waits for it. One thread of a rank calls it.

        A store that is gone counts as rank 0's end.
        """
        key = _message_key(self.rank, self._received + 1)
        try:
            self.waiting_store.wait([key], FOREVER)
            message = _read_message(self.waiting_store.get(key), key)
        except RuntimeError:
            return Message("end", 1, self.rank_0_is_gone())
        self._received += 1
        return message

    def answer(self, roll_call: str) -> None:
        """Answer a roll call, in the thread that receives."""
        self.waiting_store.set(_present_key(roll_call, self.rank), "")

    def call_roll(self, name: str) -> RollCall:
        """Which ranks have left, and which do not respond. Ranks that call at once share it."""
        if self.store.add(f"roll calls/{name}", 1) == 1:
            for rank in self.others:
                send(self.store, rank, Message("roll call", text=name))
        present = {rank: _present_key(name, rank) for rank in self.others}
        self.store.set(_present_key(name, self.rank), "")
        gone = self.ranks_with(left_key)
        awaited = [key for rank, key in present.items() if rank not in gone]
        wait_for(self.store, awaited, ROLL_CALL_SECONDS)
        absent = [rank for rank, key in present.items() if not self.store.check([key])]
        gone = self.ranks_with(left_key)
        leaving = [rank for rank in self.ranks_with(leaving_key) if rank != self.rank]
        lost = [rank for rank in absent if rank not in gone]
        self.count_as_ended(lost)
        return RollCall(leaving, lost)

    def count_as_ended(self, ranks: list[int]) -> None:
        """Rank 0 does not wait for them to read why they end."""
        for rank in ranks:
            self.store.set(ended_key(rank), "")

    def ranks_with(self, key: Callable[[int], str]) -> list[int]:
        """The ranks whose key exists."""
        return [rank for rank in range(len(self.places)) if self.store.check([key(rank)])]

    def ends_because(self, reason: str) -> str:
        return f"{self.place}: ends, because {reason}"

    def lost(self, ranks: Sequence[int]) -> str:
        return (
            f"{self.name(ranks)} ended without a report or does not respond: killed, crashed or "
            "hanging, or the link to the host is lost"
        )

    def rank_0_is_gone(self) -> str:
        return (
            f"{self.places[0]}, whose store the ranks report to, ended without a report, or the "
            "link to its host is lost"
        )

    def rank_0_does_not_respond(self) -> str:
        return (
            f"{self.places[0]}, whose store the ranks report to, does not respond: it hangs, or "
            "the link to its host is lost"
        )


def wait_for(store: Store, keys: list[str], seconds: float) -> bool:
    """Whether all keys exist within so many seconds.

    By polling: where ``Store.wait`` runs out of time torch prints warnings of its own, which look
    like the error.
    """
    deadline = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def send(store: Store, rank: int, message: Message) -> None:
    """Add a message to those that ``rank`` receives, in the order of sending."""
    number = store.add(f"messages/{rank}", 1)
    store.set(_message_key(rank, number), json.dumps(message))


def _read_message(value: bytes, key: str) -> Message:
    """Raises no error: a message that no rank has written ends the ranks, and names its key."""
    try:
        kind, status, text = json.loads(value)
    except (TypeError, ValueError):
        kind, status, text = "", 1, f"the value of {key!r} in rank 0's store is not a message"
    if kind in ("roll call", "left", "finished"):
        return Message(kind, text=str(text))
    return Message("end", *Ending.reported(status, text))


def _read_ending(value: bytes) -> Ending:
    try:
        return Ending.reported(*json.loads(value))
    except (TypeError, ValueError):
        return Ending(1, "the value of 'first failure' in rank 0's store is not a report")


def _message_key(rank: int, number: int) -> str:
    return f"message/{rank}/{number}"


def _present_key(roll_call: str, rank: int) -> str:
    return f"present/{roll_call}/{rank}"


def ended_key(rank: int) -> str:
    """Set when the rank needs no more messages."""
    return f"ended/{rank}"


def leaving_key(rank: int) -> str:
    """Set when the rank no longer needs the others, before it closes its connections."""
    return f"leaving/{rank}"


def left_key(rank: int) -> str:
    """Set when the rank no longer needs the store."""
    return f"left/{rank}"


def read_first_failure(store: Store) -> Ending | None:
    """What ends the world, where a rank has reported it already."""
    if not store.check(["first failure"]):
        return None
    return _read_ending(store.get("first failure"))


def report_failure(store: Store, rank: int, world_size: int, ending: Ending) -> Ending:
    """End all other ranks with ``ending``; returns the failure that was first, another rank's or
    this one."""
    mine = json.dumps(ending)
    first = store.compare_set("first failure", "", mine).decode()
    if first != mine:
        return _read_ending(first.encode())
    for other in range(world_size):
        if other != rank:
            send(store, other, Message("end", ending.status, ending.text))
    return ending
