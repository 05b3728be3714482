"""Every way of exchanging gradients gives what it promises, on uneven nodes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddp_slurm.training.links.exchange import LEAST_IN_A_PIECE

from .links_worker import (
    compressed_gradients,
    forget_to_average,
    forget_to_wrap,
    gradient_in_buckets,
    summed_in_bf16,
    with_hook,
    wrap_a_large_model,
    wrap_without_optimizer,
    wrapped,
)
from .test_parity import worst_error
from .trainer_worker import relative_error
from .workers import Case, train_alone
from .worlds import run_world, world

TASKS = (4, 2, 1)
SHARES = (18, 18, 18, 18, 36, 36, 72)
"""The cards of the three nodes are 1 : 2 : 4; 216 samples, and 152 at the end of an epoch."""


def test_two_levels_are_exact(tmp_path: Path) -> None:
    case = Case(samples=800, shares=SHARES, steps=20, micro_batch=40, clip_norm=0.3)
    expected = train_alone(case)
    found = run_world(tmp_path, TASKS, with_hook, case, True, False)
    for outcome in found:
        assert worst_error(outcome, expected) < 1e-6
        assert torch.equal(outcome.parameters, found[0].parameters)


def test_two_levels_are_wrong_without_the_loss_weight(tmp_path: Path) -> None:
    case = Case(samples=800, shares=SHARES, steps=20, weighted=False)
    expected = train_alone(case)
    for found in run_world(tmp_path, TASKS, with_hook, case, True, False):
        assert worst_error(found, expected) > 1e-2


@pytest.mark.parametrize("numbers", [1001, 3 * LEAST_IN_A_PIECE + 5])
@pytest.mark.parametrize("two_levels", [True, False])
def test_sum_in_bf16_rounds_twice(tmp_path: Path, two_levels: bool, numbers: int) -> None:
    values = torch.randn(7, numbers, generator=torch.Generator().manual_seed(1))
    exact = values.double().sum(dim=0)
    found = run_world(tmp_path, TASKS, summed_in_bf16, values, two_levels)
    rounding = 2.0**-8  # half of the last of 8 bits
    most = rounding * (values.double().abs().sum(dim=0) + exact.abs()) * 1.01
    for total in found:
        assert ((total - exact).abs() <= most).all()
        assert torch.equal(total, found[0])


def test_bf16_trains_within_its_rounding(tmp_path: Path) -> None:
    case = Case(samples=800, shares=SHARES, steps=20, micro_batch=40)
    expected = train_alone(case)
    environ = {"DDP_SLURM_COMM": "bf16"}
    found = run_world(tmp_path, TASKS, wrapped, case, environ=environ)
    for outcome in found:
        error = relative_error(outcome.parameters, expected.parameters)
        assert 1e-6 < error < 2e-2
        assert torch.equal(outcome.parameters, found[0].parameters)


def test_powersgd_trains(tmp_path: Path) -> None:
    case = Case(samples=800, shares=SHARES, steps=40, micro_batch=40)
    expected = train_alone(case)
    environ = {"DDP_SLURM_COMM": "powersgd"}
    found = run_world(tmp_path, TASKS, wrapped, case, environ=environ)
    for outcome in found:
        assert outcome.losses[-1] < 1.2 * expected.losses[-1] + 0.01
        assert torch.equal(outcome.parameters, found[0].parameters)


def test_two_levels_are_taken_where_they_are_faster(tmp_path: Path) -> None:
    with world(tmp_path, (2, 1), wrap_a_large_model) as running:
        assert running.results() == [(True, True)] * 3
        line = running.log(0)
        assert "comm: exact, in two levels: 2+1 ranks, 1.1 MB of gradients" in line
        assert "in one level 1.33x, " in line


@pytest.mark.parametrize(("bucket_bytes", "number"), [(None, 2), (1 << 20, 3)])
def test_buckets_are_those_of_the_job(
    tmp_path: Path, bucket_bytes: int | None, number: int
) -> None:
    assert run_world(tmp_path, (1, 1), gradient_in_buckets, bucket_bytes) == [(number, True)] * 2


@pytest.mark.parametrize(
    ("function", "comm", "status", "words"),
    [
        (forget_to_wrap, "bf16", 0, "warning: --comm bf16 had no effect"),
        (forget_to_average, "", 0, "warning: the ranks' parameters differ: call world.average()"),
        (wrap_without_optimizer, "local:8", 2, "world.wrap(model, optimizer, shares)"),
    ],
)
def test_what_a_script_forgets_is_reported(
    tmp_path: Path, function: Callable[..., None], comm: str, status: int, words: str
) -> None:
    environ = {"DDP_SLURM_COMM": comm}
    with world(tmp_path, (1, 1), function, environ=environ) as running:
        assert running.wait() == [status] * 2
        assert words in running.log(0)


@pytest.mark.parametrize(("samples", "least", "most"), [(2, 0.0, 1e-4), (32, 0.1, 3.0)])
def test_powersgd_sends_matrices_of_rank_2(
    tmp_path: Path, samples: int, least: float, most: float
) -> None:
    """A layer that is compressed whole leaves nothing else to send (pytorch issue 58467)."""
    found = run_world(tmp_path, (1, 1), compressed_gradients, samples)
    assert found[0] == found[1]
    first, last = found[0]
    assert first < 1e-6
    assert least <= last < most
