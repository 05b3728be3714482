"""Which node has which piece, and which piece the server gives to whom.

The server gives each piece to one node; from there it spreads. So the server sends the data once,
however many nodes there are. All of this is in memory only: nodes report twice a second what they
have, also to a server that was restarted.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddp_slurm.data.errors import DataSetError

SILENT_SECONDS = 10.0
"""A node that has not reported for this long is gone: its pieces are given to others."""
MIN_INTERVAL, MAX_INTERVAL = 0.5, 5.0
REPORT_BYTES_PER_SECOND = 4e6
"""Of the reports' answers, over all nodes."""


@dataclass(frozen=True)
class Report:
    """What a node reports."""

    id: str
    """Of the process, random."""
    job: str
    """The nodes of one job wait for each other."""
    node: str
    """Its number or name in the job."""
    url: str | None
    """Where it passes pieces on; None where it does not."""
    have: int
    """Bit i is set where it has piece i."""
    ready: bool
    """It has all and needs no more."""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "have": f"{self.have:x}"}

    @classmethod
    def read(cls, data: Any, pieces: int) -> "Report":
        """Raises DataSetError for what no node would send."""
        try:
            return cls(
                id=_matching("[0-9a-f]{8,64}", data["id"]),
                job=_matching("[ -~]{0,100}", data["job"]),
                node=_matching("[ -~]{1,300}", data["node"]),
                url=None if data["url"] is None else _matching("http://[ -~]{1,300}", data["url"]),
                have=read_bits(data["have"], pieces),
                ready=data["ready"] is True,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataSetError(f"not a node's report: {error}") from None


def read_bits(text: Any, pieces: int) -> int:
    """Raises ValueError for a text that is not hexadecimal, or has bits of no piece."""
    bits = int(_matching("[0-9a-f]{1,100000}", text), 16)
    if bits.bit_length() > pieces:
        raise ValueError("pieces that do not exist")
    return bits


def _matching(pattern: str, value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise ValueError(f"{value!r}"[:100])
    return value


class Tracker:
    """The nodes of all jobs that fetch one data set.

    Args:
        pieces: their number.
        clock: seconds.
    """

    def __init__(self, pieces: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.pieces = pieces
        self._all = (1 << pieces) - 1
        self._clock = clock
        self._reports: dict[str, tuple[Report, float]] = {}
        self._given: dict[int, str] = {}

    def add(self, report: Report) -> dict[str, Any]:
        """Take a node's report. Returns the answer to it, for JSON."""
        self._reports[report.id] = report, self._clock()
        others = [other for other in self._living() if other.id != report.id]
        ready = {other.node for other in self._living() if other.ready and other.job == report.job}
        peers = [
            {"id": other.id, "url": other.url, "have": f"{other.have:x}"}
            for other in others
            if other.url is not None and other.have
        ]
        return {"peers": peers, "ready": len(ready), "interval": self._interval(len(peers))}

    def _interval(self, peers: int) -> float:
        """Seconds to the next report: the more nodes and pieces, the rarer."""
        answer_bytes = peers * (self.pieces / 4 + 150)
        wanted = answer_bytes * len(self._reports) / REPORT_BYTES_PER_SECOND
        return min(max(wanted, MIN_INTERVAL), MAX_INTERVAL)

    def give(self, node: str) -> int | None:
        """A piece for the node with this id that no living node has or gets; None if there is none.

        The first in order: the server's disk reads on.
        """
        living = {report.id: report.have for report in self._living() if report.url}
        if node not in living:  # the server was restarted: its report comes first
            return None
        taken = 0
        for have in living.values():
            taken |= have
        self._given = {piece: to for piece, to in self._given.items() if to in living}
        for piece in self._given:
            taken |= 1 << piece
        free = self._all & ~taken
        if not free:
            return None
        piece = (free & -free).bit_length() - 1
        self._given[piece] = node
        return piece

    def take_back(self, piece: int) -> None:
        """A piece did not arrive: it can be given again."""
        self._given.pop(piece, None)

    def _living(self) -> list[Report]:
        now = self._clock()
        gone = [id for id, (_, at) in self._reports.items() if now - at > SILENT_SECONDS]
        for id in gone:
            del self._reports[id]
        return [report for report, _ in self._reports.values()]
