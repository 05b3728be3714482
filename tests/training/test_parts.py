"""BatchNorm statistics, evaluation, precision, printed lines."""

import dataclasses
from pathlib import Path

import pytest
import torch

from ddp_slurm.training.data import (
    DataError,
    DatasetSource,
    ResidentTensors,
)
from ddp_slurm.training.trainer.evaluation import evaluate
from ddp_slurm.training.trainer.precision import Precision, PrecisionError, choose_precision
from ddp_slurm.training.trainer.progress import progress_line
from ddp_slurm.training.trainer.report import print_rank_table
from ddp_slurm.training.uneven.weighted_loss import WeightedLoss

from .test_start_and_end import FACT
from .workers import (
    averaged_statistics,
    cross_entropy,
    evaluated,
    first_buffers,
    make_data,
    make_model,
)
from .worlds import run_world

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("counts", "mean"), [([0, 1, 3], (1 + 2 * 3) / 4), ([5, 0, 0], 0.0), ([0, 0, 0], 1.0)]
)
def test_batchnorm_statistics_are_weighted_by_samples(
    tmp_path: Path, counts: list[int], mean: float
) -> None:
    # Without samples on the last rank the layer is an InstanceNorm with statistics.
    for rank, (averaged, own) in enumerate(
        run_world(tmp_path, (1, 2), averaged_statistics, counts)
    ):
        assert set(averaged) == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
        torch.testing.assert_close(averaged["0.running_mean"], torch.full((3,), mean))
        torch.testing.assert_close(averaged["0.running_var"], torch.full((3,), 10 * mean))
        assert averaged["0.num_batches_tracked"] == 2
        assert own["running_mean"].tolist() == [rank] * 3  # reading the average changes nothing


@pytest.mark.parametrize("is_old_torch", [False, True])
def test_wrap_model_starts_with_the_buffers_of_rank_0(tmp_path: Path, is_old_torch: bool) -> None:
    assert run_world(tmp_path, (1, 1), first_buffers, is_old_torch) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize(("samples", "shares"), [(29, [5, 0, 11]), (2, [1, 1, 1]), (1, [0, 1, 0])])
def test_evaluation_counts_every_sample_once(
    tmp_path: Path, samples: int, shares: list[int]
) -> None:
    inputs, targets = make_data(samples, torch.float64)
    outputs = make_model(torch.float64)(inputs)
    for found in run_world(tmp_path, (1, 2), evaluated, samples, shares):
        assert found["samples"] == samples
        assert found["loss"] == pytest.approx(cross_entropy(outputs, targets).item(), rel=1e-9)
        assert found["accuracy"] == (outputs.argmax(dim=1) == targets).sum().item() / samples


def test_evaluation_of_a_regression_has_no_accuracy() -> None:
    source = DatasetSource(torch.utils.data.TensorDataset(torch.ones(5, 2), torch.ones(5, 2)), CPU)
    metrics = evaluate(
        torch.nn.Identity(),
        source,
        WeightedLoss(torch.nn.functional.mse_loss),
        rank=0,
        shares=[1],
        precision=Precision("fp32", "cpu"),
    )
    assert metrics == {"loss": 0.0, "samples": 5.0}


def test_evaluation_leaves_each_layer_in_its_mode() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2).eval())
    source = ResidentTensors(torch.ones(5, 2), torch.zeros(5, dtype=torch.int64), CPU)
    precision = Precision("fp32", "cpu")
    evaluate(model, source, WeightedLoss(cross_entropy), rank=0, shares=[1], precision=precision)
    assert [model.training, model[0].training, model[1].training] == [True, True, False]


def test_evaluation_without_samples_is_an_error() -> None:
    source = ResidentTensors(*make_data(0, torch.float32), CPU)
    with pytest.raises(DataError, match="the evaluation data have no samples"):
        evaluate(
            make_model(torch.float32),
            source,
            WeightedLoss(cross_entropy),
            rank=0,
            shares=[1],
            precision=Precision("fp32", "cpu"),
        )


def test_evaluation_of_ignored_targets_is_an_error() -> None:
    source = ResidentTensors(torch.ones(5, 2), torch.full((5,), -100), CPU)
    loss, precision = WeightedLoss(cross_entropy), Precision("fp32", "cpu")
    with pytest.raises(DataError, match="are all ignored, or of weight 0"):
        evaluate(torch.nn.Identity(), source, loss, rank=0, shares=[1], precision=precision)


A100 = dataclasses.replace(
    FACT, rank=1, node_name="alpha", device_name="NVIDIA A100", compute_capability=(8, 0)
)
GTX = dataclasses.replace(
    FACT, rank=2, node_name="delta", device_name="NVIDIA GTX 1080", compute_capability=(6, 1)
)
NO_GPU = dataclasses.replace(FACT, visible_gpus=0, compute_capability=(0, 0))


@pytest.mark.parametrize(
    ("wanted", "ranks", "chosen"),
    [
        ("auto", [A100, A100], ("bf16", "cuda")),
        ("auto", [A100, FACT], ("fp16", "cuda")),
        ("auto", [A100, FACT, GTX], ("fp32", "cuda")),
        ("auto", [NO_GPU], ("fp32", "cpu")),
        ("bf16", [NO_GPU], ("bf16", "cpu")),
        ("fp32", [GTX], ("fp32", "cuda")),
    ],
)
def test_precision_auto_is_what_all_cards_support(
    wanted: str, ranks: list, chosen: tuple[str, str]
) -> None:
    assert choose_precision(wanted, ranks) == Precision(*chosen)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            "bf16",
            r"bf16 needs compute capability 8\.0 on every rank, but rank 0 on gamma has NVIDIA "
            r"TITAN V with 7\.0, "
            r"rank 2 on delta has NVIDIA GTX 1080 with 6\.1",
        ),
        (
            "fp16",
            r"fp16 needs compute capability 7\.0 on every rank, but rank 2 on delta has NVIDIA "
            r"GTX 1080 with 6\.1",
        ),
        ("bf61", "precision 'bf61'; did you mean 'bf16'"),
    ],
)
def test_precision_error_names_the_cards(wanted: str, message: str) -> None:
    with pytest.raises(PrecisionError, match=message):
        choose_precision(wanted, [FACT, A100, GTX])


def test_report_prints_ranks_and_progress(capsys: pytest.CaptureFixture[str]) -> None:
    print_rank_table([FACT, dataclasses.replace(NO_GPU, rank=1, node_name="beta")], [12, 4])
    assert capsys.readouterr().out.splitlines() == [
        "rank  node   local rank  device                 share",
        "0     gamma  0           cuda:0 NVIDIA TITAN V  12",
        "1     beta   0           cpu                    4",
    ]
    line = progress_line("epoch 2/5  step 3/9", 1.5, [1000.4, 20], left_seconds=61.4)
    assert line == "epoch 2/5  step 3/9  loss 1.5000  1,020 images/s (ranks: 1,000 20)  ETA 0:01:01"
