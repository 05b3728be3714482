"""The samples of each global batch that a plan gives its ranks."""

from collections.abc import Sequence

from ddp_slurm.balance import apportion, equal_shares, split_batch
from ddp_slurm.curve import Curve
from ddp_slurm.job.options import JobOptions
from ddp_slurm.job.speeds import Speed
from ddp_slurm.job_env import ADAPTIVE, MEASURED
from ddp_slurm.plan.plan import Component, Plan, PlanError, PlannedRank, ranks_of


def planned_shares(components: Sequence[Component], options: JobOptions) -> tuple[int, ...] | None:
    """Samples per rank; None without a global batch, and where the ranks measure their speed.

    Raises PlanError for a file of speeds that does not fit the components.
    """
    batch = options.global_batch_size
    if batch is None or options.balance.kind in (MEASURED, ADAPTIVE):
        return None
    if options.balance.kind == "planned":
        return tuple(_by_speed(batch, components, options))
    if options.ranks == "node":
        return tuple(apportion(batch, [c.gpus_per_node for c in components for _ in c.nodes]))
    return tuple(equal_shares(batch, sum(component.tasks for component in components)))


def _by_speed(batch: int, components: Sequence[Component], options: JobOptions) -> list[int]:
    ranks = [curve_and_limit(rank, components, options) for rank in ranks_of(components)]
    limits = [batch if limit is None else limit for _, limit in ranks]
    if sum(limits) < batch:
        raise PlanError(
            f"{options.balance}: the max_batch of all ranks add up to {sum(limits)}, less than the "
            f"global batch of {batch}, and a script under --uneven runs its whole share at once"
        )
    return split_batch(batch, [curve for curve, _ in ranks], limits)


def curve_and_limit(
    rank: PlannedRank, components: Sequence[Component], options: JobOptions
) -> tuple[Curve, int | None]:
    """Seconds of the rank's step against its samples, and the most samples that it can take.

    A share above what the memory holds at once is predicted in several passes, as the Trainer runs
    it; only an unmodified script (``--uneven``) cannot. Raises PlanError for a rank whose speed is
    not known.
    """
    gpus = _gpus_of(rank, components, options)
    speed = _speed(rank, options)
    if speed.max_batch is None:
        return speed.curve.shared_by(gpus), None
    if options.uneven:
        return speed.curve.shared_by(gpus), speed.max_batch * gpus
    return speed.curve.in_passes_of(speed.max_batch).shared_by(gpus), None


def passes(plan: Plan) -> list[tuple[PlannedRank, int, int]]:
    """The ranks that take their share in several passes: each with the number of passes, and the
    most samples of one."""
    options = plan.options
    if options.balance.file is None or plan.shares is None:
        return []
    found = []
    for rank in plan.ranks():
        most = _speed(rank, options).max_batch
        if most is not None and rank.share:
            most *= _gpus_of(rank, plan.components, options)
            found.append((rank, -(-rank.share // most), most))
    return [one for one in found if one[1] > 1]


def _gpus_of(rank: PlannedRank, components: Sequence[Component], options: JobOptions) -> int:
    return components[rank.component].gpus_per_node if options.ranks == "node" else 1


def _speed(rank: PlannedRank, options: JobOptions) -> Speed:
    assert options.balance.speeds is not None
    speeds = options.balance.speeds.entries
    speed = speeds.get(rank.node) or speeds.get(rank.gpu_type or "")
    if speed is None:
        place = "the list" if options.balance.is_relative else "the file"
        raise PlanError(
            f"{options.balance}: neither node {rank.node!r} nor its GPU type {rank.gpu_type!r} is "
            f"in {place}; give one"
        )
    return speed
