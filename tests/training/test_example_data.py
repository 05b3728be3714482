"""The examples' data: CIFAR-10 from disk, synthetic classes."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from ddp_slurm.data.download import Checksum
from ddp_slurm.data.prepare import KNOWN
from ddp_slurm.examples.cifar10 import load_cifar10
from ddp_slurm.examples.synthetic import synthetic_classes
from ddp_slurm.training.data import (
    DataError,
)


def write_archive(path: Path, **changes: np.ndarray) -> None:
    generator = np.random.default_rng(0)
    arrays = {
        "train_images": generator.integers(0, 256, (12, 32, 32, 3), dtype=np.uint8),
        "train_labels": np.arange(12, dtype=np.uint8) % 10,
        "test_images": generator.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8),
        "test_labels": np.arange(6, dtype=np.uint8),
    }
    np.savez(path, **{name: array for name, array in {**arrays, **changes}.items() if array.size})


def test_cifar10_archive_and_folder_give_the_same(
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
        DataError, match="no complete CIFAR-10 in the folder"
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
            r"lacks the array\(s\) test_labels; it has train_images, train_labels, test_images",
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
        ({"train_labels": np.full(12, 10)}, "train_labels range from 10 to 10, expected 0 to 9"),
    ],
)
def test_cifar10_archive_with_wrong_arrays_is_refused(
    tmp_path: Path, changes: dict[str, np.ndarray], message: str
) -> None:
    write_archive(tmp_path / "cifar.npz", **changes)
    with pytest.raises(DataError, match=message):
        load_cifar10(tmp_path / "cifar.npz")


def test_cifar10_missing_or_damaged_is_an_error(tmp_path: Path) -> None:
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


def test_synthetic_classes_depend_on_the_seed_only() -> None:
    one, other = synthetic_classes(50, seed=1), synthetic_classes(50, seed=1)
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert not torch.equal(one[0], synthetic_classes(50, seed=2)[0])


@pytest.mark.parametrize("name", ["CIFAR10", "CIFAR100"])
def test_known_downloads_are_those_of_torchvision(name: str) -> None:
    from torchvision import datasets  # takes seconds, which only the process of this test waits for

    data_set = getattr(datasets, name)
    assert KNOWN[name.lower()] == (data_set.url, Checksum("md5", data_set.tgz_md5))
