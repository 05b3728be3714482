"""Shares of the batch: exact, whatever the costs."""

import doctest
import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_slurm import balance
from ddp_slurm.balance import BalanceError, apportion, equal_shares, planned_shares, split_batch

seconds = st.sampled_from([0.0, 0.01, 0.02, 0.5]) | st.floats(0, 3)
costs = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=4)


def step_seconds(shares: list[int], costs: list[tuple[float, float]]) -> float:
    return max(alpha + beta * n for n, (alpha, beta) in zip(shares, costs, strict=True))


@given(
    st.integers(0, 12),
    costs,
    st.none() | st.integers(0, 12) | st.lists(st.integers(0, 12), min_size=4, max_size=4),
)
def test_no_split_is_faster(
    batch: int, costs: list[tuple[float, float]], limit: int | list[int] | None
) -> None:
    limit = limit[: len(costs)] if isinstance(limit, list) else limit
    limits = (
        [batch] * len(costs)
        if limit is None
        else [limit] * len(costs)
        if isinstance(limit, int)
        else limit
    )
    choices = itertools.product(*[range(min(batch, most) + 1) for most in limits])
    possible = [list(shares) for shares in choices if sum(shares) == batch]
    if not possible:
        with pytest.raises(
            BalanceError,
            match=f"global batch {batch} does not fit: the ranks can take {sum(limits)}",
        ):
            split_batch(batch, costs, limit)
        return
    shares = split_batch(batch, costs, limit)
    assert shares in possible
    assert step_seconds(shares, costs) == min(step_seconds(other, costs) for other in possible)


@given(
    st.integers(0, 10**7),
    st.lists(st.tuples(st.floats(0, 1), st.floats(1e-6, 1)), min_size=1, max_size=9),
)
def test_moving_a_sample_does_not_improve_a_large_split(
    batch: int, costs: list[tuple[float, float]]
) -> None:
    shares = split_batch(batch, costs)
    assert sum(shares) == batch
    longest = step_seconds(shares, costs)
    for n, (alpha, beta) in zip(shares, costs, strict=True):
        if (
            n and alpha + beta * n == longest
        ):  # taking one from the slowest rank must make another as slow
            others = [
                a + b * (m + 1)
                for m, (a, b) in zip(shares, costs, strict=True)
                if (a, b) != (alpha, beta)
            ]
            assert all(seconds >= longest for seconds in others)


@pytest.mark.parametrize(
    ("costs", "batch", "shares"),
    [
        ([(0, 1), (0, 1), (0, 1)], 100, [34, 33, 33]),
        ([(0, 0), (0, 0)], 5, [3, 2]),  # nothing measured: equal
        ([(0, 1), (0, 3), (0, 15)], 107, [77, 25, 5]),
        ([(9, 1), (0, 1)], 5, [0, 5]),  # a rank too slow for even one sample
    ],
)
def test_known_splits(costs: list[tuple[float, float]], batch: int, shares: list[int]) -> None:
    assert split_batch(batch, costs) == shares


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, [(0, 1)]), "global batch -1 is negative"),
        ((4, []), "no costs"),
        ((4, [(0, 1), (float("nan"), 1)]), r"rank 1: cost \(nan, 1\)"),
        ((4, [(0, -1)]), r"rank 0: cost \(0, -1\)"),
        ((4, [(-1, 0)]), r"rank 0: cost \(-1, 0\)"),
        ((4, [(0, float("inf"))]), r"rank 0: cost \(0, inf\)"),
        ((4, [(float("inf"), 0)]), r"rank 0: cost \(inf, 0\)"),
        ((4, [(0, 1)], [4, 4]), "max_batch has 2 numbers for 1 ranks"),
        ((4, [(0, 1), (0, 1)], [5, -1]), "holds a negative number"),
        ((9, [(0, 1), (0, 1)], 4), "global batch 9 does not fit: the ranks can take 8 at most"),
    ],
)
def test_split_batch_errors(arguments: tuple, message: str) -> None:
    with pytest.raises(BalanceError, match=message):
        split_batch(*arguments)


@given(st.integers(0, 10**6), st.integers(1, 50))
def test_equal_shares(batch: int, world_size: int) -> None:
    shares = equal_shares(batch, world_size)
    assert sum(shares) == batch
    assert len(shares) == world_size
    assert max(shares) - min(shares) <= 1


@given(st.integers(0, 1000), st.lists(st.integers(0, 100), min_size=1, max_size=9).filter(any))
def test_apportion_is_within_one_of_the_exact_share(total: int, weights: list[int]) -> None:
    shares = apportion(total, weights)
    assert sum(shares) == total
    assert all(abs(n - total * w / sum(weights)) < 1 for n, w in zip(shares, weights, strict=True))


@pytest.mark.parametrize(("total", "weights"), [(1, [0, 0]), (-1, [1]), (3, [2, -1]), (3, [])])
def test_apportion_refuses_what_cannot_be_shared(total: int, weights: list[int]) -> None:
    with pytest.raises(BalanceError):
        apportion(total, weights)


def test_no_samples_need_no_weights() -> None:
    assert apportion(0, [0, 0, 0]) == [0, 0, 0]
    assert apportion(0, []) == []


@pytest.mark.parametrize(
    ("batch", "world_size", "planned", "shares"),
    [
        (10, 4, None, [3, 3, 2, 2]),
        (10, 4, "", [3, 3, 2, 2]),
        (10, 4, "1,3(x3)", [1, 3, 3, 3]),
        (20, 4, "1,3(x3)", [2, 6, 6, 6]),  # the training's own batch, in the plan's proportions
        (10, 3, "1,3(x3)", "holds 4 shares for 3 ranks"),
        (10, 0, None, "world size 0: at least one rank is needed"),
        (-1, 2, None, "global batch -1 is negative"),
    ],
)
def test_planned_shares(
    batch: int, world_size: int, planned: str | None, shares: list[int] | str
) -> None:
    environ = {} if planned is None else {"DDP_SLURM_SHARES": planned}
    if isinstance(shares, str):
        with pytest.raises(BalanceError, match=shares):
            planned_shares(batch, world_size, environ)
    else:
        assert planned_shares(batch, world_size, environ) == shares


def test_planned_shares_are_looked_for_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_SLURM_SHARES", "9,1")
    assert planned_shares(10, 2) == [9, 1]
    assert planned_shares(10, 2, {}) == [5, 5]


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(balance).attempted >= 4
    assert doctest.testmod(balance).failed == 0


def test_needs_no_torch() -> None:
    code = (
        "import sys, ddp_slurm.balance; sys.exit('torch' in sys.modules or 'yaml' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
