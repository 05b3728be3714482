"""Shares from the measured times of all ranks' steps."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_slurm.balance import steady_split
from ddp_slurm.curve import Curve, rising
from ddp_slurm.training.exchange import all_gather_values
from ddp_slurm.training.memory.preserve import preserved
from ddp_slurm.training.uneven.calibrate import StepTimes, TrainingStep, card_name

ALIKE = 0.05
"""Cards of one model whose times differ by less than this part, over all sizes, are treated as
equal. Differences of that size are as often noise as real."""


class MeasuredShares(NamedTuple):
    """What the times of all ranks lead to; the same on every rank."""

    shares: list[int]
    """Samples of a global batch of each rank."""
    curves: list[Curve]
    """Seconds of each rank's whole step."""
    computing: list[Curve]
    """Of its forward and backward alone."""


def measured_shares(
    step: TrainingStep,
    global_batch: int,
    control: dist.ProcessGroup,
    max_batch: int | None = None,
) -> MeasuredShares:
    """Samples of a global batch per rank, by the measured times of whole steps.

    The same on every rank. All ranks call it. Model, gradients, optimizer and random state are
    afterwards as they were.

    Args:
        step: on this rank.
        global_batch: samples of one optimizer step over all ranks.
        control: a gloo group over all ranks.
        max_batch: the most samples that this rank runs at once, here and in training; a larger
            share takes several passes. None has no limit.
    """
    world_size = dist.get_world_size(control)
    limit = global_batch if max_batch is None else min(max_batch, global_batch)
    cards = all_gather_values(card_name(step.device), control)
    sizes = ladder(global_batch, world_size)
    with preserved(step.model, step.device):
        times = StepTimes(step, limit)
        times.measure(sizes, control)
        first = _split(times, global_batch, cards, sizes, control)
        # Between sizes of which one is twice the other a straight line misses the bend.
        own = first.shares[dist.get_rank(control)]
        times.measure([3 * own // 4, own, 5 * own // 4], control)
        return _split(times, global_batch, cards, sizes, control)


def _split(
    times: StepTimes,
    global_batch: int,
    cards: Sequence[str],
    sizes: Sequence[int],
    control: dist.ProcessGroup,
) -> MeasuredShares:
    rows = all_gather_values([sorted(times.seconds.items()), times.limit, times.update], control)
    measured = [curve_of(points) for points, _, _ in rows]
    alike = alike_made_equal(measured, cards, sizes)
    curves = [c.in_passes_of(limit) for c, (_, limit, _) in zip(alike, rows, strict=True)]
    computing = [c.without(update) for c, (_, _, update) in zip(curves, rows, strict=True)]
    return MeasuredShares(steady_split(global_batch, curves), curves, computing)


def curve_of(points: Sequence[tuple[int, float]]) -> Curve:
    """Through measured points in which later ones may be faster by noise."""
    seconds = rising([seconds for _, seconds in points])
    return Curve.through([(n, t) for (n, _), t in zip(points, seconds, strict=True)])


def ladder(global_batch: int, world_size: int) -> list[int]:
    """The sizes that every rank times: from an eighth of the equal share to four times it.

    >>> ladder(128, 2)
    [8, 16, 32, 64, 128]
    """
    share = -(-global_batch // world_size)
    first = max(2, share // 8)  # a BatchNorm1d has no variance of one sample
    sizes = [first * 2**i for i in range(6)]
    return sorted({min(size, global_batch) for size in sizes})


def slowest_step(
    step: TrainingStep, shares: Sequence[int], control: dist.ProcessGroup, max_batch: int | None
) -> float:
    """Seconds of the slowest rank's step; the same number on every rank.

    All ranks call it. Model, gradients, optimizer and random state are afterwards as they were.
    """
    share = max(1, shares[dist.get_rank(control)])
    with preserved(step.model, step.device):
        times = StepTimes(step, share if max_batch is None else min(share, max_batch))
        times.measure([share], control)
    [(size, own)] = times.seconds.items()
    seconds = torch.tensor(own * share / size)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=control)
    return seconds.item()


def alike_made_equal(
    curves: Sequence[Curve], cards: Sequence[str], sizes: Sequence[int]
) -> list[Curve]:
    """The curves, with one common curve for cards of one model that differ by noise only.

    Args:
        curves: per rank.
        cards: the card's model per rank.
        sizes: at these the times are compared with those of the model's median card.
    """
    scale = [statistics.fmean(math.log(curve.seconds(n)) for n in sizes) for curve in curves]
    result = list(curves)
    for card in set(cards):
        ranks = [rank for rank, name in enumerate(cards) if name == card]
        middle = statistics.median_low(scale[rank] for rank in ranks)
        alike = [rank for rank in ranks if abs(scale[rank] - middle) <= math.log1p(ALIKE)]
        common = _mean([curves[rank] for rank in alike])
        for rank in alike:
            result[rank] = common
    return result


def _mean(curves: Sequence[Curve]) -> Curve:
    sizes = sorted({n for curve in curves for n in curve.samples if n > 0})
    return Curve.through([(n, statistics.fmean(c.seconds(n) for c in curves)) for n in sizes])
