"""How fast each rank is: a short measurement at the start, from which ``split_batch`` makes the shares."""

import copy
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ddp_slurm.balance import equal_shares, split_batch
from ddp_slurm.training.data import Source
from ddp_slurm.training.random_state import random_state, set_random_state
from ddp_slurm.training.trainer.evaluation import LossFunction
from ddp_slurm.training.trainer.precision import Precision

SWEEPS, REPEATS, ENOUGH_SECONDS = 3, 4, 0.3
"""Each size is timed in several sweeps over all sizes, so that a disturbance must last through all of them to count."""
ALIKE = 0.05
"""Cards of one model whose times differ by less than this are equal: so much is as often noise as it is theirs, and
where Python sets the pace a step costs nearly the same for any share, so that noise would move most of the batch."""


def measured_shares(
    model: nn.Module,
    source: Source,
    loss_function: LossFunction,
    global_batch: int,
    precision: Precision,
    control: dist.ProcessGroup,
    micro_batch: int,
    models: Sequence[str],
) -> list[int]:
    """The shares that fit the ranks' measured speeds, the same on every rank. All ranks call it.

    ``models`` names each rank's card. A rank is measured with ``micro_batch`` samples at most: more may not fit its
    memory. ``model`` is the module without DDP; a copy of it does the work, and the random state is put back.
    """
    shares = equal_shares(global_batch, dist.get_world_size(control))
    for _ in range(
        2
    ):  # the second time around the shares of the first: a line fits best where it was measured
        share = max(2, shares[dist.get_rank(control)], global_batch // (4 * len(shares)))
        cost = measure_cost(model, source, loss_function, share, micro_batch, precision, control)
        costs: list[tuple[float, float]] = [(0.0, 0.0)] * len(shares)
        dist.all_gather_object(costs, cost, group=control)
        shares = split_batch(
            global_batch, alike_made_equal(costs, models, global_batch / len(shares))
        )
    return shares


def alike_made_equal(
    costs: Sequence[tuple[float, float]], models: Sequence[str], samples: float
) -> list[tuple[float, float]]:
    """The costs, with one cost for all cards of a model that take about as long as its middle one for ``samples``."""
    seconds = [alpha + beta * samples for alpha, beta in costs]
    result = list(costs)
    for model in set(models):
        ranks = [rank for rank, name in enumerate(models) if name == model]
        middle = statistics.median_low(seconds[rank] for rank in ranks)
        alike = [rank for rank in ranks if abs(seconds[rank] - middle) <= ALIKE * middle]
        alpha, beta = (statistics.fmean(costs[rank][i] for rank in alike) for i in (0, 1))
        for rank in alike:
            result[rank] = (alpha, beta)
    return result


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
    work = copy.deepcopy(model)
    if not work.training:
        work.train()
    for layer in work.modules():
        if isinstance(layer, nn.SyncBatchNorm):
            layer.eval()  # its forward waits for the slowest rank: all would seem equally slow
    times = [float("inf")] * len(sizes)
    for sweep in range(SWEEPS):
        for i, size in enumerate(sizes):
            if control is not None:
                dist.barrier(group=control)
            seconds = _seconds_of_step(
                work, source, loss_function, size, precision, is_first=sweep == 0
            )
            times[i] = min(times[i], seconds)
    set_random_state(state, source.device)
    return fit_line(sizes, times)


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """The least squares line ``alpha + beta * n`` with alpha >= 0 and beta > 0.

    >>> fit_line([10, 20, 40], [0.3, 0.5, 0.9])
    (0.1, 0.02)
    """
    mean_size, mean_seconds = sum(sizes) / len(sizes), sum(seconds) / len(seconds)
    spread = sum((n - mean_size) ** 2 for n in sizes)
    beta = sum(
        (n - mean_size) * (t - mean_seconds) for n, t in zip(sizes, seconds, strict=True)
    ) / (spread or 1.0)
    alpha = mean_seconds - beta * mean_size
    if beta <= 0 or alpha < 0:  # noise: the line through the origin is the safe reading
        alpha, beta = 0.0, mean_seconds / mean_size
    return round(alpha, 9), round(beta, 12)


def _seconds_of_step(
    work: nn.Module,
    source: Source,
    loss_function: LossFunction,
    size: int,
    precision: Precision,
    *,
    is_first: bool,
) -> float:
    """The fastest of a few steps: the others were disturbed. A size's first one is left out (allocation, kernels)."""
    order = torch.arange(size) % len(source)
    best, spent = float("inf"), 0.0
    for repeat in range(-1 if is_first else 0, REPEATS):
        if repeat > 0 and spent > ENOUGH_SECONDS:
            break
        # Before the clock: a DataLoader starts its workers for each batch here, and in training once an epoch.
        ((inputs, targets),) = source.batches(order, [(0, size)], epoch=0)
        _wait_for_device(source.device)
        started = time.perf_counter()
        with precision.autocast():
            loss = loss_function(work(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        _wait_for_device(source.device)
        if repeat >= 0:
            seconds = time.perf_counter() - started
            best, spent = min(best, seconds), spent + seconds
        work.zero_grad(set_to_none=True)
    return best


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
