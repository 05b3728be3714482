"""Training data as a Source: batches on the rank's device, by place in the epoch's order.

Images stay uint8 and on the device; augmentation runs there, for a whole batch at once. Its random numbers belong to
(seed, epoch, sample), so a sample looks the same on whichever rank it falls, and after a resume too.
"""

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training.uneven.sampler import seed_of

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Per channel, of images scaled to 0..1; computed from the 50,000 training images."""
ARCHIVE_KEYS = ("train_images", "train_labels", "test_images", "test_labels")
SHIFT_PIXELS = 4

Span = tuple[int, int]
Batch = tuple[Tensor, Tensor]


class DataError(DdpSlurmError):
    """Training data that is missing or not in the form it should have."""


class Source(Protocol):
    """What the Trainer reads from. ``batches`` gives (inputs, targets) on ``device`` for each span of ``order``,
    tensors of length 0 for an empty span."""

    device: torch.device

    def __len__(self) -> int: ...

    def batches(self, order: Tensor, spans: Sequence[Span], epoch: int) -> Iterator[Batch]: ...


class ResidentTensors:
    """Inputs and targets that fit on the device."""

    def __init__(self, inputs: Tensor, targets: Tensor, device: torch.device) -> None:
        if len(inputs) != len(targets):
            raise DataError(f"{len(inputs)} inputs for {len(targets)} targets")
        self.inputs, self.targets, self.device = inputs.to(device), targets.to(device), device

    def __len__(self) -> int:
        return len(self.targets)

    def batches(self, order: Tensor, spans: Sequence[Span], epoch: int) -> Iterator[Batch]:
        order = order.to(self.device)
        for start, stop in spans:
            chosen = order[start:stop]
            yield self.inputs[chosen], self.targets[chosen]


class ResidentImages:
    """uint8 images (n, height, width, channels) that fit on the device; gives float (b, channels, height, width).

    Args:
        labels: class numbers, (n,).
        augment: shift by up to 4 pixels with reflected borders, and mirror every other image.
        seed: of the augmentation.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        device: torch.device,
        *,
        augment: bool = False,
        seed: int = 0,
    ) -> None:
        if len(images) != len(labels):
            raise DataError(f"{len(images)} images for {len(labels)} labels")
        self.images, self.labels, self.device = (
            images.to(device),
            labels.to(device, torch.int64),
            device,
        )
        self.augment, self.seed = augment, seed
        scale = 255 * torch.tensor(CIFAR10_STD, device=device)
        self._factor, self._offset = (
            1 / scale,
            -255 * torch.tensor(CIFAR10_MEAN, device=device) / scale,
        )

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, order: Tensor, spans: Sequence[Span], epoch: int) -> Iterator[Batch]:
        order = order.to(self.device)
        moves = self._moves(epoch) if self.augment else None
        for start, stop in spans:
            chosen = order[start:stop]
            images = self.images[chosen] if moves is None else self._moved(chosen, moves[chosen])
            # A permuted view of (b, h, w, c) is a channels_last tensor already: the layout that tensor cores want.
            yield (images * self._factor + self._offset).permute(0, 3, 1, 2), self.labels[chosen]

    def _moves(self, epoch: int) -> Tensor:
        """Per sample of the whole set: shift down, shift right (-4..4), mirrored (0 or 1); int64 (n, 3)."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, epoch, "augment"))
        moves = torch.randint(-SHIFT_PIXELS, SHIFT_PIXELS + 1, (len(self), 3), generator=generator)
        moves[:, 2] = torch.randint(0, 2, (len(self),), generator=generator)
        return moves.to(self.device)

    def _moved(self, chosen: Tensor, moves: Tensor) -> Tensor:
        """Shift and mirror by looking each pixel up: one gather for the batch, and no padded copy."""
        height, width = self.images.shape[1:3]
        rows = _reflect(torch.arange(height, device=self.device) + moves[:, :1], height)
        columns = torch.arange(width, device=self.device).expand(len(chosen), width)
        columns = torch.where(moves[:, 2:] == 1, width - 1 - columns, columns)
        columns = _reflect(columns + moves[:, 1:2], width)
        return self.images[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]


def _reflect(places: Tensor, size: int) -> Tensor:
    places = places.abs()
    return torch.where(places > size - 1, 2 * (size - 1) - places, places)


class DatasetSource:
    """Any map-style Dataset of (input, target), read by a DataLoader's workers."""

    def __init__(self, dataset: Dataset[Any], device: torch.device, *, workers: int = 0) -> None:
        self.dataset, self.device, self.workers = dataset, device, workers

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batches(self, order: Tensor, spans: Sequence[Span], epoch: int) -> Iterator[Batch]:
        filled = [order[start:stop].tolist() for start, stop in spans if stop > start]
        # A generator of its own: with the global one each start of the loader, also after a resume, would move that on.
        generator = torch.Generator().manual_seed(
            seed_of(torch.initial_seed(), epoch, *spans[:1], "loader")
        )
        loader = iter(
            DataLoader(
                self.dataset,
                batch_sampler=filled,
                num_workers=self.workers,
                pin_memory=self.device.type == "cuda",
                generator=generator,
            )
        )
        for start, stop in spans:
            inputs, targets = next(loader) if stop > start else self._empty()
            yield (
                inputs.to(self.device, non_blocking=True),
                targets.to(self.device, non_blocking=True),
            )

    def _empty(self) -> Batch:
        inputs, targets = torch.utils.data.default_collate([self.dataset[0]])
        return inputs[:0], targets[:0]


