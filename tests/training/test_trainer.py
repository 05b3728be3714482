"""The Trainer: the same training on any ranks, stopped and resumed, and the two examples whole."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ddp_slurm.training import BalancedSampler, Snapshot

from .trainer_worker import Report, Run, full_disk, train
from .workers import example, flat, make_data, make_model
from .worlds import world

ROOT = Path(__file__).parents[2]


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


def test_the_gradient_that_is_clipped_is_not_the_scaled_one(tmp_path: Path) -> None:
    """fp16 multiplies the loss by 65,536: clipping before that is taken back would leave next to nothing of a step."""
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
def test_any_ranks_train_as_one_process_does(
    tmp_path: Path, samples: int, shares: tuple[int, ...], options: dict[str, Any]
) -> None:
    settings = Run(shares, tmp_path / "s.pt", samples=samples, stateful=False, options=options)
    expected = reference(settings, options.get("clip_norm"))
    for report in run(tmp_path, (1, 2, 4), settings):
        assert relative_error(report.weights, expected) < 1e-6


def test_resumed_on_five_ranks_after_seven(tmp_path: Path) -> None:
    """Stopped by a signal within an epoch, resumed on fewer ranks: each sample exactly once, and the same result."""
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
    # Every rank's source notes what it gave; the last batch of the stopped run was drawn but not trained on.
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


def test_a_signal_to_one_rank_stops_all_after_one_step_and_asks_for_a_requeue(
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
    # The snapshot's own model has the statistics averaged by samples; all batches since the last evaluation were whole.
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


def test_what_belongs_to_a_rank_goes_on_with_other_shares_too(tmp_path: Path) -> None:
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


def test_random_transforms_go_on_as_if_there_had_been_no_stop(tmp_path: Path) -> None:
    settings = Run((3, 5), tmp_path / "s.pt", save_every_steps=None, noisy=True)
    stopped = run(tmp_path / "stopped", (1, 1), Run(**{**vars(settings), "usr2": (1, 8)}))
    assert not stopped[0].finished
    resumed = run(tmp_path / "resumed", (1, 1), settings)
    whole = run(
        tmp_path / "whole", (1, 1), Run(**{**vars(settings), "snapshot": tmp_path / "other.pt"})
    )
    for found, expected in zip(resumed, whole, strict=True):
        assert torch.equal(found.weights, expected.weights)


def test_a_rank_runs_no_more_samples_at_once_than_it_may(tmp_path: Path) -> None:
    settings = Run((3, 5), tmp_path / "s.pt", epochs=1, stateful=False, options={"micro_batch": 2})
    assert [report.largest_batch for report in run(tmp_path, (1, 1), settings)] == [2, 2]


def test_a_layer_that_was_set_to_eval_stays_so(tmp_path: Path) -> None:
    [report] = run(tmp_path, (1,), Run((8,), tmp_path / "s.pt", frozen=True))
    assert report.own_batchnorm == [0.0] * 8


def test_metrics_that_cannot_be_written_end_no_training(tmp_path: Path) -> None:
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


def test_a_finished_run_that_is_started_again_records_nothing(tmp_path: Path) -> None:
    settings = Run((8,), tmp_path / "s.pt", options={"metrics_path": str(tmp_path / "m.jsonl")})
    metrics = []
    for number in (1, 2):
        [report] = run(tmp_path / str(number), (1,), settings)
        metrics.append((report.metrics, (tmp_path / "m.jsonl").read_text()))
    assert metrics[0] == metrics[1]


def test_an_overflow_on_one_rank_is_one_on_all(tmp_path: Path) -> None:
    """fp16 with a sample that overflows: the step is skipped, the scale lowered, the same bits everywhere."""
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
            r"shares \[4, 5\]: expected 2 of them with the sum 8, got 2 with 9",
        ),
        ({"options": {"micro_batch": 0}}, "micro_batch 0: at least one sample has to run at once"),
        (
            {"options": {"precision": "fp7"}},
            "precision 'fp7'; known are auto, bf16, fp16, fp32|precision 'fp7'; did you",
        ),
    ],
)
def test_a_run_that_does_not_fit_is_refused_on_every_rank(
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


def test_a_snapshot_of_a_loop_of_one_s_own_is_refused(tmp_path: Path) -> None:
    Snapshot(tmp_path / "s.pt").save({"epoch": 3, "model": {}})
    with world(tmp_path, (1, 1), train, Run((3, 5), tmp_path / "s.pt")) as running:
        assert running.wait() == [2, 2]
        logs = running.all_logs()
    assert "s.pt is not a Trainer's; it holds epoch, model" in logs
    assert "Traceback" not in logs


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The snapshot of a run of three epochs."""
    folder = tmp_path_factory.mktemp("first")
    run(folder, (1, 1), Run((3, 5), folder / "s.pt"))
    return folder / "s.pt"


def test_records_tell_the_loss_of_all_samples(tmp_path: Path) -> None:
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


def archive(path: Path) -> Path:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(60) % 10
    np.savez(
        path,
        train_images=images,
        train_labels=labels,
        test_images=images[:20],
        test_labels=labels[:20],
    )
    return path


