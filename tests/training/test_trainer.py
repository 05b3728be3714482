"""The Trainer: the same training on any ranks, stopped and resumed."""

import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training import BalancedSampler, Trainer, TrainerConfig, init_distributed

from .trainer_worker import Run, full_disk, reference, relative_error, run, train
from .workers import flat, make_data, make_model
from .worlds import run_world, world


def test_trainer_clips_the_unscaled_gradient(tmp_path: Path) -> None:
    """fp16 multiplies the loss by 65,536: clipped before the division, next to nothing is left."""
    settings = Run(
        (2, 5),
        tmp_path / "s.pt",
        dtype=torch.float32,
        stateful=False,
        options={"precision": "fp16", "clip_norm": 0.2},
    )
    start, expected = (
        flat(make_model(torch.float32).parameters()),
        reference(settings, clip_norm=0.2),
    )
    for report in run(tmp_path, (1, 1), settings):
        assert relative_error(report.weights - start, expected - start) < 1e-2


@pytest.mark.parametrize(
    ("samples", "shares", "options"),
    [
        (50, (1, 2, 3, 6, 4, 0, 5), {"micro_batch": 2, "clip_norm": 0.2}),
        (3, (1, 1, 1, 1, 1, 1, 1), {}),  # fewer samples than ranks
        (1, (0, 0, 0, 0, 0, 0, 9), {"clip_norm": 0.2}),
    ],
)
def test_trainer_on_any_ranks_equals_one_process(
    tmp_path: Path, samples: int, shares: tuple[int, ...], options: dict[str, Any]
) -> None:
    settings = Run(shares, tmp_path / "s.pt", samples=samples, stateful=False, options=options)
    expected = reference(settings, options.get("clip_norm"))
    for report in run(tmp_path, (1, 2, 4), settings):
        assert relative_error(report.weights, expected) < 1e-6


def test_trainer_micro_batch_limits_a_forward_pass(tmp_path: Path) -> None:
    settings = Run((3, 5), tmp_path / "s.pt", epochs=1, stateful=False, options={"micro_batch": 2})
    assert [report.largest_batch for report in run(tmp_path, (1, 1), settings)] == [2, 2]


def test_trainer_keeps_a_layer_in_eval_mode(tmp_path: Path) -> None:
    [report] = run(tmp_path, (1,), Run((8,), tmp_path / "s.pt", frozen=True))
    assert report.own_batchnorm == [0.0] * 8


def test_trainer_continues_without_a_failed_recorder(tmp_path: Path) -> None:
    with world(
        tmp_path, (1,), train, Run((8,), tmp_path / "s.pt", options={"recorders": [full_disk]})
    ) as running:
        assert running.wait() == [0]
        assert (
            running.log(0).count(
                "warning: metrics are no longer written: [Errno 28] No space left on device"
            )
            == 1
        )


def test_trainer_overflow_on_one_rank_skips_on_all(tmp_path: Path) -> None:
    """fp16 with a sample that overflows: no step, a lower scale, the same bits everywhere."""
    settings = Run(
        (3, 5),
        tmp_path / "s.pt",
        stateful=False,
        dtype=torch.float32,
        options={"precision": "fp16"},
        poison=(7, 1),
    )
    one, other = run(tmp_path, (1, 1), settings)
    assert torch.equal(one.weights, other.weights)
    assert one.weights.isfinite().all()


def test_trainer_records_the_loss_of_all_samples(tmp_path: Path) -> None:
    settings = Run(
        (3, 5), tmp_path / "s.pt", epochs=1, stateful=False, options={"log_every_steps": 100}
    )
    first, second = run(tmp_path, (1, 1), settings)
    [training, evaluation] = first.records
    assert second.records == []
    assert (training["kind"], evaluation["kind"]) == ("train", "evaluation")
    assert training["step"] == 6
    assert len(training["images_per_second_by_rank"]) == 2
    inputs, targets = make_data(44, torch.float64)
    model = make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loss_sum = 0.0
    for order in BalancedSampler(44, [8], 0):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs[order]), targets[order])
        loss.backward()
        optimizer.step()
        scheduler.step()
        loss_sum += loss.item() * len(order)
    assert training["loss"] == pytest.approx(loss_sum / 44, rel=1e-6)


class LearnedScale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.scale * outputs, targets)


def refuses_foreign_parameters(pipe: Connection) -> None:
    data = TensorDataset(*make_data(44, torch.float32))
    with init_distributed() as world:
        model = make_model(torch.float32)
        of_another = torch.optim.SGD(make_model(torch.float32).parameters(), lr=0.1)
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        settings: dict[str, Any] = {"global_batch": 8, "total_epochs": 1}
        with pytest.raises(DdpSlurmError, match=r"4 parameters that are not .* shape \(8, 6\)"):
            Trainer(world, model, of_another, cross_entropy, data, **settings)
        with pytest.raises(DdpSlurmError, match=r"1 parameters that are not .* shape \(\)"):
            Trainer(world, model, own, LearnedScale(), data, **settings)


def test_trainer_refuses_parameters_outside_of_the_model(tmp_path: Path) -> None:
    run_world(tmp_path, (1,), refuses_foreign_parameters)


def test_training_imports_no_jinja2_rich_or_torchvision() -> None:
    code = (
        "import sys, ddp_slurm.training, ddp_slurm.training.data; "
        "sys.exit(any(name in sys.modules for name in ('yaml', 'jinja2', 'rich', 'torchvision')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def relative_shares(pipe: Connection) -> list[float]:
    """Of the sources of training and evaluation, after an epoch."""
    with init_distributed() as world:
        data = TensorDataset(*make_data(20, torch.float64))
        model = make_model(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = TrainerConfig(global_batch=8, total_epochs=1, shares=(1, 2, 5), quiet=True)
        trainer = Trainer(world, model, optimizer, cross_entropy, data, data, config)
        trainer.train()
        return [source.relative_share for source in (trainer.train_data, trainer.eval_data)]


def test_loader_workers_follow_the_shares(tmp_path: Path) -> None:
    found = run_world(tmp_path, (1, 2), relative_shares)
    assert found == [[3 * share / 8] * 2 for share in (1, 2, 5)]


def evaluate_plain_data(pipe: Connection) -> list[dict[str, float]]:
    """Metrics before training, by default and of other data; everything given as a Dataset."""
    with init_distributed() as world:
        data = TensorDataset(*make_data(20, torch.float64))
        model = make_model(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = TrainerConfig(global_batch=7, total_epochs=1, quiet=True)
        trainer = Trainer(world, model, optimizer, cross_entropy, data, DataLoader(data, 3), config)
        before = [trainer.evaluate(), trainer.evaluate(TensorDataset(*data[:5]))]
        return [*before, trainer.train().metrics]


def test_trainer_evaluates_plain_data_sets_on_request(tmp_path: Path) -> None:
    inputs, targets = make_data(20, torch.float64)
    losses = [
        cross_entropy(make_model(torch.float64)(inputs[:count]), targets[:count]).item()
        for count in (20, 5)
    ]
    for whole, part, trained in run_world(tmp_path, (1, 2), evaluate_plain_data):
        assert [whole["loss"], part["loss"]] == pytest.approx(losses)
        assert [whole["samples"], part["samples"]] == [20, 5]
        assert trained["loss"] < whole["loss"]
