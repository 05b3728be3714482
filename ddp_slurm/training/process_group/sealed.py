"""A connection between two processes of one job, each of which has proven that it knows the token.

The proofs and the codes are HMACs (RFC 2104) with SHA-256. The token itself never travels, and a
message that somebody else sent, changed, repeated or left out is refused. Nothing is encrypted.
"""

import hmac
import os
import socket
import struct
import time
from dataclasses import dataclass
from hashlib import sha256

GREETING = b"ddp_slurm rendezvous 1\n"
NONCE_BYTES = 16
PROOF_BYTES = 32
HELLO_BYTES = len(GREETING) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
HEADER = struct.Struct(">I16s")
"""The length of a message, and its code."""
MOST_BYTES = 1 << 28
"""Of a message."""
_LENGTH = struct.Struct(">I")


class NotOurs(ConnectionError):
    """The other end does not know the token."""


@dataclass(frozen=True)
class Secret:
    """What both ends must have in common."""

    token: str
    world: str
    """The job and its start: a token may serve several of them, one after the other."""

    def code(self, purpose: bytes, nonces: bytes = b"") -> bytes:
        """For one purpose, and one pair of nonces of 16 bytes each."""
        world = sha256(self.world.encode()).digest()
        return hmac.digest(self.token.encode(), purpose + b"\0" + world + nonces, "sha256")


class Seal:
    """Makes the codes of the messages in one direction of a connection, in their order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def message(self, payload: bytes) -> bytes:
        """The message with its header."""
        return HEADER.pack(len(payload), self.code(payload)) + payload

    def code(self, payload: bytes) -> bytes:
        """The code of the next message."""
        self._count += 1
        return hmac.digest(self._key, _LENGTH.pack(self._count) + payload, "sha256")[:16]

    def check(self, payload: bytes, code: bytes) -> None:
        """Raises NotOurs where the next message should have another code."""
        if not hmac.compare_digest(self.code(payload), code):
            raise NotOurs("a message was changed, or comes from somebody else")


class ServerSide:
    """Rank 0's end of the greeting. It answers only those who greet it."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._nonces = b""

    def answer(self, hello: bytes) -> bytes:
        """The answer to the first HELLO_BYTES. Raises NotOurs."""
        if not hello.startswith(GREETING):
            raise NotOurs("no greeting")
        own = os.urandom(NONCE_BYTES)
        self._nonces = hello[len(GREETING) :] + own
        return own + self._secret.code(b"server", self._nonces)

    def seals(self, proof: bytes) -> tuple[Seal, Seal]:
        """The seals of what is received and of what is sent. Raises NotOurs for a wrong proof."""
        if not hmac.compare_digest(self._secret.code(b"client", self._nonces), proof):
            raise NotOurs("a wrong proof")
        return _seals(self._secret, self._nonces)


class ClientSide:
    """A rank's connection to rank 0, blocking."""

    def __init__(self, connection: socket.socket, secret: Secret, seconds: float) -> None:
        """Greets, within ``seconds``. Raises OSError, which NotOurs is, too."""
        self._socket = connection
        self._deadline: float | None = time.monotonic() + seconds
        own = os.urandom(NONCE_BYTES)
        connection.sendall(GREETING + own)
        answer = self._receive(ANSWER_BYTES)
        nonces = own + answer[:NONCE_BYTES]
        if not hmac.compare_digest(secret.code(b"server", nonces), answer[NONCE_BYTES:]):
            raise NotOurs("what listens there does not know this job's token")
        connection.sendall(secret.code(b"client", nonces))
        self._deadline = None
        connection.settimeout(None)
        self._sent, self._received = _seals(secret, nonces)

    def ask(self, *fields: bytes) -> list[bytes]:
        """Send a request and return the fields of the answer. Raises OSError."""
        self._socket.sendall(self._sent.message(pack(fields)))
        size, code = HEADER.unpack(self._receive(HEADER.size))
        payload = self._receive(size)
        self._received.check(payload, code)
        return unpack(payload)

    def close(self) -> None:
        self._socket.close()

    def _receive(self, size: int) -> bytes:
        if size > MOST_BYTES:
            raise NotOurs(f"a message of {size} bytes")
        parts = []
        while size:
            if self._deadline is not None:
                self._socket.settimeout(max(0.01, self._deadline - time.monotonic()))
            part = self._socket.recv(min(size, 1 << 20))
            if not part:
                raise ConnectionResetError("the other end closed the connection")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def pack(fields: tuple[bytes, ...] | list[bytes]) -> bytes:
    """Several byte strings as one."""
    return b"".join(part for field in fields for part in (_LENGTH.pack(len(field)), field))


def unpack(payload: bytes) -> list[bytes]:
    """The opposite of ``pack``, for what a seal has passed."""
    fields = []
    position = 0
    while position < len(payload):
        start = position + _LENGTH.size
        (size,) = _LENGTH.unpack_from(payload, position)
        fields.append(payload[start : start + size])
        position = start + size
    return fields


def _seals(secret: Secret, nonces: bytes) -> tuple[Seal, Seal]:
    to_server = Seal(secret.code(b"to server", nonces))
    to_client = Seal(secret.code(b"to client", nonces))
    return to_server, to_client
