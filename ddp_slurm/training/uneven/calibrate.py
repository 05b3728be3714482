"""How fast each rank is: a measurement at the start, from which ``split_batch`` makes shares."""

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_slurm.balance import equal_shares, split_batch
from ddp_slurm.training.exchange import all_gather_values
from ddp_slurm.training.random_state import random_state, set_random_state

SWEEPS = 3
"""Each size is timed in several sweeps over all sizes: a disturbance only counts if it lasts
through all of them."""
REPEATS = 4
"""Steps of one size in a sweep."""
ENOUGH_SECONDS = 0.3
"""A size whose steps took this long in a sweep is not repeated further."""
ALIKE = 0.05
"""Cards of one model whose times differ by less than this part are treated as equal. Differences
of that size are as often noise as real, and where Python sets the pace a step costs nearly the
same for any share, so that noise would move most of the batch."""

Cost = tuple[float, float]
"""``(alpha_seconds, beta_seconds_per_sample)``: a step of n samples takes alpha + beta * n."""


@dataclass(frozen=True)
class TrainingStep:
    """What is measured: forward, loss and backward of a batch. No communication."""

    model: nn.Module
    """The module without DistributedDataParallel, on ``device``. A copy of it does the work."""
    loss_function: Callable[[Any, Any], Tensor]
    """(outputs, targets) to a scalar."""
    get_batch: Callable[[int], tuple[Any, Any]]
    """Number of samples to (inputs, targets) on ``device``; its time is not measured."""
    device: torch.device
    autocast: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    """Makes the context of forward and loss, such as ``lambda: torch.autocast("cuda")``."""
    optimizer: Optimizer | None = None
    """Over the model's parameters; its step is in the times of ``ddp-slurm measure``."""
    precision: str | None = None
    """fp32, fp16 or bf16; None: that of the parameters."""

    @property
    def precision_name(self) -> str:
        """As the file of speeds has it."""
        dtype = next(self.model.parameters()).dtype
        if torch.is_autocast_enabled():
            dtype = torch.get_autocast_dtype("cuda")
        return self.precision or str(dtype).split(".")[-1]


