"""A store for torch whose server and clients prove to each other that they know the job's token."""

import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ddp_slurm.training.process_group.sealed import ClientSide, Secret
from ddp_slurm.training.process_group.values import LATE

ATTEMPT_SECONDS = 5.0
"""How long a rank waits for one port's answer before it tries the next."""
MOST_PAUSE_SECONDS = 0.5

_kept: list[Store] = []
"""torch's C++ side does not keep the Python object whose methods it calls."""


class TokenStore(Store):
    """One connection to rank 0's store; a blocking wait holds it.

    Raises dist.DistNetworkError where rank 0 is gone, dist.DistStoreError for a key that did not
    appear in time: RuntimeErrors both.
    """

    def __init__(self, address: str, ports: Sequence[int], secret: Secret, seconds: float) -> None:
        """Connects, within ``seconds``, to the first of the ports where rank 0 is."""
        super().__init__()
        self._address = address
        self._secret = secret
        self._seconds = seconds
        self._client, self._port = _connect(address, ports, secret, seconds)
        self._lock = threading.Lock()
        _kept.append(self)

    def clone(self) -> "TokenStore":
        """A second connection."""
        return TokenStore(self._address, [self._port], self._secret, self._seconds)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return self._ask("get", self._limit(None), key)

    def add(self, key: str, number: int) -> int:
        return int(self._ask("add", key, str(number)))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", *keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", self._limit(timeout), *keys)

    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        return self._ask("compare_set", key, expected, wanted)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        return int(self._ask("count"))

    def _limit(self, timeout: timedelta | None) -> str:
        limit: timedelta = timeout or self.timeout  # type: ignore[attr-defined]
        return str(limit.total_seconds())

    def _ask(self, *fields: str | bytes) -> bytes:
        request = [field.encode() if isinstance(field, str) else field for field in fields]
        with self._lock:
            try:
                state, *answer = self._client.ask(*request)
            except OSError as error:
                raise dist.DistNetworkError(
                    f"the connection to rank 0's store is gone: {error}"
                ) from error
            except BaseException:
                self._client.close()  # what comes next would be this request's answer
                raise
        if state == LATE:
            missing = ", ".join(key.decode(errors="replace") for key in answer)
            raise dist.DistStoreError(f"timed out: no value of {missing} in rank 0's store")
        return answer[0]


def _connect(
    address: str, ports: Sequence[int], secret: Secret, seconds: float
) -> tuple[ClientSide, int]:
    """A connection, and its port. Raises dist.DistNetworkError without one in time."""
    deadline = time.monotonic() + seconds
    errors: dict[int, OSError] = {}
    pause = 0.02
    while True:
        for port in ports:
            try:
                return _greet(address, port, secret), port
            except OSError as error:
                errors[port] = error
        if time.monotonic() + pause > deadline:
            reasons = "; ".join(f"port {port}: {error}" for port, error in errors.items())
            raise dist.DistNetworkError(reasons)
        time.sleep(pause)
        pause = min(2 * pause, MOST_PAUSE_SECONDS)


def _greet(address: str, port: int, secret: Secret) -> ClientSide:
    connection = socket.create_connection((address, port), ATTEMPT_SECONDS)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return ClientSide(connection, secret, ATTEMPT_SECONDS)
    except OSError:
        connection.close()
        raise
