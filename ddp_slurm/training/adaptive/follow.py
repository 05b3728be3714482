"""All ranks time the same steps, exchange the times in the background, and agree on new shares."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_slurm.curve import Curve
from ddp_slurm.training.adaptive.clock import StepClock
from ddp_slurm.training.adaptive.rule import Seen, Speeds

FIRST = (10, 20, 30)
EVERY = 50
"""Steps that are measured. In them backward hides nothing of the exchange, which costs at most half
of a step: a hundredth of all."""
LAG = 5
"""Steps from a measurement to its use. The GPU has finished it by then: nobody waits for it."""


class Change(NamedTuple):
    """New shares, and the seconds of the slowest rank's work with the old and the new ones."""

    shares: list[int]
    before: float
    after: float


class Follower:
    """Counts whole steps. All ranks make it, and call every method together.

    Args:
        curves: of every rank, see ``Speeds``.
        control: a gloo group over all ranks.
        clock: of this rank's steps.
    """

    def __init__(
        self, curves: Sequence[Curve], control: dist.ProcessGroup, clock: StepClock
    ) -> None:
        self.speeds = Speeds(curves)
        self._control = control
        self._clock = clock
        self._steps = 0
        self._measured_at = -LAG - 1
        self._since = 0.0
        self._sums = torch.zeros(len(curves), 3, dtype=torch.float64)
        self._work: dist.Work | None = None

    def before_step(self, shares: Sequence[int]) -> Change | None:
        """Call it before a whole step; the new shares, from this step on, if there are any."""
        change = self._change(shares)
        if self._steps in FIRST or (self._steps > 0 and self._steps % EVERY == 0):
            self._measured_at = self._steps
            self._clock.start()
        return change

    def after_step(self) -> None:
        if self._clock.is_on:
            self._clock.stop()
            self._since = time.perf_counter()
        self._steps += 1
        if self._steps == self._measured_at + LAG:
            self._work = self._send()

    def finish(self) -> None:
        """Wait for what is on its way."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _send(self) -> dist.Work | None:
        compute, update = self._clock.seconds()
        step = (time.perf_counter() - self._since) / (LAG - 1)
        self._sums.zero_()
        self._sums[dist.get_rank(self._control)] = torch.tensor([compute, update, step])
        return dist.all_reduce(self._sums, group=self._control, async_op=True)

    def _change(self, shares: Sequence[int]) -> Change | None:
        if self._work is None:
            return None
        self.finish()
        self.speeds.add(shares, [Seen(*row) for row in self._sums.tolist()])
        found = self.speeds.better(shares)
        if found is None:
            return None
        return Change(found, self.speeds.slowest(shares), self.speeds.slowest(found))
