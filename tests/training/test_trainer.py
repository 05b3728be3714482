"""The Trainer: the same training on any ranks, stopped and resumed."""

import re
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ddp_slurm.training import BalancedSampler, Snapshot, Trainer, TrainerConfig, init_distributed

from .trainer_worker import Report, Run, full_disk, train
from .workers import flat, make_data, make_model
from .worlds import run_world, world


def run(folder: Path, tasks: tuple[int, ...], settings: Run, **options: Any) -> list[Report]:
    """The reports of all ranks."""
    with world(folder, tasks, train, settings, **options) as running:
        reports = []
        for rank in range(sum(tasks)):
            message = running.receive(rank)
            reports.append(message if isinstance(message, Report) else running.receive(rank))
        assert running.wait() == [0] * sum(tasks), running.all_logs()
    return reports


def reference(settings: Run, clip_norm: float | None = None) -> torch.Tensor:
    """The parameters after one process's plain training."""
    inputs, targets = make_data(settings.samples, settings.dtype)
    model = make_model(settings.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for epoch in range(settings.epochs):
        sampler = BalancedSampler(settings.samples, [sum(settings.shares)], 0)
        sampler.set_epoch(epoch)
        for order in sampler:
            optimizer.zero_grad()
            cross_entropy(model(inputs[order]), targets[order]).backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            scheduler.step()
    return flat(model.parameters())


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


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


def test_trainer_resumes_on_five_ranks_after_seven(tmp_path: Path) -> None:
    """Stopped by a signal within an epoch: each sample exactly once, and the same result."""
    whole = Run(
        (1, 2, 3, 6, 4, 0, 5),
        tmp_path / "s.pt",
        samples=200,
        epochs=2,
        stateful=False,
        save_every_steps=None,
    )
    begun = run(tmp_path / "begun", (1, 2, 4), Run(**{**vars(whole), "usr2": (5, 4)}))
    stopped_after = begun[0].step
    assert {(report.finished, report.step) for report in begun} == {(False, stopped_after)}
    assert stopped_after in (4, 5, 6)  # the vote is counted a step after the signal

    resumed = run(tmp_path / "resumed", (2, 3), Run(**{**vars(whole), "shares": (9, 3, 3, 3, 3)}))
    assert {(report.finished, report.step, report.first_step) for report in resumed} == {
        (True, 20, stopped_after)
    }
    # The sources note what they gave; the stopped run's last batch was not trained on.
    first = [index for report in begun for step in report.seen[:stopped_after] for index in step]
    steps_left = 10 - stopped_after
    second = [index for report in resumed for step in report.seen[:steps_left] for index in step]
    assert sorted(first + second) == list(range(200))
    next_epoch = [
        index for report in resumed for step in report.seen[steps_left:] for index in step
    ]
    assert sorted(next_epoch) == list(range(200))
    for report in resumed:
        assert relative_error(report.weights, reference(whole)) < 1e-6


def test_trainer_signal_to_one_rank_stops_all_ranks(
    tmp_path: Path,
) -> None:
    marker = tmp_path / "requeue me"
    settings = Run((3, 5), tmp_path / "s.pt", save_every_steps=None)
    environ = {"DDP_SLURM_REQUEUE_MARKER": str(marker)}
    stopped = run(
        tmp_path / "stopped", (1, 1), Run(**{**vars(settings), "usr2": (1, 8)}), environ=environ
    )
    assert len({report.step for report in stopped}) == 1
    assert not any(report.finished for report in stopped)
    assert marker.exists()
    # The snapshot's model has the statistics averaged by samples; all batches were whole.
    saved = torch.load(settings.snapshot, weights_only=True)["state"]["model"]["norm.running_mean"]
    one, other = (torch.tensor(report.own_batchnorm, dtype=torch.float64) for report in stopped)
    assert stopped[0].step % 6 != 0
    torch.testing.assert_close(saved, (3 * one + 5 * other) / 8)
    marker.unlink()
    resumed = run(tmp_path / "resumed", (1, 1), settings, environ=environ)
    assert not marker.exists()
    uninterrupted = run(
        tmp_path / "whole", (1, 1), Run(**{**vars(settings), "snapshot": tmp_path / "other.pt"})
    )
    for found, expected in zip(resumed, uninterrupted, strict=True):
        assert found.first_step == stopped[0].step
        assert torch.equal(
            found.weights, expected.weights
        )  # bitwise: dropout, BatchNorm, momentum, schedule
        assert found.metrics == expected.metrics
    assert stopped[0].own_batchnorm != stopped[1].own_batchnorm  # the ranks' statistics do differ


def test_trainer_resume_with_other_shares_keeps_rank_state(tmp_path: Path) -> None:
    """Measured shares hardly ever come out the same twice."""
    settings = Run(
        (3, 5),
        tmp_path / "s.pt",
        save_every_steps=None,
        stateful=False,
        options={"log_every_steps": 100},
    )
    assert not run(tmp_path / "stopped", (1, 1), Run(**{**vars(settings), "usr2": (1, 8)}))[
        0
    ].finished
    resumed = run(tmp_path / "resumed", (1, 1), Run(**{**vars(settings), "shares": (5, 3)}))
    whole = run(
        tmp_path / "whole", (1, 1), Run(**{**vars(settings), "snapshot": tmp_path / "other.pt"})
    )
    of_the_epoch = [
        r["loss"]
        for r in resumed[0].records + whole[0].records
        if (r["kind"], r["step"]) == ("train", 12)
    ]
    assert of_the_epoch[0] == pytest.approx(of_the_epoch[1], rel=1e-9)


def test_trainer_resume_continues_random_transforms(tmp_path: Path) -> None:
    settings = Run((3, 5), tmp_path / "s.pt", save_every_steps=None, noisy=True)
    stopped = run(tmp_path / "stopped", (1, 1), Run(**{**vars(settings), "usr2": (1, 8)}))
    assert not stopped[0].finished
    resumed = run(tmp_path / "resumed", (1, 1), settings)
    whole = run(
        tmp_path / "whole", (1, 1), Run(**{**vars(settings), "snapshot": tmp_path / "other.pt"})
    )
    for found, expected in zip(resumed, whole, strict=True):
        assert torch.equal(found.weights, expected.weights)


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


def test_trainer_started_again_when_finished_records_nothing(tmp_path: Path) -> None:
    settings = Run((8,), tmp_path / "s.pt", options={"metrics_path": str(tmp_path / "m.jsonl")})
    metrics = []
    for number in (1, 2):
        [report] = run(tmp_path / str(number), (1,), settings)
        metrics.append((report.metrics, (tmp_path / "m.jsonl").read_text()))
    assert metrics[0] == metrics[1]


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 45}, "was made with 44 training samples, now there are 45"),
        ({"options": {"seed": 4}}, "was made with the seed 0, now it is 4"),
        ({"stateful": False}, "belongs to another model or optimizer"),
        (
            {"options": {"shares": (4, 5)}},
            r"shares \[4, 5\]: expected 2 shares with the sum 8, got 2 with the sum 9",
        ),
        ({"options": {"micro_batch": 0}}, "micro_batch 0: expected at least 1"),
        (
            {"options": {"precision": "fp7"}},
            "precision 'fp7'; known are auto, bf16, fp16, fp32|precision 'fp7'; did you",
        ),
    ],
)
def test_trainer_refuses_what_does_not_fit_on_every_rank(
    tmp_path: Path, first_run: Path, changes: dict[str, Any], message: str
) -> None:
    with world(
        tmp_path,
        (1, 1),
        train,
        Run(**{"shares": (3, 5), "snapshot": first_run, "epochs": 4, **changes}),
    ) as running:
        assert running.wait() == [2, 2]
        logs = running.all_logs()
    assert "Traceback" not in logs
    assert re.search(message, logs), logs


def test_trainer_refuses_a_snapshot_of_another_loop(tmp_path: Path) -> None:
    Snapshot(tmp_path / "s.pt", lock=False).save({"epoch": 3, "model": {}})
    with world(tmp_path, (1, 1), train, Run((3, 5), tmp_path / "s.pt")) as running:
        assert running.wait() == [2, 2]
        logs = running.all_logs()
    assert "s.pt was not written by a Trainer; it holds epoch, model" in logs
    assert "Traceback" not in logs


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The snapshot of a run of three epochs."""
    folder = tmp_path_factory.mktemp("first")
    run(folder, (1, 1), Run((3, 5), folder / "s.pt"))
    return folder / "s.pt"


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


def test_training_imports_no_jinja2_rich_or_torchvision() -> None:
    code = (
        "import sys, ddp_slurm.training, ddp_slurm.training.data; "
        "sys.exit(any(name in sys.modules for name in ('yaml', 'jinja2', 'rich', 'torchvision')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


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
