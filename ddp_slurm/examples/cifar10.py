"""CIFAR-10 from disk, for the example of its name."""

import shlex
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_slurm.training.data import DataError

MEAN = (0.4914, 0.4822, 0.4465)
"""Per channel, of images scaled to 0..1; computed from the 50,000 training images."""
STD = (0.2470, 0.2435, 0.2616)
"""As ``MEAN``."""
ARCHIVE_KEYS = ("train_images", "train_labels", "test_images", "test_labels")
CLASSES = 10

Array = np.ndarray[Any, Any]


def load_cifar10(
    path: str | Path, limit: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train images, train labels, test images, test labels: uint8 (n, 32, 32, 3) and int64 (n,).

    Nothing is downloaded: seven ranks that download into one folder break each other's files.

    Args:
        path: an .npz archive with the arrays train_images, train_labels, test_images and
            test_labels, or the folder in which torchvision's CIFAR10 keeps ``cifar-10-batches-py``.
        limit: the first so many of each split.

    Raises DataError with the path and the expected content.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        arrays = _read_torchvision_folder(path)
    elif path.is_file():
        arrays = _read_archive(path)
    else:
        raise DataError(
            f"no CIFAR-10 at {path.absolute()}: expected an .npz archive or a folder with "
            "cifar-10-batches-py. Download it once, before the job: ddp-slurm data prepare "
            f"cifar10 --to {shlex.quote(str(path))}"
        )
    train_images, train_labels, test_images, test_labels = arrays
    return (
        torch.from_numpy(train_images[:limit]),
        torch.from_numpy(train_labels[:limit]).long(),
        torch.from_numpy(test_images[:limit]),
        torch.from_numpy(test_labels[:limit]).long(),
    )


def _read_archive(path: Path) -> list[Array]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [key for key in ARCHIVE_KEYS if key not in archive]
            if missing:
                raise DataError(
                    f"{path} lacks the array(s) {', '.join(missing)}; it has {', '.join(archive)}"
                )
            arrays = [archive[key] for key in ARCHIVE_KEYS]
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is not a readable .npz archive: {error}") from error
    train_images, train_labels, test_images, test_labels = arrays
    _check_split(path, "train", train_images, train_labels)
    _check_split(path, "test", test_images, test_labels)
    return arrays


def _check_split(path: Path, name: str, images: Array, labels: Array) -> None:
    if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3):
        raise DataError(
            f"{path}: {name}_images is {images.dtype} {list(images.shape)}, "
            "expected uint8 [N, 32, 32, 3]"
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu" or labels.size == 0:
        raise DataError(
            f"{path}: {name}_labels is {labels.dtype} {list(labels.shape)}, "
            f"expected {len(images)} whole numbers"
        )
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise DataError(
            f"{path}: {name}_labels range from {labels.min()} to {labels.max()}, "
            f"expected 0 to {CLASSES - 1}"
        )


def _read_torchvision_folder(path: Path) -> list[Array]:
    # Imported here: it takes a second, and only this form needs it.
    from torchvision.datasets import CIFAR10

    arrays = []
    for train in (True, False):
        try:
            split = CIFAR10(str(path), train=train, download=False)
        except RuntimeError as error:
            raise DataError(
                f"no complete CIFAR-10 in the folder {path.absolute()}: {error}"
            ) from error
        arrays += [split.data, np.asarray(split.targets)]
    return arrays
