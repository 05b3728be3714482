"""How long the exchange of gradients takes between nodes. Standard library only.

    exchange = bytes on the slowest link / its bandwidth + messages one after another * latency

Of S bytes of gradients a ring of R ranks sends ``2 (R - 1) / R * S`` over each link, in
``2 (R - 1)`` messages a bucket. In two levels it is the same with the N nodes in place of the R
ranks, after a reduction inside each node. bf16 halves the bytes between nodes; local steps exchange
once in STEPS steps, behind all of them.
Source of the ring's cost: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from ddp_slurm.comm import Comm
from ddp_slurm.curve import Curve

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""DistributedDataParallel's buckets of gradients, where nothing else was chosen."""
SMALLER_BUCKETS = (5 << 20, 1 << 20)
"""What may be chosen: the last bucket, which backward cannot hide, is smaller, and there are more
messages."""
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


class Way(NamedTuple):
    """How the gradients are exchanged."""

    sent: float = 1.0
    """The part of their bytes that goes between nodes."""
    steps: int = 1
    """From one exchange to the next."""
    may_be_flat: bool = True
    """Whether one ring of all ranks is taken where it is faster than two levels."""
    may_have_levels: bool = True


PLAIN = (Way(may_have_levels=False),)
"""What DistributedDataParallel does by itself."""
BF16 = Way(0.5, may_be_flat=False)
LOCAL_STEPS = (8, 16, 32, 64)
"""What ``auto:local`` may take."""


def ways_of(comm: Comm) -> tuple[Way, ...]:
    """What ``--comm`` allows; the fastest is taken. PowerSGD counts as exact: its bytes depend on
    the shapes of the parameters."""
    if comm.kind == "bf16":
        return (BF16,)
    if comm.kind == "local":
        return (BF16._replace(steps=comm.steps),)
    local = tuple(BF16._replace(steps=steps) for steps in LOCAL_STEPS)
    more = {"exact": (), "bf16": (BF16,), "local": (BF16, *local)}
    return (Way(), *more[comm.allows])


class Network(NamedTuple):
    """What the exchange of gradients depends on."""

    gradient_bytes: float
    links: Mapping[frozenset[str], Link]
    """By the names of two nodes, or of one for the ranks inside it."""
    hidden: float = HIDDEN
    """See the module."""
    ways: tuple[Way, ...] = (Way(),)
    """Those that may be taken."""

    stand_ins: Mapping[str, str] = MappingProxyType({})
    """For a node without measured links, one that is like it and has some."""
    bucket_bytes: int | None = None
    """Of each all-reduce; None: DistributedDataParallel's own."""
    bucket_choices: tuple[int | None, ...] = (None,)
    """Those that may be taken."""

    @property
    def buckets(self) -> int:
        """How many all-reduces DistributedDataParallel starts in one backward."""
        behind_first = max(0.0, self.gradient_bytes - self._first_bucket)
        return 1 + math.ceil(behind_first / self._next_buckets)

    @property
    def decisive_buckets(self) -> list[tuple[float, float]]:
        """Where the first, the second and the last two buckets begin and end among the gradients,
        0 to 1. Those between are as large as the second.

        >>> Network(FIRST_BUCKET_BYTES + 3 * BUCKET_BYTES, {}).decisive_buckets[:2]
        [(0.0, 0.013157894736842105), (0.013157894736842105, 0.34210526315789475)]
        """
        numbers = {0, 1, self.buckets - 2, self.buckets - 1}
        known = sorted(number for number in numbers if 0 <= number < self.buckets)
        return [(self._sent_before(number), self._sent_before(number + 1)) for number in known]

    def _sent_before(self, bucket: int) -> float:
        if bucket == 0:
            return 0.0
        sent = self._first_bucket + (bucket - 1) * self._next_buckets
        return min(1.0, sent / self.gradient_bytes)

    @property
    def _first_bucket(self) -> int:
        """It is a small one where nothing was chosen."""
        return self.bucket_bytes or FIRST_BUCKET_BYTES

    @property
    def _next_buckets(self) -> int:
        return self.bucket_bytes or BUCKET_BYTES

    def between(self, one: str, other: str) -> Link | None:
        """The link of two nodes; where it was not measured, as slow as the slower node's others.

        A node without any measured link, nor one that stands in for it, counts as slow as the
        slowest. None without any links.
        """
        one, other = self.known(one), self.known(other)
        measured = self.links.get(frozenset((one, other))) if one != other else None
        return measured or _slowest([self.own(one), self.own(other)])

    def inside(self, node: str) -> Link | None:
        return self.links.get(frozenset((self.known(node),)))

    def known(self, node: str) -> str:
        """The node itself, or the one that stands in for it."""
        return self.stand_ins.get(node, node)

    def own(self, node: str) -> Link | None:
        """The node's fastest link to another one."""
        between = {pair: link for pair, link in self.links.items() if len(pair) == 2}
        own = [link for pair, link in between.items() if node in pair]
        fastest_own = max(own, key=lambda link: link.bandwidth, default=None)
        return fastest_own or _slowest(list(between.values()))


def ring_seconds(network: Network, members: int, link: Link | None, sent: float = 1.0) -> float:
    """Of one ring of ranks, which sends a part of the gradients' bytes: in bf16, a half."""
    if members < 2 or link is None:
        return 0.0
    messages = 2 * (members - 1) * network.buckets
    size = sent * network.gradient_bytes
    return 2 * (members - 1) / members * size / link.bandwidth + messages * link.latency


def exchange_seconds(boxes: Sequence[Box], network: Network, way: Way) -> float:
    """Of all gradients once: 0 for one rank, and where no link was measured."""
    ring = partial(ring_seconds, network)
    nodes = sum(len(box.names) for box in boxes)
    ranks = sum(len(box.names) * len(box.ranks) for box in boxes)
    inside = [network.inside(box.names[0]) for box in boxes if len(box.ranks) > 1]
    if nodes == 1:
        return ring(ranks, inside[0] if inside else None)
    # The pairs that are next to each other in the ring; of many nodes alike the first two.
    names = [name for box in boxes for name in box.names[:2]]
    between = _slowest([network.between(*pair) for pair in pairwise([*names, names[0]])])
    flat = ring(ranks, between)
    # To one rank of each node and back is as much as the ring inside the slowest node.
    most = max(len(box.ranks) for box in boxes)
    levels = ring(most, _slowest(inside)) + ring(nodes, between, way.sent)
    if not way.may_have_levels:
        return flat
    return min(flat, levels) if way.may_be_flat else levels


def _slowest(links: Sequence[Link | None]) -> Link | None:
    known = [link for link in links if link is not None]
    if not known:
        return None
    return Link(min(link.bandwidth for link in known), max(link.latency for link in known))
