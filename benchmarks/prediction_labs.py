"""Random labs for ``prediction.py``, and a model of those that are too large to be run here.

The model plays a step bucket by bucket, which the prediction's formula does not: each bucket is
sent when backward has made it on every rank and the one before it has gone.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from ddp_slurm.curve import Curve
from ddp_slurm.exchange import BUCKET_BYTES, FIRST_BUCKET_BYTES, Link, Network

Ways = Sequence[tuple[str, int | None, float]]
"""``--comm``, bytes of a bucket (None: DDP's own), and the seconds of compute of a step."""

LAYERS = 30
FORWARD = 1 / 3
"""The part of a step's compute before backward."""
LATENCY = 1e-4
INSIDE = Link(5e9, 2e-5)
NOISE = 0.02
"""The part by which what is measured differs from what is."""


class Lab(NamedTuple):
    """Machines, in the order of ranks."""

    milliseconds: tuple[tuple[float, ...], ...]
    """Of a sample, for each rank of each machine."""
    megabits: int
    """A second, of every machine's link."""
    batch: int
    """Samples of a step over all ranks."""
    gradient_bytes: float

    @property
    def name(self) -> str:
        return "+".join(str(len(ranks)) for ranks in self.milliseconds)

    @property
    def link(self) -> Link:
        return Link(self.megabits * 1e6 / 8, LATENCY)


def random_lab(source: random.Random, *, small: bool) -> Lab:
    """1 to 5 machines of 1 to 4 ranks, up to 5 times as fast as each other, and links of 50 Mbit/s
    to 10 Gbit/s. A small one has few ranks, and links that two cores can fill.

    Computing takes from a tenth to three times as long as the gradients on the links, in a small
    lab as long at most: so some labs are faster without some of their machines.
    """
    nodes = source.randint(2, 3) if small else source.randint(1, 5)
    ranks = [source.randint(1, 2 if small else 4) for _ in range(nodes)]
    speeds = [source.uniform(1, 5) for _ in range(nodes)]
    megabits = round(50 * (4 if small else 200) ** source.random())
    gradient_bytes = 5e6 if small else 45e6
    exchange = 2 * gradient_bytes / (megabits * 1e6 / 8)
    compute = exchange * 0.1 * (10 if small else 30) ** source.random()
    batch = source.choice([200, 400, 800])
    samples_a_second = sum(n * speed for n, speed in zip(ranks, speeds, strict=True))
    # The fastest shares compute for so long.
    unit = 1000 * compute * samples_a_second / batch
    milliseconds = tuple((unit / speed,) * n for n, speed in zip(ranks, speeds, strict=True))
    return Lab(milliseconds, megabits, batch, gradient_bytes)


def measured(lab: Lab, source: random.Random) -> tuple[Network, list[list[Curve]]]:
    """What a measurement of the lab would find: NOISE away from what is."""

    def about(value: float) -> float:
        return value * source.uniform(1 - NOISE, 1 + NOISE)

    curves = [[Curve.line(0.0, about(ms / 1000)) for ms in own] for own in lab.milliseconds]
    machines = range(len(lab.milliseconds))
    links = {
        frozenset((str(one), str(other))): Link(about(lab.link.bandwidth), LATENCY)
        for one in machines
        for other in machines
        if one < other
    }
    links |= {frozenset((str(machine),)): INSIDE for machine in machines}
    return Network(lab.gradient_bytes, links, hidden=about(1 - FORWARD)), curves


def step_seconds(
    lab: Lab, choice: Sequence[int], shares: Sequence[int], way: str, bucket: int | None
) -> float:
    """A step on these machines; ``way`` is ``flat``, ``two levels`` or ``bf16``."""
    milliseconds = [ms for machine in choice for ms in lab.milliseconds[machine]]
    compute = max(share * ms / 1000 for share, ms in zip(shares, milliseconds, strict=True))
    counts = [len(lab.milliseconds[machine]) for machine in choice]
    sent, done = 0.0, 0.0
    for size in _buckets(lab.gradient_bytes, bucket):
        sent += size
        ready = compute * (FORWARD + (1 - FORWARD) * sent / lab.gradient_bytes)
        done = max(ready, done) + _bucket_seconds(lab, counts, size, way)
    return max(compute, done)


def _buckets(gradient_bytes: float, bucket: int | None) -> list[float]:
    """A bucket is full with the layer that exceeds it."""
    layer = gradient_bytes / LAYERS
    sizes = [0.0]
    for _ in range(LAYERS):
        limit = bucket or (FIRST_BUCKET_BYTES if len(sizes) == 1 else BUCKET_BYTES)
        if sizes[-1] >= limit:
            sizes.append(0.0)
        sizes[-1] += layer
    return sizes


def _bucket_seconds(lab: Lab, counts: Sequence[int], size: float, way: str) -> float:
    if len(counts) == 1:
        return _ring(counts[0], size, INSIDE)
    if way == "flat":
        return _ring(sum(counts), size, lab.link)
    between = size / 2 if way == "bf16" else size
    return _ring(max(counts), size, INSIDE) + _ring(len(counts), between, lab.link)


def _ring(members: int, size: float, link: Link) -> float:
    sent = 2 * (members - 1) / members * size
    return sent / link.bandwidth + 2 * (members - 1) * link.latency
