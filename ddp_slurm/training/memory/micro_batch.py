"""Every rank's micro-batch: known from the file of speeds, or looked for on its card."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp_slurm.job_env import JobEnv, KnownLimits
from ddp_slurm.training.exchange import all_gather_values
from ddp_slurm.training.memory.search import largest_micro_batch
from ddp_slurm.training.uneven.calibrate import TrainingStep, card_name
from ddp_slurm.training.uneven.gradients import has_sync_batchnorm


def find_micro_batch(step: TrainingStep, most: int, control: dist.ProcessGroup) -> int:
    """The most samples, up to ``most``, that this rank runs at once. All ranks call it.

    On CPUs that is ``most``. What the job's file of speeds holds for this card, model and precision
    is taken as it is; else ``largest_micro_batch`` looks for it. Rank 0 prints what was found,
    unless every rank runs its whole share at once.

    With SyncBatchNorm, whose forward waits for all ranks, it is the least of all ranks.

    Args:
        most: samples of this rank's share, or the most that it may get.
        control: a gloo group over all ranks.

    Raises MemoryTooSmall.
    """
    started = time.monotonic()
    known = JobEnv.from_environ().known_limits
    limit = known and _known_limit(known, step)
    own = most
    if has_own_memory(step.device):
        own = min(limit, most) if limit else largest_micro_batch(step, max(1, most))
    seconds = time.monotonic() - started
    rows = all_gather_values([own, most, seconds], control)
    if has_sync_batchnorm(step.model):
        own = min(row[0] for row in rows)
    if dist.get_rank(control) == 0 and any(found < asked for found, asked, _ in rows):
        print(_report(rows), flush=True)
    return int(own)


def has_own_memory(device: torch.device) -> bool:
    """Whether the device has a limit that an allocation can meet: a CPU's memory is the host's, and
    a process that takes too much of it is killed."""
    return device.type == "cuda"


def _known_limit(known: KnownLimits, step: TrainingStep) -> int | None:
    is_same = known.model == type(step.model).__name__ and known.precision == step.precision_name
    return known.of_card.get(card_name(step.device)) if is_same else None


def _report(rows: Sequence[tuple[int, int, float]]) -> str:
    """``micro-batches: rank 1: 240, rank 2: 240; found in 2.7 s``."""
    limited = [f"rank {rank}: {row[0]}" for rank, row in enumerate(rows) if row[0] < row[1]]
    more = f" and {len(limited) - MOST_RANKS} more" if len(limited) > MOST_RANKS else ""
    seconds = max(row[2] for row in rows)
    return (
        f"micro-batch, the most samples that fit the memory at once: "
        f"{', '.join(limited[:MOST_RANKS])}{more}; found in {seconds:.1f} s"
    )


MOST_RANKS = 16
"""That the report names."""
