"""How many samples of the global batch each rank takes. Standard library only."""

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from ddp_slurm.curve import Curve
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.job_env import SHARES, JobEnv

Cost = tuple[float, float]
"""``(alpha_seconds, beta_seconds_per_sample)``: a step of n samples takes alpha + beta * n."""


class BalanceError(DdpSlurmError, ValueError):
    """A split of the batch that cannot be made."""


def equal_shares(global_batch: int, world_size: int) -> list[int]:
    """Samples per rank, as equal as whole numbers allow; the first ranks take the rest.

    >>> equal_shares(10, 4)
    [3, 3, 2, 2]
    """
    if world_size < 1:
        raise BalanceError(f"world size {world_size}: at least one rank is needed")
    if global_batch < 0:
        raise BalanceError(f"global batch {global_batch} is negative")
    share, rest = divmod(global_batch, world_size)
    return [share + 1] * rest + [share] * (world_size - rest)


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """``total`` samples in proportion to whole-number weights, by largest remainder.

    Ties go to the first ranks. A weight of zero gets nothing.

    >>> apportion(10, [72, 24, 5])
    [7, 2, 1]

    Source: Hamilton's method of apportionment.
    """
    scale = sum(weights)
    has_negative = total < 0 or any(weight < 0 for weight in weights)
    if has_negative or (scale == 0 and total > 0):
        raise BalanceError(f"{total} samples cannot be shared by the weights {list(weights)}")
    if scale == 0:
        return [0] * len(weights)
    shares = [total * weight // scale for weight in weights]
    remainders = [total * weight % scale for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (-remainders[rank], rank))
    for rank in by_remainder[: total - sum(shares)]:
        shares[rank] += 1
    return shares


def planned_shares(
    global_batch: int, world_size: int, environ: Mapping[str, str] | None = None
) -> list[int]:
    """Samples of one global batch per rank, as the job's plan has them, or equal without a plan.

    A plan for another global batch keeps its proportions. Raises BalanceError for a plan for
    another number of ranks.
    """
    shares = JobEnv.from_environ(environ).shares
    if shares is None:
        return equal_shares(global_batch, world_size)
    if len(shares) != world_size:
        raise BalanceError(f"{SHARES} holds {len(shares)} shares for {world_size} ranks")
    return list(shares) if sum(shares) == global_batch else apportion(global_batch, shares)


def split_batch(
    global_batch: int,
    costs: Sequence[Cost | Curve],
    max_batch: int | Sequence[int] | None = None,
) -> list[int]:
    """The samples per rank for which the slowest rank's step is shortest: the exact optimum.

    Args:
        global_batch: samples of one optimizer step over all ranks.
        costs: of each rank: ``(alpha_seconds, beta_seconds_per_sample)``, or a Curve.
        max_batch: the most samples that a rank can take, one number for all ranks or one for each.

    Returns one number per rank, their sum exactly ``global_batch``. Of several optima it is the one
    that also gives the second slowest rank the least, and so on; equal ranks differ by one sample
    at most.

    >>> split_batch(100, [(0.0, 0.001), (0.0, 0.003)])
    [75, 25]
    >>> split_batch(100, [(0.0, 0.001), (0.0, 0.003)], max_batch=60)
    [60, 40]

    Raises BalanceError for a negative batch, no ranks, costs that are negative or not finite, and a
    batch above the sum of ``max_batch``.
    """
    curves = _curves(global_batch, costs)
    limits = _checked_limits(global_batch, len(costs), max_batch)
    # The optimum takes the global_batch cheapest of all "the n-th sample of rank r": greedy is
    # exact because a rank's time only grows. Bisection on the time finds most of them; the greedy
    # loop places the few that are left.
    shares = _below_optimum(global_batch, curves, limits)

    def seconds_with_one_more(rank: int) -> tuple[float, int, int]:
        return curves[rank].seconds(shares[rank] + 1), shares[rank], rank

    not_full = [rank for rank in range(len(costs)) if shares[rank] < limits[rank]]
    queue = [seconds_with_one_more(rank) for rank in not_full]
    heapq.heapify(queue)
    for _ in range(global_batch - sum(shares)):
        _, _, rank = heapq.heappop(queue)
        shares[rank] += 1
        if shares[rank] < limits[rank]:
            heapq.heappush(queue, seconds_with_one_more(rank))
    return shares


LARGER = 8
"""The larger batch, as a multiple, whose proportions decide between equally fast shares."""
AS_FAST = 0.005
"""Steps whose times differ by less than this part are equally fast."""


def steady_split(global_batch: int, curves: Sequence[Curve]) -> list[int]:
    """As ``split_batch``, but of equally fast shares those in a larger batch's proportions.

    Where a fixed cost sets the pace of a step, many shares are equally fast, and ``split_batch``
    fills whichever rank has the smallest cost: by the noise of a measurement most of the batch. In
    a larger batch the cards decide.

    >>> flat = Curve((0.0, 64.0), (0.010, 0.010), 0.010 / 64)
    >>> slower = Curve((0.0, 64.0), (0.0101, 0.0101), 0.0101 / 64)
    >>> split_batch(80, [flat, slower]), steady_split(80, [flat, slower])
    ([64, 16], [40, 40])
    """
    fastest = split_batch(global_batch, curves)
    seconds = max(curve.seconds(n) for curve, n in zip(curves, fastest, strict=True))
    allowed = [curve.samples_within(seconds * (1 + AS_FAST), global_batch) for curve in curves]
    if sum(allowed) < global_batch:
        return fastest
    larger = split_batch(LARGER * global_batch, curves)
    pace = [(0.0, 1 / max(samples, 0.5)) for samples in larger]
    return split_batch(global_batch, pace, allowed)


def _curves(global_batch: int, costs: Sequence[Cost | Curve]) -> list[Curve]:
    if not costs:
        raise BalanceError(
            "no costs: one (alpha_seconds, beta_seconds_per_sample) per rank is needed"
        )
    if global_batch < 0:
        raise BalanceError(f"global batch {global_batch} is negative")
    return [
        cost if isinstance(cost, Curve) else _line(rank, *cost) for rank, cost in enumerate(costs)
    ]


def _line(rank: int, alpha: float, beta: float) -> Curve:
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in (alpha, beta)):
        raise BalanceError(
            f"rank {rank}: cost ({alpha}, {beta}) must be two finite numbers of seconds >= 0"
        )
    return Curve.line(alpha, beta)


