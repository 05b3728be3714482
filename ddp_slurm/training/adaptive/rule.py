"""When a rank's speed has changed, and which shares fit. Pure: the same on every rank."""

import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ddp_slurm.balance import split_batch
from ddp_slurm.curve import Curve

DEAD_BAND = 0.03
"""New shares are taken if they shorten a step by more than this part. Equal cards differ by less,
so their shares stay; and so do all where the work is a small part of a step."""
KEPT = 3
"""Measurements kept for each rank. Their median ignores one that was disturbed, and follows a
change that two have seen."""


class Seen(NamedTuple):
    """Seconds of one step on one rank."""

    compute: float
    """Forward and backward of its share."""
    update: float
    """The optimizer's step, whatever the share."""
    step: float = 0.0
    """A whole step, with the exchange and all waiting."""


class Speeds:
    """What the ranks' work takes now.

    Args:
        curves: seconds of a step against its samples for each rank, measured at the start. What is
            seen later says how many times slower the whole curve has become.
    """

    def __init__(self, curves: Sequence[Curve]) -> None:
        self._curves = curves
        self._slower = [deque([1.0], KEPT) for _ in curves]
        self._updates = [deque([0.0], KEPT) for _ in curves]
        self._steps: deque[float] = deque(maxlen=KEPT)

    def add(self, shares: Sequence[int], seen: Sequence[Seen]) -> None:
        """A measurement of every rank, each at its share."""
        if not self._steps:  # the first one replaces what was assumed
            for values in (*self._slower, *self._updates):
                values.clear()
        for rank, (share, each) in enumerate(zip(shares, seen, strict=True)):
            at_start = self._curves[rank].seconds(share)
            known = self._slower[rank][-1] if self._slower[rank] else 1.0
            # Without samples there is nothing to see: the last speed that is known stays.
            self._slower[rank].append(each.compute / at_start if at_start else known)
            self._updates[rank].append(each.update)
        self._steps.append(min(each.step for each in seen))

    def slower(self, rank: int) -> float:
        """Times as slow as at the start."""
        return statistics.median(self._slower[rank])

    def curves(self) -> list[Curve]:
        """Seconds of each rank's step, with the update."""
        now = []
        for rank, curve in enumerate(self._curves):
            slower = self.slower(rank)
            update = statistics.median(self._updates[rank])
            times = tuple(slower * seconds + update for seconds in curve.times)
            now.append(Curve(curve.samples, times, slower * curve.slope))
        return now

    def slowest(self, shares: Sequence[int]) -> float:
        """Seconds of the slowest rank's work."""
        pairs = zip(self.curves(), shares, strict=True)
        return max(curve.seconds(share) for curve, share in pairs)

    def better(self, shares: Sequence[int]) -> list[int] | None:
        """Shares of the same sum, if they are clearly faster. None before enough was seen."""
        if len(self._updates[0]) < KEPT:
            return None
        found = split_batch(sum(shares), self.curves())
        work = self.slowest(shares)
        whole_step = max(work, statistics.median(self._steps))
        is_worth_it = work - self.slowest(found) > DEAD_BAND * whole_step
        return found if is_worth_it else None
