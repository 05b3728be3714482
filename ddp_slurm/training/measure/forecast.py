"""What a job that has measured its ranks predicts of itself, and the advice that follows."""

from collections.abc import Sequence
from itertools import combinations

from ddp_slurm.balance import split_batch
from ddp_slurm.comm import Comm
from ddp_slurm.curve import Curve
from ddp_slurm.exchange import Box, Link, Network, ways_of
from ddp_slurm.predict import Prediction, fastest, fastest_single, predict

CLEARLY = 0.98
"""One node alone is faster where its step is predicted to take less than this part."""
FIXED = 0.5
"""A fixed cost of at least this part of a step sets the pace."""
CLEAR_GAIN = 1.1
"""A larger batch is worth a line where it computes so many times as many samples a second."""
LARGER = 4
"""The larger global batch of the advice, as a multiple."""


def boxes_of(nodes: Sequence[str], curves: Sequence[Curve], global_batch: int) -> list[Box]:
    """One for each node, from the node and the curve of every rank."""
    ranks: dict[str, list[tuple[Curve, int]]] = {}
    for node, curve in zip(nodes, curves, strict=True):
        ranks.setdefault(node, []).append((curve, LARGER * global_batch))
    return [Box((node,), tuple(own)) for node, own in ranks.items()]


def network_of(nodes: Sequence[str], link: Link, gradient_bytes: float, comm: Comm) -> Network:
    """All pairs of nodes as fast as the ring of all ranks was; inside a node nothing is slow."""
    pairs = combinations(dict.fromkeys(nodes), 2)
    links = {frozenset(pair): link for pair in pairs}
    return Network(gradient_bytes, links, ways=ways_of(comm))


def advice(global_batch: int, boxes: Sequence[Box], network: Network, comm: Comm) -> str | None:
    """What would help a job that is slower than its fastest node alone; None where it is not."""
    whole = predict(global_batch, boxes, network)
    single = fastest_single(global_batch, boxes, network)
    if whole is None or single is None or single.seconds >= CLEARLY * whole.seconds:
        return None
    best = fastest(global_batch, boxes, network)
    larger = predict(LARGER * global_batch, boxes, network)
    helps = [f"a global batch of {LARGER * global_batch}: {_rate(larger)}"]
    if "local" not in (comm.kind, comm.allows):
        inexact = network._replace(ways=ways_of(Comm("auto", allows="local")))
        faster = predict(global_batch, boxes, inexact)
        helps.append(f"--comm auto:local, which is not exact: {_rate(faster)}")
    assert best is not None
    helps.append(f"--nodes {','.join(best.names)}: {_rate(best)}")
    return (
        f"slower than {single.names[0]} alone, predicted: {_rate(whole)} against {_rate(single)} "
        f"images/s (a step of {1000 * whole.seconds:.3g} ms: compute {1000 * whole.compute:.3g}, "
        f"network {1000 * whole.network:.3g}); what would help: {'; '.join(helps)}"
    )


def pace(global_batch: int, shares: Sequence[int], curves: Sequence[Curve]) -> str | None:
    """What to know where a fixed cost a step sets the pace; None where it does not.

    Args:
        shares, curves: of every rank.
    """
    times = [curve.seconds(n) for curve, n in zip(curves, shares, strict=True)]
    slowest = max(range(len(times)), key=times.__getitem__)
    fixed = curves[slowest].times[0]
    if 0 in shares:
        rank = shares.index(0)
        return (
            f"rank {rank} gets no samples: the fixed cost of its step, "
            f"{1000 * curves[rank].seconds(1):.3g} ms, is above the whole step of the others, "
            f"{1000 * times[slowest]:.3g} ms; a larger global batch would use it"
        )
    if fixed < FIXED * times[slowest]:
        return None
    larger = split_batch(LARGER * global_batch, curves)
    then = max(curve.seconds(n) for curve, n in zip(curves, larger, strict=True))
    if LARGER * times[slowest] < CLEAR_GAIN * then:
        return None
    return (
        f"a fixed cost sets the pace (Python, kernel launches, the optimizer): "
        f"{1000 * fixed:.3g} of the {1000 * times[slowest]:.3g} ms of rank {slowest}'s step; a "
        f"global batch of {LARGER * global_batch} would compute "
        f"{LARGER * times[slowest] / then:.2g} times as many samples a second"
    )


def _rate(prediction: Prediction | None) -> str:
    return "-" if prediction is None else f"{prediction.rate:,.0f}"
