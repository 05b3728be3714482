"""How much of the gradients' exchange backward hides."""

import copy
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp_slurm.curve import Curve
from ddp_slurm.exchange import SMALLER_BUCKETS, Network, ring_seconds
from ddp_slurm.training.measure.links import measure_ring
from ddp_slurm.training.uneven.calibrate import TrainingStep, made_measurable, timed_step
from ddp_slurm.training.uneven.gradients import wrap_model

REPEATS = 3
FINE_BUCKETS = min(SMALLER_BUCKETS)
"""Larger ones hide less, which the prediction takes off by itself."""
LEAST_PART = 0.2
"""An exchange that takes less than this part of a step's compute shows nothing."""
MOST_SECONDS = 5.0
"""An exchange that takes longer is not waited for."""


def measure_hidden(
    step: TrainingStep, curves: Sequence[Curve], sizes: Sequence[int], gradient_bytes: int
) -> float | None:
    """The part of a step's compute, 0 to 1, during which gradients are exchanged. All ranks call
    it and get the same.

    A step with DistributedDataParallel is timed at the size whose compute takes about as long as
    the exchange. None where the exchange is too short, or too long, to see it, and where the ranks
    have no size in common.

    Args:
        curves: of every rank.
        sizes: samples a rank; those that every rank can take.
    """
    members = dist.get_world_size()
    if members == 1 or not sizes:
        return None
    world = dist.group.WORLD
    assert world is not None
    link = measure_ring(world, step.device)
    in_buckets = Network(gradient_bytes, {}, bucket_bytes=FINE_BUCKETS)
    exchange = ring_seconds(in_buckets, members, link)
    compute_of = {size: max(curve.seconds(size) for curve in curves) for size in sizes}
    size = min(sizes, key=lambda size: abs(compute_of[size] - exchange))
    compute = compute_of[size]
    if exchange > MOST_SECONDS or exchange < LEAST_PART * compute:
        return None
    hidden = (compute + exchange - _seconds_of_whole_step(step, size)) / compute
    return min(1.0, max(0.0, hidden))


def _seconds_of_whole_step(step: TrainingStep, size: int) -> float:
    """Of the slowest rank, with the exchange; the fastest of a few."""
    model, optimizer = copy.deepcopy((step.model, step.optimizer))
    ddp = wrap_model(made_measurable(model), step.device, FINE_BUCKETS)
    best = float("inf")
    for repeat in range(-1, REPEATS):
        inputs, targets = step.get_batch(size)
        clock = torch.zeros(1, dtype=torch.float64, device=step.device)
        dist.all_reduce(clock)
        clock.fill_(timed_step(step, ddp, optimizer, inputs, targets))
        dist.all_reduce(clock, op=dist.ReduceOp.MAX)
        if repeat >= 0:
            best = min(best, clock.item())
    return best
