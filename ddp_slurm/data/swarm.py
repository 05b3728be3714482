"""One node's part in the exchange: pieces from the server and from other nodes, and to them."""

import asyncio
import contextlib
import math
import random
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp

from ddp_slurm.console import say
from ddp_slurm.data.client import Client
from ddp_slurm.data.errors import DataSetError
from ddp_slurm.data.pieces import Pieces
from ddp_slurm.data.tracker import Report, read_bits

FROM_SERVER = 2
"""Pieces that a node asks the server for at once: its link is never idle between two."""
MAX_PEERS = 8
"""Nodes that a node asks at once, for one piece each."""
CANDIDATES = 32
"""Pieces among which the rarest is taken."""
SILENT_SECONDS = 120.0
"""How long no piece arrives before a fetch has failed. A server can be restarted meanwhile."""
STALL_SECONDS = 10.0
"""How long no other node sends a piece before the server is asked for what they have."""
LINGER_SECONDS = 60.0
"""How long a complete node waits for others that make no progress."""
POLL_SECONDS = 0.1
RETRY_SECONDS = 1.0
MAX_FAILURES = 3
PAUSE_SECONDS = 30.0
"""How long a node that does not respond is not asked again."""


@dataclass(frozen=True)
class Member:
    """This process among those of its job."""

    job: str
    """The same on all nodes of one job."""
    node: str
    nodes: int
    """Of the job."""
    seeds: bool
    """Whether it passes pieces on: one process a node does."""


@dataclass(frozen=True)
class Peer:
    """Another node that passes pieces on."""

    url: str
    have: int
    """Bit i is set where it has piece i."""


