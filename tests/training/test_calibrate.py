"""Measuring the ranks' speeds, and the shares that follow."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from ddp_slurm.training.data import (
    Batch,
    ResidentTensors,
    Span,
)
from ddp_slurm.training.uneven import calibrate
from ddp_slurm.training.uneven.calibrate import (
    TrainingStep,
    alike_made_equal,
    fit_line,
    measure_cost,
)

from .workers import (
    cross_entropy,
    make_data,
    make_model,
    measured,
)
from .worlds import run_world

CPU = torch.device("cpu")


def step_of(model: torch.nn.Module, source: ResidentTensors) -> TrainingStep:
    def first_samples(count: int) -> Batch:
        return next(source.batches(torch.arange(count) % len(source), [(0, count)], epoch=0))

    return TrainingStep(model, cross_entropy, first_samples, CPU)


def test_measured_shares_give_a_slow_rank_less(tmp_path: Path) -> None:
    found = run_world(
        tmp_path, (1, 1), measured, [0.004, 0.001], 10, environ={"DDP_SLURM_BALANCE": "measured"}
    )
    assert found[0] == found[1]
    assert sum(found[0]) == 10
    assert found[0][0] < found[0][1]


@pytest.mark.parametrize(
    ("costs", "shares"),
    [
        (
            [(0.0150, 1e-6), (0.0151, 2e-6)],
            [512, 512],
        ),  # within the noise; taken at its word it would be 716 and 308
        ([(0.0, 1e-4), (0.0, 3e-4)], [768, 256]),
    ],
)
def test_measured_shares_ignore_noise_between_like_cards(
    tmp_path: Path, costs: list, shares: list[int]
) -> None:
    found = run_world(
        tmp_path,
        (1, 1),
        measured,
        [0.0, 0.0],
        1024,
        costs,
        environ={"DDP_SLURM_BALANCE": "measured"},
    )
    assert found == [shares, shares]


@pytest.mark.parametrize(
    ("sizes", "seconds", "line"),
    [
        ([10, 20, 40], [0.3, 0.5, 0.9], (0.1, 0.02)),
        ([10, 20], [0.5, 0.4], (0.0, 0.03)),  # noise: falling
        ([10, 20], [0.1, 0.4], (0.0, 0.016666666667)),  # noise: below zero at no samples
        ([8], [0.4], (0.0, 0.05)),
    ],
)
def test_fit_line_keeps_costs_positive(
    sizes: list[int], seconds: list[float], line: tuple[float, float]
) -> None:
    assert fit_line(sizes, seconds) == pytest.approx(line)


@pytest.mark.parametrize(
    ("costs", "models", "fitted"),
    [
        # a step that hardly depends on the share: noise would move most of the batch
        ([(0.0150, 1e-6), (0.0151, 2e-6)], "aa", [(0.01505, 1.5e-6)] * 2),
        ([(0.0, 1e-4), (0.0, 2e-4)], "aa", [(0.0, 1e-4), (0.0, 2e-4)]),  # one of them throttles
        ([(0.0, 1.00e-4), (0.0, 1.04e-4)], "ab", [(0.0, 1.00e-4), (0.0, 1.04e-4)]),
        (
            [(0.0, 1.00e-4), (0.0, 1.04e-4), (0.0, 1.02e-4), (0.0, 3e-4)],
            "aaba",
            [(0.0, 1.02e-4), (0.0, 1.02e-4), (0.0, 1.02e-4), (0.0, 3e-4)],
        ),
        ([(0.0, 1.00e-4), (0.0, 1.06e-4)], "aa", [(0.0, 1.00e-4), (0.0, 1.06e-4)]),
    ],
)
def test_alike_made_equal_averages_within_the_noise(costs: list, models: str, fitted: list) -> None:
    equal = alike_made_equal(costs, list(models), 100)
    assert np.array(equal) == pytest.approx(np.array(fitted))


@pytest.mark.parametrize("disturbed", [0, 1, 2])
def test_measure_cost_ignores_a_disturbed_sweep(
    disturbed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def seconds_of_step(step: object, work: object, size: int, *, is_first: bool) -> float:
        sweep = calls.count(size)
        calls.append(size)
        assert is_first is (sweep == 0)
        return (1.0 if sweep == disturbed else 0.0) + 0.002 + 0.0001 * size

    monkeypatch.setattr(calibrate, "seconds_of_step", seconds_of_step)
    source = ResidentTensors(*make_data(4, torch.float32), torch.device("cpu"))
    cost = measure_cost(step_of(torch.nn.Linear(1, 1), source), 40, 64)
    assert calls == [20, 40, 60] * 3
    assert cost == pytest.approx((0.002, 0.0001))


class Clock:
    """A clock that only the test moves on."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


class SlowSource(ResidentTensors):
    """Takes a second for each batch, as a loader does that starts its workers."""

    clock: Clock

    def batches(self, order: torch.Tensor, spans: Sequence[Span], epoch: int) -> Iterator[Batch]:
        self.clock.seconds += 1.0
        yield from super().batches(order, spans, epoch)


def test_measure_cost_leaves_out_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[bool] = []
    clock = Clock()
    monkeypatch.setattr(calibrate, "time", clock)

    class Watched(torch.nn.SyncBatchNorm):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            modes.append(self.training)
            clock.seconds += 0.002 + 0.001 * len(inputs)
            return inputs

    model = torch.nn.Sequential(make_model(torch.float32), Watched(4))
    source = SlowSource(*make_data(40, torch.float32), CPU)
    source.clock = clock
    assert measure_cost(step_of(model, source), 8, 64) == pytest.approx((0.002, 0.001))
    assert not any(modes), "SyncBatchNorm's forward would wait for the slowest rank"
    assert model[1].training
