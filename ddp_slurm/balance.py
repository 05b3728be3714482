"""How many samples of the global batch each rank takes. Standard library only: login nodes plan with it too."""

import heapq
import math
import os
from collections.abc import Mapping, Sequence

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.hostlist import expand_tasks_per_node


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
    return [share + (rank < rest) for rank in range(world_size)]


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """``total`` samples shared out in proportion to whole-number weights, by largest remainder.

    Ties go to the first ranks. A weight of zero gets nothing.

    >>> apportion(10, [72, 24, 5])
    [7, 2, 1]

    Source: Hamilton's method of apportionment.
    """
    scale = sum(weights)
    if total < 0 or any(weight < 0 for weight in weights) or (scale == 0 and total > 0):
        raise BalanceError(f"{total} samples cannot be shared out by the weights {list(weights)}")
    if scale == 0:
        return [0] * len(weights)
    shares = [total * weight // scale for weight in weights]
    by_remainder = sorted(
        range(len(weights)), key=lambda rank: (-(total * weights[rank] % scale), rank)
    )
    for rank in by_remainder[: total - sum(shares)]:
        shares[rank] += 1
    return shares


def planned_shares(
    global_batch: int, world_size: int, environ: Mapping[str, str] | None = None
) -> list[int]:
    """Samples of one global batch per rank, as the plan of the job has them (DDP_SLURM_SHARES), else equal.

    A plan made for another global batch keeps its proportions. Raises BalanceError for a plan of another world.
    """
    planned = (os.environ if environ is None else environ).get("DDP_SLURM_SHARES")
    if not planned:
        return equal_shares(global_batch, world_size)
    shares = expand_tasks_per_node(planned)
    if len(shares) != world_size:
        raise BalanceError(
            f"DDP_SLURM_SHARES={planned!r} holds {len(shares)} shares for {world_size} ranks"
        )
    return shares if sum(shares) == global_batch else apportion(global_batch, shares)


def split_batch(
    global_batch: int,
    costs: Sequence[tuple[float, float]],
    max_batch: int | Sequence[int] | None = None,
) -> list[int]:
    """The samples per rank for which the slowest rank's step is as short as can be: the exact integer optimum.

    Args:
        global_batch: samples of one optimizer step over all ranks.
        costs: per rank ``(alpha_seconds, beta_seconds_per_sample)``; a step of n samples takes alpha + beta * n.
        max_batch: the most samples that a rank can take, one number for all ranks or one for each.

    Returns one number per rank, their sum exactly ``global_batch``. Of several optima it is the one that also
    gives the second slowest rank the least, and so on; equal ranks differ by one sample at most.

    >>> split_batch(100, [(0.0, 0.001), (0.0, 0.003)])
    [75, 25]
    >>> split_batch(100, [(0.0, 0.001), (0.0, 0.003)], max_batch=60)
    [60, 40]

    Raises BalanceError for a negative batch, no ranks, costs that are negative or not finite, and a batch above
    the sum of ``max_batch``.
    """
    limits = _checked_limits(global_batch, costs, max_batch)
    # The optimum takes the global_batch cheapest of all "the n-th sample of rank r": greedy is exact because a rank's
    # time only grows. Most of those are found by bisection on the time; the greedy loop places the few that are left.
    shares = _below_optimum(global_batch, costs, limits)
    queue = [
        (alpha + beta * (shares[rank] + 1), shares[rank], rank)
        for rank, (alpha, beta) in enumerate(costs)
        if shares[rank] < limits[rank]
    ]
    heapq.heapify(queue)
    for _ in range(global_batch - sum(shares)):
        _, _, rank = heapq.heappop(queue)
        shares[rank] += 1
        if shares[rank] < limits[rank]:
            alpha, beta = costs[rank]
            heapq.heappush(queue, (alpha + beta * (shares[rank] + 1), shares[rank], rank))
    return shares


def _checked_limits(
    global_batch: int, costs: Sequence[tuple[float, float]], max_batch: int | Sequence[int] | None
) -> list[int]:
    if not costs:
        raise BalanceError(
            "no costs: one (alpha_seconds, beta_seconds_per_sample) per rank is needed"
        )
    if global_batch < 0:
        raise BalanceError(f"global batch {global_batch} is negative")
    for rank, (alpha, beta) in enumerate(costs):
        if not (math.isfinite(alpha) and math.isfinite(beta) and alpha >= 0 and beta >= 0):
            raise BalanceError(
                f"rank {rank}: cost ({alpha}, {beta}) must be two finite numbers of seconds >= 0"
            )
    if max_batch is None:
        return [global_batch] * len(costs)
    limits = [max_batch] * len(costs) if isinstance(max_batch, int) else list(max_batch)
    if len(limits) != len(costs):
        raise BalanceError(f"max_batch has {len(limits)} numbers for {len(costs)} ranks")
    if any(limit < 0 for limit in limits):
        raise BalanceError(f"max_batch {limits} holds a negative number")
    if sum(limits) < global_batch:
        raise BalanceError(
            f"global batch {global_batch} does not fit: the ranks can take {sum(limits)} at most (max_batch {limits})"
        )
    return [min(limit, global_batch) for limit in limits]


def _below_optimum(
    global_batch: int, costs: Sequence[tuple[float, float]], limits: Sequence[int]
) -> list[int]:
    """Shares that no optimum undercuts, close to it from below."""
    low, high = (
        0.0,
        max(alpha + beta * limit for (alpha, beta), limit in zip(costs, limits, strict=True)),
    )
    best = [0] * len(costs)
    for _ in range(64):
        middle = (low + high) / 2
        shares = [
            _samples_within(middle, *cost, limit) for cost, limit in zip(costs, limits, strict=True)
        ]
        if sum(shares) <= global_batch:
            low, best = middle, shares
        else:
            high = middle
    return [max(0, share - 1) for share in best]  # one less: the division below may round up


def _samples_within(seconds: float, alpha: float, beta: float, limit: int) -> int:
    if alpha + beta > seconds:
        return 0
    if alpha + beta * limit <= seconds:
        return limit
    return min(limit, int((seconds - alpha) / beta))
