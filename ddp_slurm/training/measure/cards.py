"""How long a step takes on each rank's card, for growing batches."""

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training.uneven.calibrate import TrainingStep, made_measurable, seconds_of_step

SIZES = tuple(4 * 2**i for i in range(11))
"""4 to 4,096 samples."""
LONG_STEP_SECONDS = 0.5
"""A card whose step took this long is given no larger batch."""


@dataclass(frozen=True)
class CardSpeed:
    """Of one rank."""

    points: list[tuple[int, float]]
    """Samples, and the seconds of their step: forward, loss, backward and update."""
    max_batch: int | None
    """The most samples that fitted the memory; None where no size was too large."""


def measure_card(
    step: TrainingStep, control: dist.ProcessGroup, most: int | None = None
) -> CardSpeed:
    """Time this rank's step; all ranks call it, and each size begins together.

    Ranks that share a host's CPUs or its power budget are so measured as they will run. Model,
    optimizer and random state stay as they are.

    Args:
        most: the most samples that are run at once; None has no limit.

    Raises DdpSlurmError where not even the smallest batch fits the memory.
    """
    most = SIZES[-1] if most is None else most
    trial = _Trial(step)
    steps_up = 0
    for size in SIZES:
        dist.barrier(group=control)
        trial.grow(min(size, most))
        steps_up += 1
        if _all(trial.is_done or size >= most, control):
            break
    for size in SIZES[:steps_up]:  # again: a disturbance only counts if it lasts through both
        dist.barrier(group=control)
        if size <= most and size in trial.seconds:
            trial.time(size, is_first=False)
    if not trial.seconds:
        raise DdpSlurmError(
            f"a batch of {min(SIZES[0], most)} samples does not fit the memory of {step.device}: "
            "measure with a smaller model"
        )
    max_batch = max(trial.seconds) if trial.ran_out_of_memory else None
    return CardSpeed(sorted(trial.seconds.items()), max_batch)


def _all(condition: bool, control: dist.ProcessGroup) -> bool:
    flag = torch.tensor(int(condition))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=control)
    return bool(flag.item())


class _Trial:
    def __init__(self, step: TrainingStep) -> None:
        self.step = step
        # In one call: the copy of the optimizer is over the copy's parameters.
        model, self.optimizer = copy.deepcopy((step.model, step.optimizer))
        self.work = made_measurable(model)
        self.seconds: dict[int, float] = {}
        self.ran_out_of_memory = False

    @property
    def is_done(self) -> bool:
        return self.ran_out_of_memory or max(self.seconds.values()) > LONG_STEP_SECONDS

    def grow(self, size: int) -> None:
        if size in self.seconds or (self.seconds and self.is_done):
            return
        try:
            self.time(size, is_first=True)
        except torch.cuda.OutOfMemoryError:
            self.ran_out_of_memory = True
        if self.ran_out_of_memory:
            self.work.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()

    def time(self, size: int, *, is_first: bool) -> None:
        seconds = seconds_of_step(
            self.step, self.work, size, is_first=is_first, optimizer=self.optimizer
        )
        self.seconds[size] = min(seconds, self.seconds.get(size, seconds))
