"""How long a step takes on a choice of nodes, and which choice is fastest. Standard library only.

A step is the slowest rank's forward, backward and update, and the part of the gradients' exchange
that backward does not hide:

    step = compute + max(exchange - hidden * compute, exchange / buckets)
    exchange = bytes on the slowest link / its bandwidth + messages one after another * latency

Of S bytes of gradients a ring of R ranks sends ``2 (R - 1) / R * S`` over each link, in
``2 (R - 1)`` messages a bucket. In two levels it is the same with the N nodes in place of the R
ranks, after a reduction inside each node.
Source of the ring's cost: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from ddp_slurm.balance import around_optimum
from ddp_slurm.curve import Curve

MOST_NODES_TRIED_ONE_BY_ONE = 8
"""Up to here every choice of nodes is predicted; above, nodes that are alike are one group."""
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""DistributedDataParallel's buckets of gradients."""
HIDDEN = 0.5
"""The part of a step's compute during which gradients are exchanged, where it was not measured:
about backward's, without its first layers."""


class Box(NamedTuple):
    """A node, or several nodes that are alike."""

    names: tuple[str, ...]
    ranks: tuple[tuple[Curve, int], ...]
    """Of each node: a rank's curve and the most samples that it can take."""


class Link(NamedTuple):
    """Between two nodes, or between the ranks of one."""

    bandwidth: float
    """Bytes a second in one direction, as an all-reduce reaches them."""
    latency: float
    """Seconds of an empty message."""


class Network(NamedTuple):
    """What the exchange of gradients depends on."""

    gradient_bytes: float
    links: Mapping[frozenset[str], Link]
    """By the names of two nodes, or of one for the ranks inside it."""
    hidden: float = HIDDEN
    """See the module."""
    two_levels: bool = False
    """Whether the all-reduce may go in two levels, where that is faster."""

    def between(self, one: str, other: str) -> Link | None:
        """The link of two nodes; where it was not measured, as slow as the slower node's others.

        A node without any measured link counts as slow as the slowest. None without any links.
        """
        measured = self.links.get(frozenset((one, other)))
        return measured or _slowest([self._own(one), self._own(other)])

    def inside(self, node: str) -> Link | None:
        return self.links.get(frozenset((node,)))

    def _own(self, node: str) -> Link | None:
        """The node's fastest link to another one."""
        between = {pair: link for pair, link in self.links.items() if len(pair) == 2}
        own = [link for pair, link in between.items() if node in pair]
        fastest_own = max(own, key=lambda link: link.bandwidth, default=None)
        return fastest_own or _slowest(list(between.values()))


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
    """The step whose slowest rank computes for ``compute`` seconds."""
    names = tuple(name for box in boxes for name in box.names)
    exchange = exchange_seconds(boxes, network) if network else 0.0
    shown = 0.0
    if network and exchange:
        last_bucket = exchange / buckets(network.gradient_bytes)
        shown = max(exchange - network.hidden * compute, last_bucket)
    return Prediction(global_batch, names, compute, shown, exchange)


def buckets(gradient_bytes: float) -> int:
    """How many all-reduces DistributedDataParallel starts in one backward."""
    return 1 + math.ceil(max(0.0, gradient_bytes - FIRST_BUCKET_BYTES) / BUCKET_BYTES)


def exchange_seconds(boxes: Sequence[Box], network: Network) -> float:
    """Of all gradients once: 0 for one rank, and where no link was measured."""
    nodes = sum(len(box.names) for box in boxes)
    ranks = sum(len(box.names) * len(box.ranks) for box in boxes)
    inside = [network.inside(box.names[0]) for box in boxes if len(box.ranks) > 1]
    if nodes == 1:
        return _ring(ranks, inside[0] if inside else None, network.gradient_bytes)
    between = _slowest([network.between(*pair) for pair in _neighbours(boxes)])
    flat = _ring(ranks, between, network.gradient_bytes)
    if not network.two_levels:
        return flat
    # To one rank of each node and back is as much as the ring inside the slowest node.
    most = max(len(box.ranks) for box in boxes)
    levels = _ring(most, _slowest(inside), network.gradient_bytes)
    return min(flat, levels + _ring(nodes, between, network.gradient_bytes))


def _ring(members: int, link: Link | None, gradient_bytes: float) -> float:
    if members < 2 or link is None:
        return 0.0
    messages = 2 * (members - 1) * buckets(gradient_bytes)
    return 2 * (members - 1) / members * gradient_bytes / link.bandwidth + messages * link.latency


def _slowest(links: Sequence[Link | None]) -> Link | None:
    known = [link for link in links if link is not None]
    if not known:
        return None
    return Link(min(link.bandwidth for link in known), max(link.latency for link in known))


def _neighbours(boxes: Sequence[Box]) -> Iterator[tuple[str, str]]:
    """The pairs of nodes that are next to each other in the ring; of many alike the first two."""
    names = [name for box in boxes for name in box.names[:2]]
    yield from pairwise([*names, names[0]])


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
        links = {name: (network.between(name, ""), network.inside(name)) for name in measured}
    alike: dict[object, list[Box]] = {}
    for box in nodes:
        alike.setdefault((box.ranks, links.get(box.names[0])), []).append(box)
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
