"""BatchNorm, evaluation, precision, data, records: the parts of a training, each for itself."""

import csv
import dataclasses
import json
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training.data import (
    Batch,
    DataError,
    DatasetSource,
    ResidentImages,
    ResidentTensors,
    Span,
    load_cifar10,
    synthetic_classes,
)
from ddp_slurm.training.trainer.evaluation import evaluate
from ddp_slurm.training.trainer.precision import Precision, PrecisionError, choose_precision
from ddp_slurm.training.trainer.records import open_recorder
from ddp_slurm.training.trainer.report import progress_line, rank_table
from ddp_slurm.training.uneven import calibrate
from ddp_slurm.training.uneven.calibrate import (
    TrainingStep,
    alike_made_equal,
    fit_line,
    measure_cost,
)

from .test_start_and_end import FACT
from .workers import (
    averaged_statistics,
    cross_entropy,
    evaluated,
    first_buffers,
    make_data,
    make_model,
    measured,
)
from .worlds import run_world

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("counts", "mean"), [([0, 1, 3], (1 + 2 * 3) / 4), ([5, 0, 0], 0.0), ([0, 0, 0], 1.0)]
)
def test_batchnorm_statistics_are_weighted_by_samples(
    tmp_path: Path, counts: list[int], mean: float
) -> None:
    # where the last rank has no sample the layer is an InstanceNorm with statistics, which is no BatchNorm
    for rank, (averaged, own) in enumerate(
        run_world(tmp_path, (1, 2), averaged_statistics, counts)
    ):
        assert set(averaged) == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
        torch.testing.assert_close(averaged["0.running_mean"], torch.full((3,), mean))
        torch.testing.assert_close(averaged["0.running_var"], torch.full((3,), 10 * mean))
        assert averaged["0.num_batches_tracked"] == 2
        assert own["running_mean"].tolist() == [rank] * 3  # reading the average changes nothing


@pytest.mark.parametrize("is_old_torch", [False, True])
def test_all_ranks_begin_with_the_buffers_of_rank_0(tmp_path: Path, is_old_torch: bool) -> None:
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


def test_evaluation_of_numbers_has_no_accuracy() -> None:
    source = DatasetSource(torch.utils.data.TensorDataset(torch.ones(5, 2), torch.ones(5, 2)), CPU)
    metrics = evaluate(
        torch.nn.Identity(),
        source,
        torch.nn.functional.mse_loss,
        rank=0,
        shares=[1],
        precision=Precision("fp32", "cpu"),
    )
    assert metrics == {"loss": 0.0, "samples": 5.0}


def test_evaluation_leaves_each_layer_in_its_mode() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2).eval())
    source = ResidentTensors(torch.ones(5, 2), torch.zeros(5, dtype=torch.int64), CPU)
    evaluate(model, source, cross_entropy, rank=0, shares=[1], precision=Precision("fp32", "cpu"))
    assert [model.training, model[0].training, model[1].training] == [True, True, False]


def test_evaluation_of_nothing_is_a_fault_with_a_message() -> None:
    source = ResidentTensors(*make_data(0, torch.float32), CPU)
    with pytest.raises(DataError, match="the evaluation data hold no sample"):
        evaluate(
            make_model(torch.float32),
            source,
            cross_entropy,
            rank=0,
            shares=[1],
            precision=Precision("fp32", "cpu"),
        )


