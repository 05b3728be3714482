"""Shares from measured times: what a whole step takes decides, not the noise of its fixed cost."""

import random
from collections.abc import Callable, Sequence

import pytest

from ddp_slurm.balance import split_batch, steady_split
from ddp_slurm.curve import Curve
from ddp_slurm.training.measure.forecast import pace
from ddp_slurm.training.uneven.measured_shares import alike_made_equal, curve_of, ladder

NOISE = 0.05
Seconds = Callable[[int], float]


def card(fixed: float, each: float) -> Seconds:
    """Python needs ``fixed`` seconds to start a step's kernels, which run beside it."""
    return lambda samples: max(fixed, each * samples) if samples else 0.0


def shares_of(cards: Sequence[Seconds], names: str, batch: int, seed: int) -> list[int]:
    """As measured, with noise."""
    noise = random.Random(seed)
    sizes = ladder(batch, len(cards))
    curves = [
        curve_of([(n, seconds(n) * noise.uniform(1 - NOISE, 1 + NOISE)) for n in sizes])
        for seconds in cards
    ]
    return steady_split(batch, alike_made_equal(curves, names, sizes))


def slowest(cards: Sequence[Seconds], shares: Sequence[int]) -> float:
    return max(seconds(n) for seconds, n in zip(cards, shares, strict=True))


def best(cards: Sequence[Seconds], batch: int) -> float:
    """Of all shares of two cards."""
    return min(slowest(cards, (n, batch - n)) for n in range(batch + 1))


@pytest.mark.parametrize("batch", [32, 128, 512])
def test_equal_cards_get_equal_shares(batch: int) -> None:
    """Flat below 64 samples: a line through such points would give one of them most."""
    cards = [card(0.010, 0.010 / 64)] * 2
    found = [shares_of(cards, "aa", batch, seed) for seed in range(100)]
    nearly = [shares for shares in found if abs(shares[0] - shares[1]) <= 2]
    assert len(nearly) >= 97
    assert all(slowest(cards, shares) <= 1.08 * best(cards, batch) for shares in found)


@pytest.mark.parametrize(
    ("cards", "batch"),
    [
        ([card(0.010, 1.6e-4), card(0.010, 1.6e-4)], 128),  # alike, under two names
        ([card(0.010, 1.6e-4), card(0.0108, 1.6e-4)], 128),
        ([card(0.008, 1.3e-5), card(0.008, 2.6e-5)], 2048),
        ([card(0.008, 1.3e-5), card(0.008, 6.5e-5)], 2048),
        ([card(0.008, 1.3e-5), card(0.040, 6.5e-5)], 2048),  # slow in Python, too: it gets nothing
        ([card(0.020, 8e-5), card(0.020, 16e-5)], 128),
        ([card(0.020, 8e-5), card(0.040, 16e-5)], 512),
    ],
)
def test_shares_minimise_the_slowest_rank(cards: list[Seconds], batch: int) -> None:
    for seed in range(50):
        shares = shares_of(cards, "ab", batch, seed)
        assert slowest(cards, shares) <= (1 + 2 * NOISE) * best(cards, batch), shares


def test_a_rank_whose_fixed_cost_is_too_high_gets_nothing() -> None:
    cards = [card(0.008, 1.3e-5), card(0.040, 6.5e-5)]
    assert shares_of(cards, "ab", 2048, 0) == [2048, 0]


def test_equally_fast_shares_are_those_of_a_larger_batch() -> None:
    flat = [Curve.through([(8, 0.01), (64, 0.01), (256, each)]) for each in (0.04, 0.08)]
    assert split_batch(48, flat) == [24, 24]
    assert steady_split(48, flat) == [31, 17]


def test_steady_split_is_exact_where_no_fixed_cost_rules() -> None:
    curves = [Curve.line(0.002, 1e-4), Curve.line(0.001, 3e-4)]
    found, fastest = steady_split(1000, curves), split_batch(1000, curves)
    times = [max(c.seconds(n) for c, n in zip(curves, s, strict=True)) for s in (found, fastest)]
    assert times[0] <= 1.006 * times[1]


def test_shares_above_the_memory_take_several_passes() -> None:
    curve = Curve.through([(10, 0.2), (20, 0.3), (40, 0.5)]).in_passes_of(20)
    assert curve.seconds(20) == pytest.approx(0.3)
    assert curve.seconds(60) == pytest.approx(0.9)
    assert curve.seconds(10) == pytest.approx(0.2)
    untouched = Curve.line(0.1, 0.01)
    assert untouched.in_passes_of(50).seconds(100) == pytest.approx(2 * untouched.seconds(50))


def test_a_fixed_cost_that_sets_the_pace_is_named() -> None:
    flat = Curve.through([(8, 0.01), (64, 0.01), (256, 0.04)])
    text = pace(64, [32, 32], [flat, flat])
    assert text is not None
    assert "a fixed cost sets the pace (Python, kernel launches, the optimizer): 10 of the" in text
    assert "a global batch of 256 would compute 2 times as many samples a second" in text
    assert pace(2048, [1024, 1024], [flat, flat]) is None
    slow = Curve.line(0.9, 0.001)
    text = pace(256, [256, 0], [flat, slow])
    assert text is not None
    assert "rank 1 gets no samples: the fixed cost of its step, 901 ms, is above" in text
