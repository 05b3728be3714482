"""Shares from a measurement at the start of a training."""

from collections.abc import Sequence

import torch.distributed as dist

from ddp_slurm.job_env import JobEnv
from ddp_slurm.training.measure.run import measure_and_leave
from ddp_slurm.training.process_group.facts import RankFacts
from ddp_slurm.training.uneven.calibrate import TrainingStep, measured_shares


def shares_by_measuring(
    step: TrainingStep,
    global_batch: int,
    ranks: Sequence[RankFacts],
    control: dist.ProcessGroup,
    max_batch: int | None = None,
) -> list[int]:
    """Samples of a global batch per rank; see ``measured_shares``. All ranks call it.

    In a job of ``ddp-slurm measure`` it writes the file of speeds and ends the process instead.
    """
    if JobEnv.from_environ().measure_file is not None:
        measure_and_leave(step, ranks, control, max_batch)
    return measured_shares(step, global_batch, control, max_batch)