def test_a_slow_rank_is_measured_and_gets_less(tmp_path: Path) -> None:
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
def test_noise_moves_no_samples_between_ranks_of_one_model(
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
def test_the_cost_line(sizes: list[int], seconds: list[float], line: tuple[float, float]) -> None:
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
def test_cards_of_one_model_are_equal_within_the_noise(
    costs: list, models: str, fitted: list
) -> None:
    equal = alike_made_equal(costs, list(models), 100)
    assert np.array(equal) == pytest.approx(np.array(fitted))


@pytest.mark.parametrize("disturbed", [0, 1, 2])
def test_a_disturbance_of_one_sweep_does_not_count(
    disturbed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def seconds_of_step(step: object, work: object, size: int, *, is_first: bool) -> float:
        sweep = calls.count(size)
        calls.append(size)
        assert is_first is (sweep == 0)
        return (1.0 if sweep == disturbed else 0.0) + 0.002 + 0.0001 * size

    monkeypatch.setattr(calibrate, "_seconds_of_step", seconds_of_step)
    source = ResidentTensors(*make_data(4, torch.float32), torch.device("cpu"))
    cost = measure_cost(step_of(torch.nn.Linear(1, 1), source), 40, 64)
    assert calls == [20, 40, 60] * 3
    assert cost == pytest.approx((0.002, 0.0001))


def step_of(model: torch.nn.Module, source: ResidentTensors) -> TrainingStep:
    def first_samples(count: int) -> Batch:
        return next(source.batches(torch.arange(count) % len(source), [(0, count)], epoch=0))

    return TrainingStep(model, cross_entropy, first_samples, CPU)


class SlowSource(ResidentTensors):
    """Takes long for each batch, as a loader does that starts its workers."""

    def batches(self, order: torch.Tensor, spans: Sequence[Span], epoch: int) -> Iterator[Batch]:
        time.sleep(0.05)
        yield from super().batches(order, spans, epoch)


def test_what_is_measured_is_the_model_in_its_modes_and_not_the_loader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes: list[bool] = []

    class Watched(torch.nn.SyncBatchNorm):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            modes.append(self.training)
            return inputs

    model = torch.nn.Sequential(make_model(torch.float32), Watched(4))
    source = SlowSource(*make_data(40, torch.float32), CPU)
    alpha, beta = measure_cost(step_of(model, source), 8, 64)
    assert alpha + 8 * beta < 0.05
    assert not any(modes), "SyncBatchNorm's forward would wait for the slowest rank"
    assert model[1].training


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
def test_precision_that_all_cards_can_do(wanted: str, ranks: list, chosen: tuple[str, str]) -> None:
    assert choose_precision(wanted, ranks) == Precision(*chosen)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            "bf16",
            r"bf16 needs compute capability 8\.0 on every rank, but rank 0 on gamma has NVIDIA TITAN V with 7\.0, "
            r"rank 2 on delta has NVIDIA GTX 1080 with 6\.1",
        ),
        (
            "fp16",
            r"fp16 needs compute capability 7\.0 on every rank, but rank 2 on delta has NVIDIA GTX 1080 with 6\.1",
        ),
        ("bf61", "precision 'bf61'; did you mean 'bf16'"),
    ],
)
def test_precision_that_some_card_cannot_do(wanted: str, message: str) -> None:
    with pytest.raises(PrecisionError, match=message):
        choose_precision(wanted, [FACT, A100, GTX])


def write_archive(path: Path, **changes: np.ndarray) -> None:
    generator = np.random.default_rng(0)
    arrays = {
        "train_images": generator.integers(0, 256, (12, 32, 32, 3), dtype=np.uint8),
        "train_labels": np.arange(12, dtype=np.uint8) % 10,
        "test_images": generator.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8),
        "test_labels": np.arange(6, dtype=np.uint8),
    }
    np.savez(path, **{name: array for name, array in {**arrays, **changes}.items() if array.size})


