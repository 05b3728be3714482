"""Rank 0's store: keys and values that only processes with the job's token can read or write.

A thread of rank 0's process serves all connections. Those that do not prove that they know the
token cost a little memory for some seconds, and one line a minute in the log.
"""

import selectors
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from ddp_slurm.errors import counted
from ddp_slurm.training.process_group.sealed import (
    GREETING,
    HEADER,
    HELLO_BYTES,
    MOST_BYTES,
    PROOF_BYTES,
    NotOurs,
    Seal,
    Secret,
    ServerSide,
    pack,
    unpack,
)
from ddp_slurm.training.process_group.values import Values

GREETING_SECONDS = 10.0
"""How long a connection may be silent before it has proven that it knows the token."""
MOST_STRANGERS = 128
"""The most connections that have yet to prove it; the oldest one gives way to the next."""
SWEEP_SECONDS = 0.2
REPORT_SECONDS = 60.0
CHUNK_BYTES = 1 << 18


class Connection:
    """One connection, from its first byte on."""

    def __init__(self, own: socket.socket, secret: Secret) -> None:
        self.socket = own
        self.opened = time.monotonic()
        self.unsent = bytearray()
        self._unread = bytearray()
        self._greeting: ServerSide | None = ServerSide(secret)
        self._has_greeted = False
        self._seals: tuple[Seal, Seal] | None = None

    @property
    def is_ours(self) -> bool:
        return self._seals is not None

    def requests(self, data: bytes) -> list[list[bytes]]:
        """The requests that are complete with ``data``. Raises NotOurs."""
        self._unread += data
        if self._seals is None:
            self._greet()
        found: list[list[bytes]] = []
        while self._seals is not None and len(self._unread) >= HEADER.size:
            size, code = HEADER.unpack_from(self._unread)
            if size > MOST_BYTES:
                raise NotOurs(f"a message of {size} bytes")
            if len(self._unread) < HEADER.size + size:
                break
            payload = self._take(HEADER.size + size)[HEADER.size :]
            self._seals[0].check(payload, code)
            found.append(unpack(payload))
        return found

    def answer(self, fields: list[bytes]) -> None:
        assert self._seals is not None
        self.unsent += self._seals[1].message(pack(fields))

    def _greet(self) -> None:
        assert self._greeting is not None
        beginning = bytes(self._unread[: len(GREETING)])
        if not self._has_greeted and not GREETING.startswith(beginning):
            raise NotOurs("no greeting")
        if not self._has_greeted and len(self._unread) >= HELLO_BYTES:
            self.unsent += self._greeting.answer(self._take(HELLO_BYTES))
            self._has_greeted = True
        if self._has_greeted and len(self._unread) >= PROOF_BYTES:
            self._seals = self._greeting.seals(self._take(PROOF_BYTES))
            self._greeting = None

    def _take(self, size: int) -> bytes:
        taken = bytes(self._unread[:size])
        del self._unread[:size]
        return taken


class StoreServer:
    """Serves the store in a thread, until the process ends."""

    def __init__(
        self, listeners: Sequence[socket.socket], secret: Secret, report: Callable[[str], None]
    ) -> None:
        """``report`` prints a line about connections that do not know the token."""
        self._secret = secret
        self._report = report
        self._selector = selectors.DefaultSelector()
        self._values: Values[Connection] = Values(self._answer)
        self._strangers: OrderedDict[Connection, None] = OrderedDict()
        self._turned_away = 0
        self._last_address = ""
        self._next_report = 0.0
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, None)

    def start(self) -> None:
        threading.Thread(target=self._run, name="ddp_slurm store", daemon=True).start()

    def _run(self) -> None:
        next_sweep = 0.0
        while True:
            for key, events in self._selector.select(SWEEP_SECONDS):
                if key.data is None:
                    assert isinstance(key.fileobj, socket.socket)
                    self._accept(key.fileobj)
                else:
                    self._serve(key.data, events)
            now = time.monotonic()
            if now >= next_sweep:
                next_sweep = now + SWEEP_SECONDS
                self._sweep(now)

    def _accept(self, listener: socket.socket) -> None:
        try:
            own, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # it is gone already, or this process has no more descriptors
            self._turn_oldest_away()
            time.sleep(0.01)
            return
        own.setblocking(False)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(own, self._secret)
        self._strangers[connection] = None
        self._selector.register(own, selectors.EVENT_READ, connection)
        if len(self._strangers) > MOST_STRANGERS:
            self._turn_oldest_away()

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ and not self._read(connection):
                self._close(connection)
                return
            self._write(connection)
        except OSError:
            self._close(connection)

    def _read(self, connection: Connection) -> bool:
        """Whether the connection is still open. Raises OSError."""
        try:
            data = connection.socket.recv(CHUNK_BYTES)
        except BlockingIOError:
            return True
        requests = connection.requests(data)
        if connection.is_ours:
            self._strangers.pop(connection, None)
        for fields in requests:
            self._values.serve(connection, fields)
        return bool(data)

    def _answer(self, connection: Connection, fields: list[bytes]) -> None:
        connection.answer(fields)
        try:
            self._write(connection)
        except OSError:
            self._close(connection)

    def _write(self, connection: Connection) -> None:
        if connection.unsent:
            try:
                sent = connection.socket.send(connection.unsent)
                del connection.unsent[:sent]
            except BlockingIOError:
                pass
        events = selectors.EVENT_READ
        if connection.unsent:
            events |= selectors.EVENT_WRITE
        if connection.socket.fileno() >= 0:
            self._selector.modify(connection.socket, events, connection)

    def _close(self, connection: Connection) -> None:
        if connection.socket.fileno() < 0:
            return
        if connection in self._strangers:
            del self._strangers[connection]
            self._turned_away += 1
            self._last_address = _peer(connection.socket)
        self._values.forget(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _turn_oldest_away(self) -> None:
        if self._strangers:
            self._close(next(iter(self._strangers)))

    def _sweep(self, now: float) -> None:
        self._values.end_waits(now)
        for connection in list(self._strangers):
            if now - connection.opened < GREETING_SECONDS:
                break
            self._close(connection)
        if self._turned_away and now >= self._next_report:
            self._next_report = now + REPORT_SECONDS
            last = f", the last from {self._last_address}" if self._last_address else ""
            count = counted(self._turned_away, "connection")
            self._report(f"turned away {count} without the job's token{last}")
            self._turned_away = 0


def _peer(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return ""
