"""What a file of speeds predicts of a plan: its step, and whether fewer nodes are faster. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from ddp_slurm.balance import equal_shares, split_batch
from ddp_slurm.curve import Curve
from ddp_slurm.exchange import SMALLER_BUCKETS, Box, Network, ways_of
from ddp_slurm.job.options import JobOptions
from ddp_slurm.plan.plan import Component, Plan, ranks_of
from ddp_slurm.plan.shares import curve_and_limit
from ddp_slurm.predict import Prediction, fastest, fastest_single, with_network

WORTH_IT = 0.98
"""Fewer nodes are proposed where their step is predicted to take less than this part."""


class Choice(NamedTuple):
    """A choice of nodes with its shares."""

    step: Prediction
    computes: tuple[float, ...]
    """Seconds of each rank."""

    @property
    def waiting(self) -> float:
        """Seconds for which a rank waits for the slowest, in the mean over the ranks."""
        seconds = self.step.compute - sum(self.computes) / len(self.computes)
        return max(0.0, round(seconds, 9))


class Forecast(NamedTuple):
    """The prediction of a plan, and of what else could be done with its nodes."""

    plan: Choice
    equal: Choice | None
    """None where the equal shares do not fit the cards."""
    best: Choice
    """The fastest choice of the plan's nodes."""
    single: Choice | None
    """The fastest node alone; None where the batch fits no node."""
    bound: float
    """Images a second: the sum of the ranks' own at their shares, without waiting and network."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """The nodes without which the plan would be faster."""
        if self.best.step.seconds >= WORTH_IT * self.plan.step.seconds:
            return ()
        used = set(self.best.step.names)
        return tuple(name for name in self.plan.step.names if name not in used)


def forecast(plan: Plan) -> Forecast | None:
    """None for a plan whose shares do not follow from seconds a step."""
    options = plan.options
    batch = options.global_batch_size
    if batch is None or plan.shares is None or options.balance.file is None:
        return None
    boxes = boxes_of(plan.components, options)
    network = network_of(plan.components, options)
    by_name = {box.names[0]: box for box in boxes}

    def chosen(step: Prediction | None) -> Choice | None:
        return step and _choice(batch, [by_name[name] for name in step.names], network)

    of_plan = _choice(batch, boxes, network, plan.shares)
    best = chosen(fastest(batch, boxes, network))
    assert best is not None  # the plan's own shares fit
    limits = [limit for box in boxes for _, limit in box.ranks]
    equal = equal_shares(batch, plan.world_size)
    fits = all(share <= limit for share, limit in zip(equal, limits, strict=True))
    pairs = zip(plan.shares, of_plan.computes, strict=True)
    return Forecast(
        plan=of_plan,
        equal=_choice(batch, boxes, network, equal) if fits else None,
        best=best,
        single=chosen(fastest_single(batch, boxes, network)),
        bound=sum(share / seconds for share, seconds in pairs if seconds),
    )


def planned_step(
    components: Sequence[Component], options: JobOptions, shares: Sequence[int] | None
) -> Prediction | None:
    """A step with these shares; None where they do not follow from a file of speeds."""
    batch = options.global_batch_size
    if batch is None or shares is None or options.balance.file is None:
        return None
    boxes = boxes_of(components, options)
    network = network_of(components, options)
    return _choice(batch, boxes, network, shares).step


def network_of(components: Sequence[Component], options: JobOptions) -> Network | None:
    """None where the file of speeds has no links.

    A node without a measured link is like the nodes of its component that have one.
    """
    speeds = options.balance.speeds
    network = speeds.measured.network() if speeds and speeds.measured else None
    if network is None:
        return None
    measured = {name for pair in network.links for name in pair}
    stand_ins: dict[str, str] = {}
    for component in components:
        first = next((name for name in component.nodes if name in measured), None)
        if first is not None:
            stand_ins |= {name: first for name in component.nodes if name not in measured}
    has_buckets = options.comm.kind not in ("local", "powersgd")
    return network._replace(
        stand_ins=stand_ins,
        ways=ways_of(options.comm),
        bucket_choices=(None, *SMALLER_BUCKETS) if has_buckets else (None,),
    )


def boxes_of(components: Sequence[Component], options: JobOptions) -> list[Box]:
    """One for each node, in the order of the plan. Raises PlanError for a speed not known."""
    batch = options.global_batch_size or 0
    ranks_of_node: dict[str, list[tuple[Curve, int]]] = {}
    for rank in ranks_of(components):
        curve, limit = curve_and_limit(rank, components, options)
        own = ranks_of_node.setdefault(rank.node, [])
        own.append((curve, batch if limit is None else min(limit, batch)))
    return [Box((name,), tuple(ranks)) for name, ranks in ranks_of_node.items()]


def _choice(
    batch: int, boxes: Sequence[Box], network: Network | None, shares: Sequence[int] | None = None
) -> Choice:
    ranks = [rank for box in boxes for rank in box.ranks]
    curves = [curve for curve, _ in ranks]
    if shares is None:
        shares = split_batch(batch, curves, [limit for _, limit in ranks])
    computes = [curve.seconds(n) for curve, n in zip(curves, shares, strict=True)]
    return Choice(with_network(batch, boxes, network, max(computes)), tuple(computes))