def test_an_archive_and_torchvision_s_folder_hold_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_archive(tmp_path / "cifar.npz")
    from_archive = load_cifar10(tmp_path / "cifar.npz")
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    train_images, train_labels, test_images, test_labels = from_archive
    names = [f"data_batch_{i}" for i in range(1, 6)]
    for name, images, labels in [
        *zip(
            names,
            train_images.split([4, 2, 2, 2, 2]),
            train_labels.split([4, 2, 2, 2, 2]),
            strict=True,
        ),
        ("test_batch", test_images, test_labels),
    ]:
        rows = (
            images.permute(0, 3, 1, 2).reshape(len(images), -1).numpy()
        )  # one row an image, channel by channel
        (folder / name).write_bytes(pickle.dumps({"data": rows, "labels": labels.tolist()}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    with pytest.raises(
        DataError, match="no whole CIFAR-10 in the folder"
    ):  # torchvision checks the real files' sums
        load_cifar10(tmp_path)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    for found, expected in zip(load_cifar10(tmp_path), from_archive, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"test_labels": np.zeros(0)},
            r"lacks the array\(s\) test_labels; it holds train_images, train_labels, test_images",
        ),
        (
            {"train_images": np.zeros((12, 3, 32, 32), np.uint8)},
            r"train_images is uint8 \[12, 3, 32, 32\], expected uint8",
        ),
        ({"train_images": np.zeros((12, 32, 32, 3))}, r"train_images is float64 \[12, 32, 32, 3\]"),
        (
            {"test_labels": np.zeros(5, np.int64)},
            r"test_labels is int64 \[5\], expected 6 whole numbers",
        ),
        ({"train_labels": np.full(12, 10)}, "train_labels reach from 10 to 10, expected 0 to 9"),
    ],
)
def test_archives_that_are_refused(
    tmp_path: Path, changes: dict[str, np.ndarray], message: str
) -> None:
    write_archive(tmp_path / "cifar.npz", **changes)
    with pytest.raises(DataError, match=message):
        load_cifar10(tmp_path / "cifar.npz")