def measured_shares(
    step: TrainingStep,
    global_batch: int,
    control: dist.ProcessGroup,
    max_batch: int | None = None,
) -> tuple[list[int], list[Cost]]:
    """Samples of a global batch per rank, by the measured speeds, and these speeds.

    The same on every rank. All ranks call it. Model, gradients and random state are afterwards as
    they were.

    Args:
        step: on this rank.
        global_batch: samples of one optimizer step over all ranks.
        control: a gloo group over all ranks.
        max_batch: the most samples that are run at once, here and in training; more may not fit
            the memory. None has no limit.
    """
    world_size = dist.get_world_size(control)
    cards = all_gather_values(card_name(step.device), control)
    shares = equal_shares(global_batch, world_size)
    limit = global_batch if max_batch is None else max_batch
    costs: list[Cost] = []
    # Twice, the second time around the shares of the first: a line fits best where it was measured.
    for _ in range(2):
        own_share = shares[dist.get_rank(control)]
        share = max(2, own_share, global_batch // (4 * world_size))
        cost = measure_cost(step, share, limit, control)
        measured: list[Cost] = [(alpha, beta) for alpha, beta in all_gather_values(cost, control)]
        costs = alike_made_equal(measured, cards, global_batch / world_size)
        shares = split_batch(global_batch, costs)
    return shares, costs


def slowest_step(
    step: TrainingStep, shares: Sequence[int], control: dist.ProcessGroup, max_batch: int | None
) -> float:
    """Seconds of the slowest rank's forward and backward; the same number on every rank.

    All ranks call it. Model, gradients and random state are afterwards as they were.
    """
    share = max(1, shares[dist.get_rank(control)])
    limit = share if max_batch is None else min(share, max_batch)
    alpha, beta = measure_cost(step, share, limit, control)
    seconds = torch.tensor(alpha * -(-share // limit) + beta * share)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=control)
    return seconds.item()


def card_name(device: torch.device) -> str:
    """The GPU's model, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def alike_made_equal(costs: Sequence[Cost], cards: Sequence[str], samples: float) -> list[Cost]:
    """The costs, with one common cost for cards of one model that differ by noise only.

    Args:
        costs: per rank.
        cards: the card's model per rank.
        samples: at this number the times are compared with the median card of the model.
    """
    seconds = [alpha + beta * samples for alpha, beta in costs]
    result = list(costs)
    for card in set(cards):
        ranks = [rank for rank, name in enumerate(cards) if name == card]
        middle = statistics.median_low(seconds[rank] for rank in ranks)
        alike = [rank for rank in ranks if abs(seconds[rank] - middle) <= ALIKE * middle]
        alpha = statistics.fmean(costs[rank][0] for rank in alike)
        beta = statistics.fmean(costs[rank][1] for rank in alike)
        for rank in alike:
            result[rank] = (alpha, beta)
    return result


def measure_cost(
    step: TrainingStep,
    share: int,
    max_batch: int,
    control: dist.ProcessGroup | None = None,
) -> Cost:
    """The cost of this rank's step, fitted around ``share`` samples.

    With ``control`` the ranks begin together: ranks that share a host's CPUs or its power budget
    must be measured as they will run.
    """
    share = min(share, max_batch)
    least = min(2, share)  # a BatchNorm1d has no variance of one sample
    sizes = [max(least, share // 2), share, min(3 * share // 2, max_batch)]
    state = random_state(step.device)
    work = working_copy(step.model)
    times = [float("inf")] * len(sizes)
    for sweep in range(SWEEPS):
        for i, size in enumerate(sizes):
            if control is not None:
                dist.barrier(group=control)
            seconds = seconds_of_step(step, work, size, is_first=sweep == 0)
            times[i] = min(times[i], seconds)
    set_random_state(state, step.device)
    return fit_line(sizes, times)


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> Cost:
    """The least squares line ``alpha + beta * n`` with alpha >= 0 and beta > 0.

    >>> fit_line([10, 20, 40], [0.3, 0.5, 0.9])
    (0.1, 0.02)
    """
    mean_size = statistics.fmean(sizes)
    mean_seconds = statistics.fmean(seconds)
    spread = sum((n - mean_size) ** 2 for n in sizes)
    pairs = zip(sizes, seconds, strict=True)
    covariance = sum((n - mean_size) * (t - mean_seconds) for n, t in pairs)
    beta = covariance / (spread or 1.0)
    alpha = mean_seconds - beta * mean_size
    is_noise = beta <= 0 or alpha < 0
    if is_noise:  # the line through the origin is the safe reading
        alpha, beta = 0.0, mean_seconds / mean_size
    return round(alpha, 9), round(beta, 12)


def working_copy(model: nn.Module) -> nn.Module:
    """A copy to measure with, in training mode."""
    return made_measurable(copy.deepcopy(model))


def made_measurable(work: nn.Module) -> nn.Module:
    """The same module in training mode, with layers that do not wait for other ranks."""
    if not work.training:
        work.train()
    for layer in work.modules():
        # SyncBatchNorm's forward waits for the slowest rank: all would seem equally slow.
        if isinstance(layer, nn.SyncBatchNorm):
            layer.eval()
    return work


def timed_step(
    step: TrainingStep, work: nn.Module, optimizer: Optimizer | None, inputs: Any, targets: Any
) -> float:
    """Seconds of forward, backward and, with an optimizer, update."""
    wait_for_device(step.device)
    started = time.perf_counter()
    with step.autocast():
        loss = step.loss_function(work(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    if optimizer is not None:
        optimizer.step()
    wait_for_device(step.device)
    seconds = time.perf_counter() - started
    work.zero_grad(set_to_none=True)
    return seconds


def seconds_of_step(
    step: TrainingStep,
    work: nn.Module,
    size: int,
    *,
    is_first: bool,
    optimizer: Optimizer | None = None,
) -> float:
    """The fastest of a few steps, since the others were disturbed.

    A size's very first step is not counted: it allocates memory and loads kernels. ``optimizer``
    is over the parameters of ``work``; None leaves the update out.
    """
    best, spent = float("inf"), 0.0
    for repeat in range(-1 if is_first else 0, REPEATS):
        if repeat > 0 and spent > ENOUGH_SECONDS:
            break
        # Not timed: a DataLoader starts its workers for each batch here, in training once an epoch.
        inputs, targets = step.get_batch(size)
        seconds = timed_step(step, work, optimizer, inputs, targets)
        if repeat >= 0:
            best = min(best, seconds)
            spent += seconds
    return best


def wait_for_device(device: torch.device) -> None:
    """Until the GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
