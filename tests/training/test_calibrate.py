"""Measuring the ranks' speeds, and the shares that follow."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddp_slurm.curve import Curve
from ddp_slurm.training.data import (
    Batch,
    ResidentTensors,
    Span,
)
from ddp_slurm.training.memory.preserve import preserved
from ddp_slurm.training.uneven import calibrate
from ddp_slurm.training.uneven.calibrate import StepTimes, TrainingStep
from ddp_slurm.training.uneven.measured_shares import alike_made_equal

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
    ("costs", "models", "fitted"),
    [
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
    sizes = [25, 50, 100, 200]
    curves = [Curve.through([(n, a + b * n) for n in sizes]) for a, b in costs]
    equal = alike_made_equal(curves, list(models), sizes)
    for curve, (alpha, beta) in zip(equal, fitted, strict=True):
        assert curve.seconds(120) == pytest.approx(alpha + beta * 120)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank that waits for nobody."""
    monkeypatch.setattr(calibrate.dist, "barrier", lambda group: None)


@pytest.mark.parametrize("disturbed", [0, 1, 2])
def test_times_ignore_a_disturbed_sweep(
    disturbed: int, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    calls: list[int] = []

    def seconds_of_step(
        step: object, work: object, size: int, *, is_first: bool, optimizer: object
    ) -> float:
        sweep = calls.count(size)
        calls.append(size)
        assert is_first is (sweep == 0)
        return (1.0 if sweep == disturbed else 0.0) + 0.002 + 0.0001 * size

    monkeypatch.setattr(calibrate, "seconds_of_step", seconds_of_step)
    monkeypatch.setattr(calibrate, "LONG_STEP_SECONDS", 9.0)
    source = ResidentTensors(*make_data(4, torch.float32), torch.device("cpu"))
    times = StepTimes(step_of(torch.nn.Linear(1, 1), source), 60)
    times.measure([1, 40, 100], None)  # type: ignore[arg-type]
    assert calls == [2, 40, 60] * 3
    assert times.seconds == pytest.approx({n: 0.002 + 0.0001 * n for n in (2, 40, 60)})


def test_times_leave_out_what_is_long_or_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    def seconds_of_step(step: object, work: object, size: int, **more: object) -> float:
        if size > 16:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return size / 20

    monkeypatch.setattr(calibrate, "seconds_of_step", seconds_of_step)
    step = step_of(torch.nn.Linear(1, 1), ResidentTensors(*make_data(4, torch.float32), CPU))
    times = StepTimes(step, 64)
    times.measure([4, 8, 16, 32], None)  # type: ignore[arg-type]
    assert times.seconds == {4: 0.2, 8: 0.4, 16: 0.8}  # 0.8 s is long: 32 is not tried
    monkeypatch.setattr(calibrate, "LONG_STEP_SECONDS", 9.0)
    times.measure([32], None)  # type: ignore[arg-type]
    assert times.limit == 16
    assert 32 not in times.seconds


class Clock:
    """A clock that only the test moves on."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


@pytest.mark.parametrize(
    ("eager", "graph", "expected"),
    [(0.02, 0.005, 0.005), (0.02, 0.03, 0.02), (0.02, None, 0.02), (0.2, 0.005, 0.2)],
)
def test_a_size_counts_with_its_faster_way(
    monkeypatch: pytest.MonkeyPatch, eager: float, graph: float | None, expected: float
) -> None:
    """Of a step that takes long no graph is tried."""
    clock = Clock()
    monkeypatch.setattr(calibrate, "time", clock)
    monkeypatch.setattr(calibrate, "timed_step", lambda *_: eager)

    def graphed(inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[], None] | None:
        assert len(inputs) == 3

        def run() -> None:
            clock.seconds += graph or 0.0

        return run if graph else None

    work = torch.nn.Linear(1, 1)
    step = step_of(work, ResidentTensors(*make_data(4, torch.float32), CPU))
    step = replace(step, graphed=graphed)
    assert calibrate.seconds_of_step(step, work, 3, is_first=True) == pytest.approx(expected)
    assert calibrate.seconds_of_step(step, work, 3, is_first=False) == eager


class SlowSource(ResidentTensors):
    """Takes a second for each batch, as a loader does that starts its workers."""

    clock: Clock

    def batches(self, order: torch.Tensor, spans: Sequence[Span], epoch: int) -> Iterator[Batch]:
        self.clock.seconds += 1.0
        yield from super().batches(order, spans, epoch)


def test_times_have_the_optimizer_and_not_the_loader(
    monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    modes: list[bool] = []
    clock = Clock()
    monkeypatch.setattr(calibrate, "time", clock)

    class Watched(torch.nn.SyncBatchNorm):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            modes.append(self.training)
            clock.seconds += 0.002 + 0.001 * len(inputs)
            return inputs

    class SlowOptimizer(torch.optim.AdamW):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            clock.seconds += 0.5
            super().step()

    model = torch.nn.Sequential(make_model(torch.float32), Watched(4))
    source = SlowSource(*make_data(40, torch.float32), CPU)
    source.clock = clock
    optimizer = SlowOptimizer(model.parameters(), lr=1.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with preserved(model, CPU):
        times = StepTimes(replace(step_of(model, source), optimizer=optimizer), 64)
        times.measure([8], None)  # type: ignore[arg-type]
    assert times.seconds == pytest.approx({8: 0.51})
    assert times.update == pytest.approx(0.5)
    assert not any(modes), "SyncBatchNorm's forward would wait for the slowest rank"
    assert model[1].training
    assert not optimizer.state
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), "measuring trains nothing"
