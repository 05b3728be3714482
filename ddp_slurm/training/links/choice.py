"""Which way the ranks exchange gradients: by what was asked for, and a short measurement."""

import math
from dataclasses import dataclass

import torch

from ddp_slurm.comm import EXACT, Comm
from ddp_slurm.exchange import HIDDEN, LOCAL_STEPS
from ddp_slurm.training.links.exchange import Exchange
from ddp_slurm.training.links.layout import Layout
from ddp_slurm.training.links.local_steps import LocalConfig
from ddp_slurm.training.measure.links import seconds_of_slowest

LEAST_BYTES = 1 << 20
"""Smaller gradients are a matter of latency, and are not measured: they go in one level."""
MOST_BYTES = 16 << 20
"""The most that one all-reduce of the measurement sends."""
SECONDS = 2.0
"""About how long the measurement may take."""
CLEARLY = 1.1
"""Two levels are taken where they are faster by this factor. Less may be noise, and a resumed run
must find the same way again: its sums would differ in the last bit."""


@dataclass(frozen=True)
class Measured:
    """Seconds of one exact exchange of all gradients, in one level and in two."""

    flat: float
    two_levels: float

    @property
    def best(self) -> float:
        return min(self.flat, self.two_levels)

    @property
    def two_levels_win(self) -> bool:
        return self.flat > CLEARLY * self.two_levels


def measure(exchange: Exchange, total_bytes: int) -> Measured:
    """Time both ways, with growing buffers until the time is used up. All ranks call it."""
    size = min(total_bytes, LEAST_BYTES)
    _seconds_of_both(exchange, size)  # the first one connects the ranks
    while True:
        seconds = _seconds_of_both(exchange, size)
        if size >= min(total_bytes, MOST_BYTES) or 4 * sum(seconds) > SECONDS / 4:
            break
        size = min(4 * size, total_bytes, MOST_BYTES)
    for _ in range(min(3, int(SECONDS / 2 / sum(seconds)))):
        again = _seconds_of_both(exchange, size)
        seconds = (min(seconds[0], again[0]), min(seconds[1], again[1]))
    scale = total_bytes / size
    return Measured(seconds[0] * scale, seconds[1] * scale)


def _seconds_of_both(exchange: Exchange, size: int) -> tuple[float, float]:
    """In one level and in two."""
    exchange.two_levels = False
    flat = _seconds_of(exchange, size)
    if not exchange.layout.has_two_levels:
        return flat, flat
    exchange.two_levels = True
    return flat, _seconds_of(exchange, size)


def _seconds_of(exchange: Exchange, size: int) -> float:
    """What the slowest rank needs for ``size`` bytes; the same number on every rank."""
    buffer = torch.zeros(size // 4, device=exchange.device)
    return seconds_of_slowest(lambda: exchange.start(buffer).wait(), exchange.device)


def choose(comm: Comm, exact_seconds: float | None, compute_seconds: float | None) -> Comm:
    """What ``auto`` takes; anything else stays as it is.

    Args:
        exact_seconds: of one exact exchange of all gradients; None where no link is crossed.
        compute_seconds: of one step without it; None: unknown, and nothing is hidden. The gradients
            of a step can hide behind a part of it only, since they appear during backward; the
            average of local steps can hide behind all of it.
    """
    if comm.kind != "auto":
        return comm
    compute = compute_seconds or 0.0
    hidden = HIDDEN * compute
    if comm.allows == "exact" or exact_seconds is None or exact_seconds <= hidden:
        return EXACT
    bf16_seconds = exact_seconds / 2
    if comm.allows == "bf16" or bf16_seconds <= hidden:
        return Comm("bf16")
    enough = (n for n in LOCAL_STEPS if bf16_seconds <= LocalConfig(n).steps_of_delay * compute)
    return Comm("local", steps=next(enough, LOCAL_STEPS[-1] if compute else 32))


def steps_of_delay(steps: int, exchange_seconds: float, compute_seconds: float) -> int:
    """After how many optimizer steps an average of local steps has arrived; half of ``steps`` at
    most.

    The error grows with the delay: meanwhile the ranks go on from different points. Momentum lets
    their differences swing, with a period of some ten steps: a correction as late as the next
    average meets them on the other side, and adds to them.
    """
    needed = math.ceil(CLEARLY * exchange_seconds / compute_seconds)
    return min(needed, LocalConfig(steps).steps_of_delay)


def arithmetic(
    layout: Layout,
    total_bytes: int,
    measured: Measured | None,
    compute_seconds: float | None,
) -> str:
    """One line with the numbers behind the choice."""
    ways = [f"in one level {layout.traffic(two_levels=False):.2f}x"]
    if layout.has_two_levels:
        ways.append(f"in two {layout.traffic(two_levels=True):.2f}x")
    if measured is not None:
        seconds = (measured.flat, measured.two_levels)
        ways = [f"{way}, {_milliseconds(t)}" for way, t in zip(ways, seconds, strict=False)]
    compute = "unknown" if compute_seconds is None else _milliseconds(compute_seconds)
    return (
        f"{layout} ranks, {total_bytes / 1e6:.1f} MB of gradients, through a node's link "
        f"{'; '.join(ways)}; computing a step takes {compute}"
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
