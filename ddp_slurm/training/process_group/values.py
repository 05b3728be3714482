"""The values of rank 0's store, with the meaning that torch's TCPStore gives each request."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

OK = b"ok"
LATE = b"late"
"""The first field of an answer: the request is done, or a key did not appear in time."""

Client = TypeVar("Client")


@dataclass
class Wait(Generic[Client]):
    """A request that is answered when keys exist."""

    client: Client
    missing: set[bytes]
    deadline: float
    value_of: bytes | None = None
    """The key whose value is the answer."""


@dataclass
class Values(Generic[Client]):
    """Answers requests by calling ``answer`` with the client and the fields; some of them later."""

    answer: Callable[[Client, list[bytes]], None]
    values: dict[bytes, bytes] = field(default_factory=dict)
    _waits: dict[Client, Wait[Client]] = field(default_factory=dict)
    _waits_for: dict[bytes, set[Client]] = field(default_factory=dict)

    def serve(self, client: Client, fields: list[bytes]) -> None:
        """A request: its name, and its arguments. A client sends one after the other."""
        name, *rest = fields
        if name in (b"get", b"wait"):
            seconds, *keys = rest
            self._wait(client, keys, float(seconds), keys[0] if name == b"get" else None)
            return
        serve: dict[bytes, Callable[..., bytes]] = {
            b"set": self._set,
            b"add": self._add,
            b"check": self._check,
            b"compare_set": self._compare_set,
            b"delete": self._delete,
            b"count": lambda: b"%d" % len(self.values),
        }
        self.answer(client, [OK, serve[name](*rest)])

    def forget(self, client: Client) -> None:
        """The client's wait, if it has one, is over."""
        wait = self._waits.pop(client, None)
        if wait is not None:
            for key in wait.missing:
                self._waits_for[key].discard(client)

    def end_waits(self, now: float) -> None:
        """Answer those that have waited for too long; ``now`` as of ``time.monotonic``."""
        late = [client for client, wait in self._waits.items() if wait.deadline <= now]
        for client in late:
            missing = sorted(self._waits[client].missing)
            self.forget(client)
            self.answer(client, [LATE, *missing])

    def _set(self, key: bytes, value: bytes) -> bytes:
        self.values[key] = value
        for client in self._waits_for.pop(key, set()):
            wait = self._waits[client]
            wait.missing.discard(key)
            if not wait.missing:
                del self._waits[client]
                self._answer_wait(wait)
        return b""

    def _add(self, key: bytes, number: bytes) -> bytes:
        total = b"%d" % (int(self.values.get(key, b"0")) + int(number))
        self._set(key, total)
        return total

    def _check(self, *keys: bytes) -> bytes:
        return b"1" if all(key in self.values for key in keys) else b""

    def _compare_set(self, key: bytes, expected: bytes, wanted: bytes) -> bytes:
        if key not in self.values and expected:
            return expected
        if self.values.get(key, b"") == expected:
            self._set(key, wanted)
        return self.values[key]

    def _delete(self, key: bytes) -> bytes:
        return b"1" if self.values.pop(key, None) is not None else b""

    def _wait(
        self, client: Client, keys: list[bytes], seconds: float, value_of: bytes | None
    ) -> None:
        missing = {key for key in keys if key not in self.values}
        wait = Wait(client, missing, time.monotonic() + seconds, value_of)
        if not missing:
            self._answer_wait(wait)
            return
        self._waits[client] = wait
        for key in missing:
            self._waits_for.setdefault(key, set()).add(client)

    def _answer_wait(self, wait: Wait[Client]) -> None:
        value = b"" if wait.value_of is None else self.values[wait.value_of]
        self.answer(wait.client, [OK, value])
