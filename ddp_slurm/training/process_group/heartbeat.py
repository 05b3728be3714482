"""Every rank shows at intervals that it is alive, and checks that rank 0 and its store are.

Where a rank is killed, stopped or cut off, NCCL's collectives of the others do not end: the call
waits in the driver, out of reach of any exception, and torch's own watchdog may wait, too. So a
thread in every process checks, and ends the process. It allows a silence as long as a collective
may take.
"""

import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ddp_slurm.training.process_group.ending import Deadline
from ddp_slurm.training.process_group.peers import Peers, left_key

MOST_SECONDS_BETWEEN_BEATS = 30.0


class Heartbeat:
    """Beats in a thread, with a call of ``on_beat`` each time; calls ``on_lost`` there, once, with
    ranks that have been silent for too long. Rank 0 watches all ranks, the others watch rank 0."""

    def __init__(
        self,
        peers: Peers,
        limit_seconds: float,
        on_lost: Callable[[list[int]], None],
        on_beat: Callable[[], None],
    ) -> None:
        self._peers = peers
        self._limit_seconds = limit_seconds
        self._on_lost = on_lost
        self._on_beat = on_beat
        self._watched = peers.others if peers.rank == 0 else [0]
        self._last_beats: dict[int, tuple[bytes, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddp_slurm heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Wait for the end of the thread, so many seconds at most."""
        self._stop.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        pause = min(MOST_SECONDS_BETWEEN_BEATS, self._limit_seconds / 4)
        count = 0
        try:
            while not self._stop.wait(pause):
                self._on_beat()
                count += 1
                silence = self._peers.ends_because(self._peers.rank_0_does_not_respond())
                with Deadline(self._limit_seconds, silence):
                    self._peers.store.set(f"beat/{self._peers.rank}", str(count))
                    lost = self._find_lost()
                if lost and not self._stop.is_set():
                    self._on_lost(lost)
                    return
        except RuntimeError:
            return  # the store is gone, which the thread that waits for messages sees

    def _find_lost(self) -> list[int]:
        now = time.monotonic()
        store = self._peers.store
        lost = []
        for rank in self._watched:
            key = f"beat/{rank}"
            beat = store.get(key) if store.check([key]) else b""
            last_beat, since = self._last_beats.setdefault(rank, (beat, now))
            if beat != last_beat:
                self._last_beats[rank] = (beat, now)
            elif now - since > self._limit_seconds and not store.check([left_key(rank)]):
                lost.append(rank)
        return lost


def group_error_reader(device: torch.device) -> Callable[[], str | None]:
    """Returns the error that the default group is in (TIMEOUT, COMM_ERROR, REMOTE_ERROR), or None.

    Only NCCL reports one, and torch before 2.7 has no way to ask.
    """
    group = dist.group.WORLD
    if device.type != "cuda" or not isinstance(group, dist.ProcessGroup):
        return lambda: None
    get_error = getattr(group._get_backend(device), "get_error", None)
    if get_error is None:
        return lambda: None

    def read() -> str | None:
        try:
            name = str(get_error().name)
        except RuntimeError:  # a backend that knows no errors
            return None
        return None if name == "SUCCESS" else name

    return read
