"""How long a step's own work takes on a rank, without any wait for the others."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch


class StepClock:
    """Times the parts of one step, once it was started; else it does nothing.

    On a GPU by events, which wait for nothing: what is read some steps later has long happened.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_on = False
        self._has_events = device.type == "cuda"
        self._parts: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Time the next step."""
        self.is_on = True
        self._parts = []

    def stop(self) -> None:
        self.is_on = False

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """Around work of the step that no other rank has a part in."""
        if not self.is_on:
            yield
            return
        before = self._now()
        yield
        self._parts.append((before, self._now()))

    def seconds(self) -> list[float]:
        """Of each part of the step that was timed last."""
        if not self._has_events:
            return [after - before for before, after in self._parts]
        for _, after in self._parts:
            after.synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in self._parts]

    def _now(self) -> Any:
        if not self._has_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
