"""A training that was stopped and goes on, on the same or other ranks."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_slurm.training import Snapshot

from .trainer_worker import Run, reference, relative_error, run, train
from .worlds import world


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
    assert not run(tmp_path / "stopped", (1, 1), Run(**{**vars(settings), "usr2": (1, 2)}))[
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


def test_trainer_started_again_when_finished_records_nothing(tmp_path: Path) -> None:
    settings = Run((8,), tmp_path / "s.pt", options={"metrics_path": str(tmp_path / "m.jsonl")})
    metrics = []
    for number in (1, 2):
        [report] = run(tmp_path / str(number), (1,), settings)
        metrics.append((report.metrics, (tmp_path / "m.jsonl").read_text()))
    assert metrics[0] == metrics[1]


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


def test_trainer_warns_at_the_start_of_a_marker_out_of_reach(tmp_path: Path) -> None:
    marker = tmp_path / "no such folder" / "requeue"
    settings = Run((8,), tmp_path / "s.pt", usr2=(0, 8), save_every_steps=None)
    environ = {"DDP_SLURM_REQUEUE_MARKER": str(marker)}
    with world(tmp_path, (1,), train, settings, environ=environ) as running:
        assert running.wait() == [2]
        log = running.log(0)
    warning, first_step = (log.index(text) for text in ("will not be requeued before", "epoch 1/3"))
    assert warning < first_step
    assert "the snapshot is saved, but the job will not be requeued: [Errno 2]" in log
