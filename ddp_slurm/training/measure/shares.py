"""Shares from a measurement at the start of a training."""

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from ddp_slurm.comm import EXACT
from ddp_slurm.curve import Curve
from ddp_slurm.job_env import JobEnv
from ddp_slurm.predict import predict
from ddp_slurm.training.measure.forecast import advice, boxes_of, network_of, pace
from ddp_slurm.training.measure.links import measure_ring
from ddp_slurm.training.measure.run import gradient_bytes, measure_and_leave
from ddp_slurm.training.process_group.facts import RankFacts
from ddp_slurm.training.uneven.calibrate import TrainingStep
from ddp_slurm.training.uneven.measured_shares import measured_shares


class Measured(NamedTuple):
    """What the ranks' speeds lead to; the same on every rank."""

    shares: list[int]
    """Samples of a global batch per rank, see ``measured_shares``."""
    predicted_step: float | None
    """Seconds of a step."""
    curves: list[Curve]
    """Of every rank: seconds of its forward and backward."""


def shares_by_measuring(
    step: TrainingStep,
    global_batch: int,
    ranks: Sequence[RankFacts],
    control: dist.ProcessGroup,
    max_batch: int | None = None,
) -> Measured:
    """Measure the ranks. All ranks call it.

    Where the job is predicted to be slower than its fastest node alone rank 0 prints so, with what
    would help. In a job of ``ddp-slurm measure`` the file of speeds is written and the process ends
    instead.
    """
    job = JobEnv.from_environ()
    if job.measure_file is not None:
        measure_and_leave(step, ranks, control, max_batch)
    shares, curves, computing = measured_shares(step, global_batch, control, max_batch)
    is_first = dist.get_rank(control) == 0
    slow_start = pace(global_batch, shares, curves)
    if slow_start and is_first:
        print(slow_start, flush=True)
    nodes = [fact.node_name for fact in ranks]
    boxes = boxes_of(nodes, curves, global_batch)
    network = None
    if len(boxes) > 1:
        assert dist.group.WORLD is not None
        link = measure_ring(dist.group.WORLD, step.device)
        comm = job.comm or EXACT
        network = network_of(nodes, link, gradient_bytes(step.model), comm)
        text = advice(global_batch, boxes, network, comm)
        if text and is_first:
            print(text, flush=True)
    step_of_all = predict(global_batch, boxes, network)
    return Measured(shares, step_of_all.seconds if step_of_all else None, computing)