def load_cifar10(
    path: str | Path, limit: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train images, train labels, test images, test labels: uint8 (n, 32, 32, 3) and int64 (n,).

    Args:
        path: an .npz archive with the arrays train_images, train_labels, test_images and test_labels, or the folder
            that torchvision's CIFAR10 keeps ``cifar-10-batches-py`` in. Nothing is ever downloaded here: seven ranks
            that download into one folder break each other's files.
        limit: the first so many of each split.

    Raises DataError with the path and what it should hold.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        arrays = _read_torchvision_folder(path)
    elif path.is_file():
        arrays = _read_archive(path)
    else:
        raise DataError(
            f"no CIFAR-10 at {path.absolute()}: expected an .npz archive or a folder with cifar-10-batches-py in it. "
            'Fetch it once, before the job: python -c "import torchvision; torchvision.datasets.CIFAR10('
            f"'{path}', download=True)\""
        )
    return (
        torch.from_numpy(arrays[0][:limit]),
        torch.from_numpy(arrays[1][:limit]).long(),
        torch.from_numpy(arrays[2][:limit]),
        torch.from_numpy(arrays[3][:limit]).long(),
    )


def _read_archive(path: Path) -> list[np.ndarray[Any, Any]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [key for key in ARCHIVE_KEYS if key not in archive]
            if missing:
                raise DataError(
                    f"{path} lacks the array(s) {', '.join(missing)}; it holds {', '.join(archive)}"
                )
            arrays = [archive[key] for key in ARCHIVE_KEYS]
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is not a readable .npz archive: {error}") from error
    for images, labels, name in ((arrays[0], arrays[1], "train"), (arrays[2], arrays[3], "test")):
        if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3):
            raise DataError(
                f"{path}: {name}_images is {images.dtype} {list(images.shape)}, expected uint8 [N, 32, 32, 3]"
            )
        if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu" or labels.size == 0:
            raise DataError(
                f"{path}: {name}_labels is {labels.dtype} {list(labels.shape)}, expected {len(images)} whole numbers"
            )
        if labels.min() < 0 or labels.max() > 9:
            raise DataError(
                f"{path}: {name}_labels reach from {labels.min()} to {labels.max()}, expected 0 to 9"
            )
    return arrays


def _read_torchvision_folder(path: Path) -> list[np.ndarray[Any, Any]]:
    from torchvision.datasets import CIFAR10  # here: it costs a second, and only this form needs it

    arrays = []
    for train in (True, False):
        try:
            split = CIFAR10(str(path), train=train, download=False)
        except RuntimeError as error:
            raise DataError(
                f"no whole CIFAR-10 in the folder {path.absolute()}: {error}"
            ) from error
        arrays += [split.data, np.asarray(split.targets)]
    return arrays


def synthetic_classes(
    samples: int, *, features: int = 32, classes: int = 10, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Inputs (samples, features) and class numbers (samples,) that a small network can learn; the same on every rank.

    The class is the largest of ``classes`` fixed random projections of the input.
    """
    generator = torch.Generator().manual_seed(seed_of(seed, "synthetic"))
    projections = torch.randn(features, classes, generator=generator)
    inputs = torch.randn(samples, features, generator=generator)
    return inputs, (inputs @ projections).argmax(dim=1)
