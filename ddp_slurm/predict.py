"""How long a step takes on a choice of nodes, and which choice is fastest. Standard library only.

A step is the slowest rank's forward, backward and update, and the part of the gradients' exchange
that backward does not hide. A bucket is sent when backward has made it and the one before it has
gone, so with a bucket that begins at b and ends at e among the gradients, 0 to 1,

    step = compute + the maximum over the buckets of (1 - b) exchange - (1 - e) hidden * compute
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from ddp_slurm.balance import around_optimum
from ddp_slurm.curve import Curve
from ddp_slurm.exchange import Box, Network, Way, exchange_seconds

MOST_NODES_TRIED_ONE_BY_ONE = 8
"""Up to here every choice of nodes is predicted; above, nodes that are alike are one group."""


class Prediction(NamedTuple):
    """A step of one choice of nodes."""

    global_batch: int
    names: tuple[str, ...]
    compute: float
    """Seconds of the slowest rank."""
    network: float
    """Seconds of the gradients' exchange that backward does not hide."""
    exchange: float
    """Seconds of the whole exchange."""
    bucket_bytes: int | None = None
    """Of its all-reduces; None: DistributedDataParallel's own."""

    @property
    def seconds(self) -> float:
        return self.compute + self.network

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.global_batch / self.seconds if self.seconds else 0.0


def predict(global_batch: int, boxes: Sequence[Box], network: Network | None) -> Prediction | None:
    """A step with the best shares; None where the nodes cannot take so many samples.

    Args:
        network: None leaves the exchange out.
    """
    kinds: Counter[tuple[Curve, int]] = Counter()
    for box in boxes:
        for curve, limit in box.ranks:
            kinds[curve, min(limit, global_batch)] += len(box.names)
    if sum(limit * count for (_, limit), count in kinds.items()) < global_batch:
        return None
    _, compute = around_optimum(global_batch, kinds)
    return with_network(global_batch, boxes, network, compute)


def with_network(
    global_batch: int, boxes: Sequence[Box], network: Network | None, compute: float
) -> Prediction:
    """The step whose slowest rank computes for ``compute`` seconds, exchanged the fastest way, in
    the best buckets that the network may have."""
    names = tuple(name for box in boxes for name in box.names)
    if network is None:
        return Prediction(global_batch, names, compute, 0.0, 0.0)
    steps = []
    for size in network.bucket_choices:
        in_buckets = network._replace(bucket_bytes=size)
        for way in network.ways:
            exchange = exchange_seconds(boxes, in_buckets, way)
            shown = _shown(exchange, in_buckets, way, compute)
            steps.append(Prediction(global_batch, names, compute, shown, exchange, size))
    return min(steps, key=lambda step: (step.network, step.exchange))


def _shown(exchange: float, network: Network, way: Way, compute: float) -> float:
    """Seconds a step of an exchange that are not hidden."""
    if way.steps > 1:
        return max(0.0, exchange / way.steps - compute)
    hidden = network.hidden * compute
    return max(
        exchange * (1 - begin) - hidden * (1 - end) for begin, end in network.decisive_buckets
    )


def fastest(global_batch: int, nodes: Sequence[Box], network: Network | None) -> Prediction | None:
    """The fastest choice of nodes; of equally fast ones the one with the fewest nodes.

    Up to MOST_NODES_TRIED_ONE_BY_ONE every choice is predicted. Above, nodes of the same curves and
    link are a group of which some are taken: from all nodes, and from the best of each group, the
    number in one group after another is changed as long as that is faster. Never slower than the
    best single node.

    Args:
        nodes: one Box for each node, in the order of the plan.

    Returns None where no choice can take so many samples.
    """
    if len(nodes) <= MOST_NODES_TRIED_ONE_BY_ONE:
        sizes = range(1, len(nodes) + 1)
        choices = (part for size in sizes for part in combinations(nodes, size))
        return _best(predict(global_batch, part, network) for part in choices)
    groups = _groups(nodes, network)
    starts = [tuple(len(group.names) for group in groups)]
    starts += [tuple(int(i == j) for j in range(len(groups))) for i in range(len(groups))]
    return _best(_climb(global_batch, groups, network, start) for start in starts)


def fastest_single(
    global_batch: int, nodes: Sequence[Box], network: Network | None
) -> Prediction | None:
    """The fastest of the nodes alone."""
    groups = _groups(nodes, network) if len(nodes) > MOST_NODES_TRIED_ONE_BY_ONE else nodes
    alone = [Box(box.names[:1], box.ranks) for box in groups]
    return _best(predict(global_batch, [box], network) for box in alone)


def _best(predictions: Iterator[Prediction | None]) -> Prediction | None:
    known = [prediction for prediction in predictions if prediction is not None]
    return min(known, key=lambda one: (one.seconds, len(one.names)), default=None)


def _groups(nodes: Sequence[Box], network: Network | None) -> list[Box]:
    """The nodes of the same curves and the same links as one Box each."""
    links: dict[str, object] = {}
    if network:
        measured = {name for pair in network.links for name in pair}
        links = {name: (network.own(name), network.inside(name)) for name in measured}
    alike: dict[object, list[Box]] = {}
    for box in nodes:
        name = network.known(box.names[0]) if network else ""
        alike.setdefault((box.ranks, links.get(name)), []).append(box)
    return [Box(tuple(box.names[0] for box in group), group[0].ranks) for group in alike.values()]


def _climb(
    global_batch: int, groups: Sequence[Box], network: Network | None, counts: tuple[int, ...]
) -> Prediction | None:
    """The best that is reached by changing the number of nodes of one group after another."""

    def predicted(counts: tuple[int, ...]) -> Prediction | None:
        boxes = [
            Box(group.names[:count], group.ranks)
            for group, count in zip(groups, counts, strict=True)
            if count
        ]
        return predict(global_batch, boxes, network) if boxes else None

    best = predicted(counts)
    improved = True
    while improved:
        improved = False
        for index, group in enumerate(groups):
            for count in _numbers_up_to(len(group.names)):
                changed = (*counts[:index], count, *counts[index + 1 :])
                other = predicted(changed)
                if other and (best is None or other.seconds < best.seconds):
                    best, counts, improved = other, changed, True
    return best


def _numbers_up_to(most: int) -> list[int]:
    """0, the powers of two, and all."""
    return [0, *(2**i for i in range(most.bit_length()) if 2**i < most), most]