class Swarm:
    """A node that fetches, and passes on what it has. ``start`` it, and ``stop`` it at the end.

    Args:
        have: pieces that are on the disk already, as bits.
        url: where this node's own server is; None where it has none.
    """

    def __init__(
        self, client: Client, pieces: Pieces, have: int, member: Member, url: str | None
    ) -> None:
        self.client = client
        self.pieces = pieces
        self.have = have
        self.member = member
        self.url = url
        self.from_server = 0
        """Bytes that the server sent to this node."""
        self.id = secrets.token_hex(16)
        self._all = (1 << len(pieces.manifest.pieces)) - 1
        self._asked: set[int] = set()
        """Pieces that are on their way from another node."""
        self._peers: dict[str, Peer] = {}
        self._not_before: dict[str, float] = {}
        """When another node may be asked again."""
        self._ready = 0
        """Nodes of the job that are complete."""
        self._heard = self._progress = self._helped = self._news = time.monotonic()
        """When the server last responded, a piece last arrived, another node last sent one, another
        node last made progress."""
        self._bad_from_server = 0
        self._reporter: asyncio.Task[None] | None = None

    @property
    def is_complete(self) -> bool:
        return self.have == self._all

    def start(self) -> None:
        self._reporter = asyncio.create_task(self._report_always())

    async def stop(self) -> None:
        """Report that this node no longer passes pieces on."""
        if self._reporter is not None:
            await _cancel([self._reporter])
        self.url = None
        with contextlib.suppress(aiohttp.ClientError, DataSetError):  # the server sees its silence
            await self.client.report(self._report())

    async def fetch(self) -> None:
        """Return when all pieces are on the disk. Raises DataSetError, or OSError."""
        assert self._reporter is not None
        tasks = [
            *(asyncio.create_task(self._ask_server()) for _ in range(FROM_SERVER)),
            asyncio.create_task(self._ask_peers()),
        ]
        try:
            while not self.is_complete:
                done, _ = await asyncio.wait([self._reporter, *tasks], timeout=POLL_SECONDS)
                for task in done:
                    task.result()  # raises what ended it
        finally:
            await _cancel(tasks)

    async def wait_for_others(self) -> None:
        """Pass pieces on until all nodes of the job are complete.

        Returns also where the others make no progress: their own messages name the reason.
        """
        self._news = time.monotonic()
        while self._ready < self.member.nodes:
            if time.monotonic() - self._news > LINGER_SECONDS:
                say(
                    f"note: {self._ready} of {self.member.nodes} nodes have the data set; this one "
                    "continues, to meet the others"
                )
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _report_always(self) -> None:
        while True:
            try:
                seconds = self._take_news(await self.client.report(self._report()))
            except aiohttp.ClientError as error:
                self._check_patience(error)
                seconds = RETRY_SECONDS
            await asyncio.sleep(seconds)

    def _report(self) -> Report:
        return Report(
            id=self.id,
            job=self.member.job,
            node=self.member.node,
            url=self.url,
            have=self.have if self.url else 0,
            ready=self.is_complete,
        )

    def _take_news(self, answer: dict[str, Any]) -> float:
        """Take the server's answer. Returns the seconds to the next report."""
        pieces = len(self.pieces.manifest.pieces)
        try:
            peers = {
                peer["id"]: Peer(str(peer["url"]), read_bits(peer["have"], pieces))
                for peer in answer["peers"]
            }
            ready, seconds = int(answer["ready"]), float(answer["interval"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataSetError(f"the server's answer to a report: {error!r}") from None
        self._heard = time.monotonic()
        if (peers, ready) != (self._peers, self._ready):
            self._news = self._heard
        self._peers, self._ready = peers, ready
        return seconds

    def _check_patience(self, error: Exception) -> None:
        """Raises DataSetError where neither the server nor a node has helped for too long."""
        if time.monotonic() - max(self._heard, self._progress) > SILENT_SECONDS:
            raise DataSetError(
                f"the server has not responded for {SILENT_SECONDS:.0f} s: {error}"
            ) from None

    async def _ask_server(self) -> None:
        """Fetch what no other node has; where nothing arrives any more, also what others have."""
        while not self.is_complete:
            try:
                found = await self.client.next_piece(self.id)
                if found is None and time.monotonic() - self._helped > STALL_SECONDS:
                    found = await self._missing_piece()
            except aiohttp.ClientError as error:
                self._check_patience(error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if found is None:
                await asyncio.sleep(POLL_SECONDS)
            else:
                await self._take_from_server(*found)

    async def _missing_piece(self) -> tuple[int, bytes] | None:
        missing = _numbers(self._all & ~self.have)
        if not missing:
            return None
        piece = random.choice(missing)
        return piece, await self.client.piece(piece)

    async def _take_from_server(self, piece: int, data: bytes) -> None:
        self.from_server += len(data)
        if await self._put(piece, data):
            return
        self._bad_from_server += 1
        if self._bad_from_server >= MAX_FAILURES:
            raise DataSetError(
                f"{MAX_FAILURES} pieces from the server do not match its checksums, the last of "
                f"{self._files_of(piece)}: a file was changed, or its disk or the network is bad. "
                "On the server run: ddp-slurm data check FOLDER"
            )

    def _files_of(self, piece: int) -> str:
        manifest = self.pieces.manifest
        paths = [manifest.files[span.file].path for span in manifest.spans(piece)]
        return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"

    async def _put(self, piece: int, data: bytes) -> bool:
        """Check a piece and write it; False for one that does not match."""
        if self.have >> piece & 1:
            return True
        if not await asyncio.to_thread(self.pieces.put, piece, data):
            return False
        self.have |= 1 << piece
        self._progress = time.monotonic()
        return True

    async def _ask_peers(self) -> None:
        """Keep asking the nodes that have what is missing here, in random order."""
        asking: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                for id in [id for id, task in asking.items() if task.done()]:
                    asking.pop(id).result()
                others = [id for id in self._peers if id not in asking]
                random.shuffle(others)
                for id in others:
                    if len(asking) < MAX_PEERS and self._wanted_of(id):
                        asking[id] = asyncio.create_task(self._ask_peer(id))
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await _cancel(asking.values())

    async def _ask_peer(self, id: str) -> None:
        """Fetch from a node as long as it has what is missing here."""
        failures = 0
        while wanted := self._wanted_of(id):
            url = self._peers[id].url
            piece = self._rarest(wanted)
            self._asked.add(piece)
            try:
                if await self._put(piece, await self.client.piece(piece, url)):
                    failures, self._helped = 0, time.monotonic()
                else:
                    say(f"note: piece {piece} from {url} is wrong; that node is not asked again")
                    self._not_before[id] = math.inf
            except (aiohttp.ClientError, DataSetError) as error:
                failures += 1
                if failures == MAX_FAILURES:
                    say(f"note: {url}: {error}; not asked for {PAUSE_SECONDS:.0f} s")
                    self._not_before[id] = time.monotonic() + PAUSE_SECONDS
                await asyncio.sleep(RETRY_SECONDS)
            finally:
                self._asked.discard(piece)

    def _wanted_of(self, id: str) -> int:
        """The pieces of a node that are missing here and are not already on their way."""
        if id not in self._peers or time.monotonic() < self._not_before.get(id, 0.0):
            return 0
        wanted = self._peers[id].have & ~self.have
        for piece in self._asked:
            wanted &= ~(1 << piece)
        return wanted

    def _rarest(self, wanted: int) -> int:
        numbers = _numbers(wanted)
        some = random.sample(numbers, min(CANDIDATES, len(numbers)))
        return min(some, key=lambda piece: sum(p.have >> piece & 1 for p in self._peers.values()))


def _numbers(bits: int) -> list[int]:
    return [number for number, bit in enumerate(reversed(f"{bits:b}")) if bit == "1"]


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