def test_the_synthetic_example_learns_on_seven_ranks_and_goes_on(tmp_path: Path) -> None:
    script = ROOT / "synthetic_data_example" / "train.py"
    options = [
        "--global-batch-size",
        "101",
        "--snapshot",
        str(tmp_path / "s.pt"),
        "--samples",
        "600",
    ]
    options += ["--metrics", str(tmp_path / "m.jsonl")]
    plan = {
        "DDP_SLURM_SHARES": "5,24(x2),12(x4)",
        "DDP_SLURM_WORLD_SIZE": "7",
        "DDP_SLURM_TASKS_PER_NODE": "1,2,4",
    }
    for total in ("4", "6"):
        with world(
            tmp_path / total, (1, 2, 4), example, script, [total, "1", *options], environ=plan
        ) as running:
            assert running.results() == [None] * 7
            log = running.log(0)
            assert all(running.log(rank) == "" for rank in range(1, 7))
    assert "resumed from" in log
    assert "epoch 4 of 6 done" in log
    assert "rank  node" in log
    records = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "evaluation"]
    assert len(losses) == 6
    assert losses[-1] < 0.6 * losses[0]
    assert f"finished: step 36, loss {losses[-1]:.4f}, accuracy" in log


def test_the_cifar10_example_trains_on_uneven_ranks(tmp_path: Path) -> None:
    script = ROOT / "cifar10_example" / "train.py"
    options = [
        "1",
        "1",
        "--data",
        str(archive(tmp_path / "c.npz")),
        "--snapshot",
        str(tmp_path / "s.pt"),
    ]
    with world(
        tmp_path, (1, 2), example, script, options, environ={"DDP_SLURM_GLOBAL_BATCH_SIZE": "16"}
    ) as running:
        assert running.results() == [None] * 3
        log = running.log(0)
    assert "first optimizer step finished at" in log
    assert "finished: step 4, loss" in log


def test_the_learning_rate_follows_the_samples_after_a_resume_with_another_batch(
    tmp_path: Path,
) -> None:
    script = ROOT / "cifar10_example" / "train.py"
    fixed = [
        "--data",
        str(archive(tmp_path / "c.npz")),
        "--snapshot",
        str(tmp_path / "s.pt"),
        "--batch-size",
        "4",
    ]
    rates: dict[str, list[float]] = {}
    for tasks, epochs in ((1,), "2"), ((1, 2), "4"):
        options = [epochs, "1", *fixed, "--metrics", str(tmp_path / f"{epochs}.jsonl")]
        with world(tmp_path / epochs, tasks, example, script, options) as running:
            assert running.results() == [None] * sum(tasks)
        records = [
            json.loads(line) for line in (tmp_path / f"{epochs}.jsonl").read_text().splitlines()
        ]
        rates[epochs] = [record["learning_rate"] for record in records if record["kind"] == "train"]
    assert rates["2"][-1] == pytest.approx(0)
    # of each epoch's end: three and four quarters of the whole
    assert rates["4"] == pytest.approx([0.2 * 1.25 * 0.25, 0])


def test_an_example_without_data_fails_on_every_rank_with_a_message(tmp_path: Path) -> None:
    script = ROOT / "cifar10_example" / "train.py"
    with world(
        tmp_path, (1, 1), example, script, ["1", "1", "--data", str(tmp_path / "none")]
    ) as running:
        statuses = running.wait()
        logs = running.all_logs()
    assert statuses == [2, 2]
    assert "no CIFAR-10 at" in logs
    assert "Traceback" not in logs


def test_global_batch_of_the_command_line_wins(tmp_path: Path) -> None:
    script = ROOT / "synthetic_data_example" / "train.py"
    for number, (option, steps) in enumerate(
        {"--batch-size": 13, "--global-batch-size": 25}.items()
    ):
        arguments = [
            "1",
            "1",
            option,
            "4",
            "--samples",
            "100",
            "--snapshot",
            str(tmp_path / f"{number}.pt"),
        ]
        with world(
            tmp_path / str(number),
            (1, 1),
            example,
            script,
            arguments,
            environ={"DDP_SLURM_GLOBAL_BATCH_SIZE": "50"},
        ) as running:
            assert running.results() == [None, None]
            assert f"finished: step {steps}," in running.log(0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "-1"], "argument --lr: '-1' is not a number > 0"),
        (["--lr", "nan"], "argument --lr: 'nan' is not a number > 0"),
        (["--clip-norm", "0"], "argument --clip-norm: '0' is not a number > 0"),
        (["--weight-decay", "-0.1"], "argument --weight-decay: '-0.1' is not a number >= 0"),
        (
            ["--seed", "18446744073709551616"],
            "argument --seed: '18446744073709551616' is not a whole number from 0 to",
        ),
        (["--batch-size", "0"], "argument --batch-size: '0' is not a whole number from 1 to"),
    ],
)
def test_numbers_that_cannot_be_meant(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "1", "1", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "cifar10_example" / "train.py"), run_name="__main__")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_ranks_need_no_jinja2_no_rich_and_no_torchvision() -> None:
    code = (
        "import sys, ddp_slurm.training, ddp_slurm.training.data; "
        "sys.exit(any(name in sys.modules for name in ('yaml', 'jinja2', 'rich', 'torchvision')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
