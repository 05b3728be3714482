"""Local steps: the algorithm against one process that plays all ranks, and what goes with it."""

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ddp_slurm.training import BalancedSampler
from ddp_slurm.training.links.local_steps import LocalConfig

from .links_worker import (
    delays_of_local_steps,
    die_between_averages,
    skip_a_step,
    with_local_steps,
    wrapped,
)
from .trainer_worker import Run, relative_error, run, train
from .workers import Case, flat, make_data, make_model, train_alone
from .worlds import PATIENCE_SECONDS, run_world, world

TASKS = (4, 2, 1)
SHARES = (18, 18, 18, 18, 36, 36, 72)
"""The cards of the three nodes are 1 : 2 : 4; 216 samples, and 152 at the end of an epoch."""


def test_local_steps_of_one_are_exact_for_plain_sgd(tmp_path: Path) -> None:
    case = Case(samples=800, shares=SHARES, steps=20, momentum=0.0, micro_batch=10)
    expected = train_alone(case)
    config = LocalConfig(steps=1, outer_lr=1.0, outer_momentum=0.0, delay=0)
    for outcome in run_world(tmp_path, TASKS, with_local_steps, case, config):
        assert relative_error(outcome.parameters, expected.parameters) < 1e-6


@pytest.mark.parametrize(
    ("shares", "config"),
    [
        (SHARES, LocalConfig(4, outer_lr=0.7, outer_momentum=0.9, delay=0)),
        (SHARES, LocalConfig(4, outer_lr=0.8, outer_momentum=0.3)),
        (SHARES, LocalConfig(3, delay=3)),
        ((18, 0, 18, 18, 36, 36, 72), LocalConfig(3)),
    ],
    ids=["waiting", "overlapped", "a whole period late", "a rank without samples"],
)
def test_local_steps_equal_their_simulation(
    tmp_path: Path, shares: tuple[int, ...], config: LocalConfig
) -> None:
    case = Case(samples=800, shares=shares, steps=22, micro_batch=10)
    expected = simulated(case, config)
    found = run_world(tmp_path, TASKS, with_local_steps, case, config)
    for outcome in found:
        assert relative_error(outcome.parameters, expected) < 1e-9
        assert torch.equal(outcome.parameters, found[0].parameters)
    assert relative_error(train_alone(case).parameters, expected) > 1e-3  # they are no exact steps


def simulated(case: Case, config: LocalConfig) -> Tensor:
    """The common parameters at the end, of one process that plays all ranks."""
    ranks = range(len(case.shares))
    weights = [share / sum(case.shares) for share in case.shares]
    steps = [_rank_step(case, rank) for rank in ranks]
    points = [flat(make_model(case.dtype).parameters()) for _ in ranks]
    anchor, velocity = points[0].clone(), torch.zeros_like(points[0])
    sent: list[Tensor] = []

    def apply() -> None:
        nonlocal anchor, velocity
        if sent:
            mean = sum(w * (x - anchor) for w, x in zip(weights, sent, strict=True))
            velocity = config.momentum * velocity + mean
            anchor = anchor + config.outer_lr * (mean + config.momentum * velocity)
            points[:] = [points[rank] + anchor - sent[rank] for rank in ranks]
            sent.clear()

    for number in range(1, case.steps + 1):
        points[:] = [steps[rank](points[rank]) for rank in ranks]
        if number % config.steps == config.steps_of_delay % config.steps:
            apply()
        if number % config.steps == 0 or number == case.steps:
            apply()
            sent.extend(points)
            if config.steps_of_delay == 0:
                apply()
    apply()
    return points[0]


def _rank_step(case: Case, rank: int) -> Callable[[Tensor], Tensor]:
    """One rank's next step from given parameters: SGD with momentum on its own samples."""
    inputs, targets = make_data(case.samples, case.dtype)
    model = make_model(case.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr, momentum=case.momentum)
    batches = []
    for epoch in range(case.steps):
        sampler = BalancedSampler(case.samples, case.shares, rank, seed=3)
        sampler.set_epoch(epoch)
        for step, batch in enumerate(sampler):
            # exactly 1, but for the rounding to whole samples in an incomplete global batch
            part = len(batch) / sampler.global_samples(step)
            planned = case.shares[rank] / sum(case.shares)
            batches.append((batch, part / planned if planned else 0.0))
    remaining = iter(batches)

    def take(point: Tensor) -> Tensor:
        batch, factor = next(remaining)
        torch.nn.utils.vector_to_parameters(point.clone(), model.parameters())
        optimizer.zero_grad()
        if batch:
            loss = cross_entropy(model(inputs[batch]), targets[batch])
            (loss * factor).backward()
        optimizer.step()
        return flat(model.parameters())

    return take


