"""How long a step takes on each rank's card, for growing batches."""

from dataclasses import dataclass

import torch.distributed as dist

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training.exchange import all_gather_values
from ddp_slurm.training.memory.out_of_memory import is_out_of_memory
from ddp_slurm.training.memory.preserve import preserved
from ddp_slurm.training.uneven.calibrate import StepTimes, TrainingStep

SIZES = tuple(4 * 2**i for i in range(11))
"""4 to 4,096 samples."""


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
    """Time this rank's step; all ranks call it. Model, gradients, optimizer and random state are
    afterwards as they were.

    Args:
        most: the most samples that are run at once; None has no limit.

    Raises DdpSlurmError where not even the smallest batch fits the memory.
    """
    most = SIZES[-1] if most is None else most
    largest = max(all_gather_values(most, control))
    sizes = [*(size for size in SIZES if size < largest), largest]
    with preserved(step.model, step.device):
        times = StepTimes(step, most)
        try:
            times.measure(sizes, control)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise DdpSlurmError(
                f"a batch of {min(SIZES[0], most)} samples does not fit the memory of "
                f"{step.device}: measure with a smaller model"
            ) from error
    max_batch = times.limit if times.limit < most else None
    return CardSpeed(sorted(times.seconds.items()), max_batch)