def test_data_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"expected an \.npz archive or a folder with cifar-10-batches-py"
    ):
        load_cifar10(tmp_path / "none")
    write_archive(tmp_path / "whole.npz")
    whole = (tmp_path / "whole.npz").read_bytes()
    for content in (b"no archive", whole[: len(whole) // 2], whole[:5000] + b"?" + whole[5001:]):
        (tmp_path / "broken.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"is not a readable \.npz archive"):
            load_cifar10(tmp_path / "broken.npz")


def test_augmentation_belongs_to_the_sample_not_to_the_batch() -> None:
    images = torch.randint(0, 256, (20, 32, 32, 3), dtype=torch.uint8)
    source = ResidentImages(images, torch.arange(20), CPU, augment=True, seed=3)
    order = torch.randperm(20)
    whole, _ = next(source.batches(order, [(0, 20)], epoch=1))
    parts = list(source.batches(order, [(0, 3), (3, 3), (3, 20)], epoch=1))
    assert torch.equal(torch.cat([part for part, _ in parts]), whole)
    assert [len(labels) for _, labels in parts] == [3, 0, 17]
    assert not torch.equal(next(source.batches(order, [(0, 20)], epoch=2))[0], whole)
    assert whole.is_contiguous(memory_format=torch.channels_last)


def test_augmentation_shifts_mirrors_and_reflects() -> None:
    images = (
        torch.arange(32, dtype=torch.uint8).expand(1, 3, 32, 32).permute(0, 2, 3, 1).contiguous()
    )
    images = images + 32 * (torch.arange(32, dtype=torch.uint8) % 7)[None, :, None, None]
    source = ResidentImages(images, torch.zeros(1), CPU)
    moved = source._moved(torch.tensor([0]), torch.tensor([[2, -3, 0]]))
    padded = torch.nn.functional.pad(
        images.permute(0, 3, 1, 2).float(), (4, 4, 4, 4), mode="reflect"
    )
    assert torch.equal(moved.permute(0, 3, 1, 2).float(), padded[:, :, 6:38, 1:33])
    mirrored = source._moved(torch.tensor([0]), torch.tensor([[0, 0, 1]]))
    assert torch.equal(mirrored, images.flip(2))


def test_images_are_normalised_per_channel() -> None:
    images = torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8)
    [(found, labels)] = ResidentImages(images, torch.arange(4), CPU).batches(
        torch.arange(4), [(0, 4)], epoch=0
    )
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    torch.testing.assert_close(
        found, ((images / 255 - mean) / std).permute(0, 3, 1, 2), rtol=1e-4, atol=1e-5
    )
    assert labels.tolist() == [0, 1, 2, 3]


def test_synthetic_data_are_the_same_everywhere() -> None:
    one, other = synthetic_classes(50, seed=1), synthetic_classes(50, seed=1)
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert not torch.equal(one[0], synthetic_classes(50, seed=2)[0])


def test_a_data_set_behind_a_loader_gives_empty_batches_too() -> None:
    source = DatasetSource(torch.utils.data.TensorDataset(torch.arange(6.0), torch.arange(6)), CPU)
    batches = list(
        source.batches(torch.tensor([5, 4, 3, 2, 1, 0]), [(0, 2), (2, 2), (3, 6)], epoch=0)
    )
    assert [targets.tolist() for _, targets in batches] == [[5, 4], [], [2, 1, 0]]


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.csv"])
def test_metrics_of_a_resumed_run_read_like_one_run_s(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new folder" / name
    recorder = open_recorder(str(path))
    for step in (1, 2, 3):
        recorder({"kind": "train", "epoch": 1, "step": step, "loss": 1 / step})
    with open(path, "a") as file:
        file.write('{"kind": "tr' if name.endswith("jsonl") else "")  # a line that a kill cut off
    recorder = open_recorder(str(path), resumed_step=2)
    recorder({"kind": "train", "epoch": 1, "step": 3, "loss": 0.25})
    if name.endswith("jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == [
        (1, 1.0),
        (2, 0.5),
        (3, 0.25),
    ]
    open_recorder(str(path))  # a new run begins anew
    assert len(path.read_text().splitlines()) == (0 if name.endswith("jsonl") else 1)


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.csv"])
def test_a_metrics_path_that_cannot_be_written_is_a_fault_with_a_message(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / name, tmp_path / "file" / name):
        with pytest.raises(DdpSlurmError, match="metrics cannot be written to"):
            open_recorder(str(path), resumed_step=1)


def test_another_program_s_table_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("a,b\n1,2\n")
    open_recorder(str(tmp_path / "m.csv"), resumed_step=1)
    assert (tmp_path / "m.csv").read_text().startswith("kind,epoch,step,")


def test_tensorboard_reads_a_resumed_run_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "board"
    recorder = open_recorder("~/board/")
    for step in (1, 2, 3):
        recorder({"kind": "train", "epoch": 1, "step": step, "loss": float(step), "device": "cpu"})
    recorder = open_recorder(f"{folder}/", resumed_step=2)
    recorder({"kind": "train", "epoch": 1, "step": 3, "loss": 0.5})
    recorder({"kind": "evaluation", "epoch": 1, "step": 3, "accuracy": 0.25})
    board = EventAccumulator(str(folder)).Reload()
    assert sorted(board.Tags()["scalars"]) == ["evaluation/accuracy", "train/loss"]
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 0.5),
    ]


def test_tensorboard_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(DdpSlurmError, match="TensorBoard metrics need the package tensorboard"):
        open_recorder(f"{tmp_path}/")


def test_a_metrics_path_of_another_kind_is_refused() -> None:
    with pytest.raises(DdpSlurmError, match=r"metrics path 'loss\.txt' must end in"):
        open_recorder("loss.txt")


def test_what_rank_0_prints() -> None:
    table = rank_table([FACT, dataclasses.replace(NO_GPU, rank=1, node_name="beta")], [12, 4])
    assert table.splitlines() == [
        "rank  node   local rank  device                 share",
        "0     gamma  0           cuda:0 NVIDIA TITAN V  12",
        "1     beta   0           cpu                    4",
    ]
    line = progress_line(
        epoch=2, epochs=5, step=3, steps=9, loss=1.5, rates=[1000.4, 20], left_seconds=61.4
    )
    assert line == "epoch 2/5  step 3/9  loss 1.5000  1,020 images/s (ranks: 1,000 20)  ETA 0:01:01"
