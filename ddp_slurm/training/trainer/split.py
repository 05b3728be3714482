"""How a Trainer shares out the global batch: over the ranks, and over each rank's passes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddp_slurm.balance import BalanceError
from ddp_slurm.curve import Curve
from ddp_slurm.job_env import MEASURED, JobEnv
from ddp_slurm.training.measure.shares import shares_by_measuring
from ddp_slurm.training.memory.micro_batch import find_micro_batch
from ddp_slurm.training.process_group import World
from ddp_slurm.training.trainer.adaptive import adapts
from ddp_slurm.training.trainer.config import TrainerConfig
from ddp_slurm.training.uneven.calibrate import TrainingStep


@dataclass(frozen=True)
class Split:
    """The parts of a global batch."""

    shares: Sequence[int]
    """Samples of each rank."""
    micro_batch: int
    """The most samples that this rank runs at once."""
    predicted_step: float | None
    """Seconds of a step; None where nothing predicts it."""
    curves: Sequence[Curve] | None = None
    """Seconds of a step against its samples for each rank, if the shares follow the speeds."""


def choose_split(world: World, config: TrainerConfig, step: TrainingStep, samples: int) -> Split:
    """All ranks call it. In a job of ``ddp-slurm measure`` it ends the process.

    Args:
        step: on this rank.
        samples: of the training data.

    Raises BalanceError for no samples, and shares that do not fit the world or the global batch.
    """
    if samples == 0:
        raise BalanceError("the training data have no samples")
    job = JobEnv.from_environ()
    given = config.shares if job.measure_file is None else None
    follows = adapts(world, config)
    if given is not None:
        _check_shares(world, config, given)
    if follows or (given is None and job.balance == MEASURED):
        split = _measured(world, config, step, follows=follows)
        return split if given is None else replace(split, shares=given, predicted_step=None)
    shares = world.planned_shares(config.global_batch) if given is None else list(given)
    micro_batch = _micro_batch(world, config, step, max(1, shares[world.rank]))
    return Split(shares, micro_batch, job.predicted_step)


def _measured(world: World, config: TrainerConfig, step: TrainingStep, *, follows: bool) -> Split:
    limit = config.micro_batch if isinstance(config.micro_batch, int) else None
    if JobEnv.from_environ().measure_file is None:
        limit = _micro_batch(world, config, step, config.global_batch)
    measured = shares_by_measuring(step, config.global_batch, world.ranks, world.control, limit)
    curves = measured.curves if follows else None
    micro_batch = limit or config.global_batch
    return Split(measured.shares, micro_batch, measured.predicted_step, curves)


def _check_shares(world: World, config: TrainerConfig, shares: Sequence[int]) -> None:
    if len(shares) != world.world_size or sum(shares) != config.global_batch:
        raise BalanceError(
            f"shares {list(shares)}: expected {world.world_size} shares with the sum "
            f"{config.global_batch}, got {len(shares)} with the sum {sum(shares)}"
        )


def _micro_batch(world: World, config: TrainerConfig, step: TrainingStep, most: int) -> int:
    """``most``: the most samples that this rank may get."""
    if config.micro_batch == "auto":
        may_checkpoint = config.checkpoint == "auto"
        return find_micro_batch(step, most, world.control, may_checkpoint=may_checkpoint)
    return most if config.micro_batch is None else config.micro_batch
