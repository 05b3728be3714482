"""How fast a rank is: the seconds of its steps, measured at the start."""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_slurm.training.memory.out_of_memory import free_memory, is_out_of_memory

SWEEPS = 3
"""Each size is timed in several sweeps over all sizes: a disturbance only counts if it lasts
through all of them."""
REPEATS = 4
"""Steps of one size in a sweep."""
ENOUGH_SECONDS = 0.3
"""A size whose steps took this long in a sweep is not repeated further."""
QUICK_SECONDS = 0.1
"""Above it no graph is tried: the GPU sets the pace, not Python."""

LONG_STEP_SECONDS = 0.5
"""A rank whose step took this long is given no larger size."""


@dataclass(frozen=True)
class TrainingStep:
    """What is measured: forward, loss, backward and update. No communication."""

    model: nn.Module
    """The module without DistributedDataParallel, on ``device``."""
    loss_function: Callable[[Any, Any], Tensor]
    """(outputs, targets) to a scalar."""
    get_batch: Callable[[int], tuple[Any, Any]]
    """Number of samples to (inputs, targets) on ``device``; its time is not measured."""
    device: torch.device
    autocast: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    """Makes the context of forward and loss, such as ``lambda: torch.autocast("cuda")``."""
    optimizer: Optimizer | None = None
    """Over the model's parameters; its step is in the times."""
    precision: str | None = None
    """fp32, fp16 or bf16; None: that of the parameters."""
    graphed: Callable[[Any, Any], Callable[[], object] | None] | None = None
    """Inputs and targets to their forward and backward as a CUDA graph, or None where that fails.
    A size counts with its faster way, as the training will take it."""

    @property
    def precision_name(self) -> str:
        """As the file of speeds has it."""
        dtype = next(self.model.parameters()).dtype
        if torch.is_autocast_enabled():
            dtype = torch.get_autocast_dtype("cuda")
        return self.precision or str(dtype).split(".")[-1]


def card_name(device: torch.device) -> str:
    """The GPU's model, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


class StepTimes:
    """The seconds of this rank's steps, each the fastest of several. Used inside ``preserved``.

    Args:
        limit: the most samples that are run at once.
    """

    def __init__(self, step: TrainingStep, limit: int) -> None:
        self.limit = limit
        self.seconds: dict[int, float] = {}
        """By the number of samples."""
        self._step = step
        self._work = made_measurable(step.model)
        self._optimizer = copy.deepcopy(step.optimizer)
        for group in self._optimizer.param_groups if self._optimizer else ():
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        self.update = self._seconds_of_update()
        """Seconds of the optimizer's step, which ``seconds`` includes."""

    def measure(self, sizes: Sequence[int], control: dist.ProcessGroup) -> None:
        """Time steps of these sizes, cut off at the limit. All ranks call it with equally many.

        They begin each size together: ranks that share a host's CPUs or its power budget must be
        measured as they will run. Sizes above one whose step took long are left out, and so are
        those that do not fit the memory beside the optimizer's copy.
        """
        least = min(2, self.limit)
        own = [min(max(size, least), self.limit) for size in sizes]
        for sweep in range(SWEEPS):
            for size in own:
                dist.barrier(group=control)
                if not self._is_too_long(size):
                    self._time(size, is_first=sweep == 0)

    def _seconds_of_update(self) -> float:
        if self._optimizer is None:
            return 0.0
        update, device = self._optimizer.step, self._step.device
        return min(_seconds_of(update, device) for _ in range(REPEATS))

    def _is_too_long(self, size: int) -> bool:
        smaller = [seconds for n, seconds in self.seconds.items() if n < size]
        return max(smaller, default=0.0) > LONG_STEP_SECONDS

    def _time(self, size: int, *, is_first: bool) -> None:
        try:
            seconds = seconds_of_step(
                self._step, self._work, size, is_first=is_first, optimizer=self._optimizer
            )
        except RuntimeError as error:
            if not self.seconds or not is_out_of_memory(error):
                raise
            self.limit = max(n for n in self.seconds if n < size)
            seconds = math.inf
        if seconds == math.inf:
            free_memory(self._step.device)
        else:
            self.seconds[size] = min(seconds, self.seconds.get(size, seconds))


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

    def run() -> None:
        with step.autocast():
            loss = step.loss_function(work(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if optimizer is not None:
            optimizer.step()

    seconds = _seconds_of(run, step.device)
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
    best, spent = math.inf, 0.0
    for repeat in range(-1 if is_first else 0, REPEATS):
        if repeat > 0 and spent > ENOUGH_SECONDS:
            break
        # Not timed: a DataLoader starts its workers for each batch here, in training once an epoch.
        inputs, targets = step.get_batch(size)
        seconds = timed_step(step, work, optimizer, inputs, targets)
        if repeat >= 0:
            best = min(best, seconds)
            spent += seconds
    if is_first and best < QUICK_SECONDS:
        best = min(best, _seconds_of_graph(step, optimizer, size))
    return best


def _seconds_of_graph(step: TrainingStep, optimizer: Optimizer | None, size: int) -> float:
    if step.graphed is None:
        return math.inf
    graph = step.graphed(*step.get_batch(size))

    def run() -> None:
        assert graph is not None
        graph()
        if optimizer is not None:
            optimizer.step()

    repeats = REPEATS if graph is not None else 0
    best = min((_seconds_of(run, step.device) for _ in range(repeats)), default=math.inf)
    step.model.zero_grad(set_to_none=True)
    return best


def _seconds_of(work: Callable[[], object], device: torch.device) -> float:
    wait_for_device(device)
    started = time.perf_counter()
    work()
    wait_for_device(device)
    return time.perf_counter() - started


def wait_for_device(device: torch.device) -> None:
    """Return once the GPU has done all work that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