def _checked_limits(
    global_batch: int, ranks: int, max_batch: int | Sequence[int] | None
) -> list[int]:
    """The most samples of each rank."""
    if max_batch is None:
        return [global_batch] * ranks
    limits = [max_batch] * ranks if isinstance(max_batch, int) else list(max_batch)
    if len(limits) != ranks:
        raise BalanceError(f"max_batch has {len(limits)} numbers for {ranks} ranks")
    if any(limit < 0 for limit in limits):
        raise BalanceError(f"max_batch {limits} holds a negative number")
    if sum(limits) < global_batch:
        raise BalanceError(
            f"global batch {global_batch} does not fit: the ranks can take {sum(limits)} at most "
            f"(max_batch {limits})"
        )
    return [min(limit, global_batch) for limit in limits]


def _below_optimum(global_batch: int, curves: Sequence[Curve], limits: Sequence[int]) -> list[int]:
    """Shares close to the optimum, none of them above it."""
    ranks = list(zip(curves, limits, strict=True))
    below, _ = around_optimum(global_batch, Counter(ranks))
    if below == 0.0:  # samples that cost nothing
        return [0] * len(ranks)
    # One less: the division may round up.
    most = {rank: max(0, rank[0].samples_within(below, rank[1]) - 1) for rank in set(ranks)}
    return [most[rank] for rank in ranks]


def around_optimum(
    global_batch: int, ranks: Mapping[tuple[Curve, int], int]
) -> tuple[float, float]:
    """Seconds just below and just above the shortest time of the slowest rank's step.

    Args:
        ranks: the number of ranks of each kind, which is a curve and the most samples.
    """
    low = 0.0
    high = max(curve.seconds(limit) for curve, limit in ranks)
    for _ in range(64):
        middle = (low + high) / 2
        samples = sum(
            curve.samples_within(middle, limit) * count for (curve, limit), count in ranks.items()
        )
        if samples < global_batch:
            low = middle
        else:
            high = middle
    return low, high
