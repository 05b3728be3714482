"""Uneven ranks make the very update that one process makes of the whole batch."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .trainer_worker import relative_error
from .workers import Case, Outcome, compare, serve_cases, train_alone
from .worlds import World, run_world, world

TASKS = (1, 2, 4)
SHARES = (5, 24, 24, 72, 72, 72, 72)
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}


def worst_error(found: Outcome, expected: Outcome) -> float:
    return max(
        relative_error(torch.tensor(found.losses), torch.tensor(expected.losses)),
        max(relative_error(f, e) for f, e in zip(found.gradients, expected.gradients, strict=True)),
        relative_error(found.parameters, expected.parameters),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"micro_batch": 20, "clip_norm": 0.3},
        {"accumulate": 3, "micro_batch": 50, "clip_norm": 0.3},
    ],
    ids=["plain", "micro-batches, clipping", "accumulation over steps, micro-batches, clipping"],
)
def test_parity_of_twenty_steps_with_one_process(
    tmp_path: Path, dtype: torch.dtype, options: dict[str, float]
) -> None:
    case = Case(
        samples=800, shares=SHARES, steps=20, dtype=dtype, **options
    )  # 341, 341, 118 samples a step
    expected = train_alone(case)
    for found in run_world(tmp_path, TASKS, compare, case):
        assert worst_error(found, expected) < TOLERANCE[dtype]


def test_parity_fails_with_the_plain_mean_over_ranks(tmp_path: Path) -> None:
    case = Case(samples=800, shares=SHARES, steps=20, weighted=False)
    expected = train_alone(case)
    for found in run_world(tmp_path, TASKS, compare, case):
        assert worst_error(found, expected) > 1e-2


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Seven ranks that answer one case after another."""
    with world(tmp_path_factory.mktemp("service"), TASKS, serve_cases) as running:
        yield running
        for pipe in running.pipes:
            pipe.send(None)
        assert running.results() == [None] * 7


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shares = draw(st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any))
    return Case(
        samples=draw(st.integers(1, 40)),
        shares=tuple(shares),
        steps=draw(st.integers(1, 4)),
        micro_batch=draw(st.integers(1, 6)),
        accumulate=draw(st.integers(1, 3)),
        clip_norm=draw(st.sampled_from([None, 0.2])),
    )


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cases())
def test_parity_of_any_world_shares_and_data_set(service: World, case: Case) -> None:
    for pipe in service.pipes:
        pipe.send(case)
    found = [service.receive(rank) for rank in range(7)]
    expected = train_alone(case)
    for outcome in found[: len(case.shares)]:
        assert worst_error(outcome, expected) < 1e-6
