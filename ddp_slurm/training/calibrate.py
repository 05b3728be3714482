"""How fast each rank is: a short measurement at the start, from which ``split_batch`` makes the shares."""

import copy
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..balance import equal_shares, split_batch
from .data import Source
from .evaluation import LossFunction
from .precision import Precision
from .random_state import random_state, set_random_state

REPEATS, ENOUGH_SECONDS = 12, 1.0


def measured_shares(
    model: nn.Module,
    source: Source,
    loss_function: LossFunction,
    global_batch: int,
    precision: Precision,
    control: dist.ProcessGroup,
    micro_batch: int,
) -> list[int]:
    """The shares that fit the ranks' measured speeds, the same on every rank. All ranks call it.

    A rank is measured with ``micro_batch`` samples at most: more may not fit its memory. ``model`` is the module
    without DDP; a copy of it does the work, and the random state is put back.
    """
    shares = equal_shares(global_batch, dist.get_world_size(control))
    for _ in range(2):  # the second time around the shares of the first: a line fits best where it was measured
        share = max(2, shares[dist.get_rank(control)], global_batch // (4 * len(shares)))
        cost = measure_cost(model, source, loss_function, share, micro_batch, precision, control)
        costs: list[tuple[float, float]] = [(0.0, 0.0)] * len(shares)
        dist.all_gather_object(costs, cost, group=control)
        shares = split_batch(global_batch, costs)
    return shares


def measure_cost(
    model: nn.Module,
    source: Source,
    loss_function: LossFunction,
    share: int,
    micro_batch: int,
    precision: Precision,
    control: dist.ProcessGroup | None = None,
) -> tuple[float, float]:
    """``(alpha_seconds, beta_seconds_per_sample)`` of forward and backward, fitted around ``share`` samples.

    The ranks begin together: ranks that share a host's CPUs or its power budget must be measured as they will run.
    """
    share = min(share, micro_batch)
    least = min(2, share)  # a BatchNorm1d has no variance of one sample
    sizes = [max(least, share // 2), share, min(3 * share // 2, micro_batch)]
    state = random_state(source.device)
    work = copy.deepcopy(model).train()
    times = []
    for size in sizes:
        if control is not None:
            dist.barrier(group=control)
        times.append(_seconds_of_step(work, source, loss_function, size, precision))
    set_random_state(state, source.device)
    return fit_line(sizes, times)


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """The least squares line ``alpha + beta * n`` with alpha >= 0 and beta > 0.

    >>> fit_line([10, 20, 40], [0.3, 0.5, 0.9])
    (0.1, 0.02)
    """
    mean_size, mean_seconds = sum(sizes) / len(sizes), sum(seconds) / len(seconds)
    spread = sum((n - mean_size) ** 2 for n in sizes)
    beta = sum((n - mean_size) * (t - mean_seconds) for n, t in zip(sizes, seconds, strict=True)) / (spread or 1.0)
    alpha = mean_seconds - beta * mean_size
    if beta <= 0 or alpha < 0:  # noise: the line through the origin is the safe reading
        alpha, beta = 0.0, mean_seconds / mean_size
    return round(alpha, 9), round(beta, 12)


def _seconds_of_step(
    work: nn.Module, source: Source, loss_function: LossFunction, size: int, precision: Precision
) -> float:
    """The fastest of a few steps: the others were disturbed. The first is not counted (allocation, kernel choice)."""
    order = torch.arange(size) % len(source)
    best, spent = float("inf"), 0.0
    for repeat in range(REPEATS + 1):
        if repeat > 1 and spent > ENOUGH_SECONDS:
            break
        _wait_for_device(source.device)
        started = time.perf_counter()
        for inputs, targets in source.batches(order, [(0, size)], epoch=0):
            with precision.autocast():
                loss = loss_function(work(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
        _wait_for_device(source.device)
        if repeat:
            seconds = time.perf_counter() - started
            best, spent = min(best, seconds), spent + seconds
        work.zero_grad(set_to_none=True)
    return best


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