def test_local_steps_take_part_in_a_plain_loop(tmp_path: Path) -> None:
    case = Case(samples=800, shares=SHARES, steps=40, momentum=0.0)
    environ = {"DDP_SLURM_COMM": "local:4"}
    with world(tmp_path, TASKS, wrapped, case, environ=environ) as running:
        found = running.results()
        assert "comm: NOT exact, 4 local steps" in running.log(0)
        assert "comm:" not in running.log(1)
    exact = train_alone(case).parameters
    for outcome in found:
        assert torch.equal(outcome.parameters, found[0].parameters)
        assert relative_error(outcome.parameters, exact) < 0.2


def test_trainer_with_local_steps_resumes_bitwise(tmp_path: Path) -> None:
    environ = {"DDP_SLURM_COMM": "local:3"}
    settings = Run((3, 5), tmp_path / "s.pt", save_every_steps=4)
    killed = replace(settings, kill=(1, "before step", 6))
    with world(tmp_path / "killed", (1, 1), train, killed, environ=environ) as running:
        assert running.wait()[1] == -signal.SIGKILL
    resumed = run(tmp_path / "resumed", (1, 1), settings, environ=environ)
    other = replace(settings, snapshot=tmp_path / "other.pt")
    whole = run(tmp_path / "whole", (1, 1), other, environ=environ)
    exact = run(tmp_path / "exact", (1, 1), replace(settings, snapshot=tmp_path / "exact.pt"))
    for found, expected in zip(resumed, whole, strict=True):
        assert found.first_step == 4
        assert torch.equal(found.weights, expected.weights)
        assert found.metrics == expected.metrics
    assert torch.equal(whole[0].weights, whole[1].weights)
    assert not torch.equal(whole[0].weights, exact[0].weights)


def test_trainer_with_local_steps_ends_with_one_model(tmp_path: Path) -> None:
    """Also where neither an evaluation nor a snapshot has averaged the parameters before."""
    settings = Run((3, 5), tmp_path / "s.pt", options={"snapshot": None}, evaluates=False)
    environ = {"DDP_SLURM_COMM": "local:4"}  # 18 steps
    one, other = run(tmp_path, (1, 1), settings, environ=environ)
    assert (one.step, other.step) == (18, 18)
    assert torch.equal(one.weights, other.weights)


def test_delay_is_measured_and_kept_in_snapshots(tmp_path: Path) -> None:
    """0.25 s in bf16, and 1.1 times that for safety, are 3 steps of rank 0 and 6 of rank 1."""
    assert run_world(tmp_path, (1, 1), delays_of_local_steps) == [[6, 3, 3]] * 2


def test_trainer_with_local_steps_refuses_fp16(tmp_path: Path) -> None:
    settings = Run((3, 5), tmp_path / "s.pt", options={"precision": "fp16"})
    environ = {"DDP_SLURM_COMM": "local:3"}
    with world(tmp_path, (1, 1), train, settings, environ=environ) as running:
        assert running.wait() == [2, 2]
        assert "--comm local:3 cannot be combined with fp16" in running.log(0)


def test_ranks_with_other_numbers_of_steps_end_with_an_error(tmp_path: Path) -> None:
    with world(tmp_path, (1, 1), skip_a_step) as running:
        assert None not in running.wait(PATIENCE_SECONDS)
        assert "the ranks have taken from 3 to 4 optimizer steps" in running.all_logs()


def test_rank_killed_during_an_average_ends_all(tmp_path: Path) -> None:
    environ = {"SLURMD_NODENAME": "node"}
    with world(tmp_path, (2, 1), die_between_averages, environ=environ) as running:
        statuses = running.wait(PATIENCE_SECONDS)
        assert statuses[2] == -signal.SIGKILL
        assert statuses[:2] == [1, 1]
        assert "rank 2 on node" in running.log(0)
