"""Every rank's micro-batch: known from the file of speeds, or looked for on its card."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp_slurm.job_env import JobEnv, KnownLimits
from ddp_slurm.training.exchange import all_gather_values
from ddp_slurm.training.memory.checkpoint import (
    check_checkpoint,
    checkpoint_parts,
    keep_activations,
)
from ddp_slurm.training.memory.search import MemoryTooSmall, largest_micro_batch
from ddp_slurm.training.uneven.calibrate import TrainingStep, card_name

FEW = 8
"""Samples: a GPU that runs fewer at once is mostly idle, and computes a checkpointed model, which
takes a third more work, at least as fast."""
MOST_RANKS = 16
"""That the report names."""


def find_micro_batch(
    step: TrainingStep, most: int, control: dist.ProcessGroup, *, may_checkpoint: bool = False
) -> int:
    """The most samples, up to ``most``, that this rank runs at once. All ranks call it.

    On CPUs that is ``most``. What the job's file of speeds holds for this card, model and precision
    is taken as it is; else ``largest_micro_batch`` looks for it. Rank 0 prints what was found,
    unless every rank runs its whole share at once.

    Args:
        most: samples of this rank's share, or the most that it may get.
        control: a gloo group over all ranks.
        may_checkpoint: a rank that could run fewer than FEW samples checkpoints the model's parts.

    Raises MemoryTooSmall, and DdpSlurmError for a model that cannot be checkpointed.
    """
    if may_checkpoint:
        check_checkpoint(step.model)
    started = time.monotonic()
    own, is_checkpointed = most, False
    if has_own_memory(step.device):
        known = JobEnv.from_environ().known_limits
        limit = known and _known_limit(known, step)
        if limit and not (may_checkpoint and limit < FEW):
            own = min(limit, most)
        else:
            own, is_checkpointed = _searched(step, max(1, most), may_checkpoint)
    seconds = time.monotonic() - started
    rows = all_gather_values([own, most, seconds, is_checkpointed], control)
    if dist.get_rank(control) == 0 and any(row[0] < row[1] or row[3] for row in rows):
        print(_report(rows), flush=True)
    return int(own)


def _searched(step: TrainingStep, most: int, may_checkpoint: bool) -> tuple[int, bool]:
    """The micro-batch, and whether the model is checkpointed for it."""
    found = 0
    try:
        found = largest_micro_batch(step, most)
    except MemoryTooSmall:
        if not may_checkpoint:
            raise
    if not may_checkpoint or found >= min(FEW, most):
        return found, False
    checkpoint_parts(step.model)
    larger = largest_micro_batch(step, most)
    if larger > found:
        return larger, True
    keep_activations(step.model)
    return found, False


def has_own_memory(device: torch.device) -> bool:
    """Whether the device has a limit that an allocation can meet: a CPU's memory is the host's, and
    a process that takes too much of it is killed."""
    return device.type == "cuda"


def _known_limit(known: KnownLimits, step: TrainingStep) -> int | None:
    is_same = known.model == type(step.model).__name__ and known.precision == step.precision_name
    return known.of_card.get(card_name(step.device)) if is_same else None


def _report(rows: Sequence[tuple[int, int, float, bool]]) -> str:
    limited = [
        f"rank {rank}: {own}{', checkpointed' if is_checkpointed else ''}"
        for rank, (own, most, _, is_checkpointed) in enumerate(rows)
        if own < most or is_checkpointed
    ]
    more = f" and {len(limited) - MOST_RANKS} more" if len(limited) > MOST_RANKS else ""
    seconds = max(row[2] for row in rows)
    return (
        f"micro-batch, the most samples that fit the memory at once: "
        f"{', '.join(limited[:MOST_RANKS])}{more}; found in {seconds:.1f} s"
    )
