"""Images that are streamed to the device: the batches of those that live on it."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddp_slurm.training import ResidentImages, StreamedImages
from ddp_slurm.training.data import DataError

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4), "seed": 5}
SPANS = [(0, 7), (7, 7), (10, 11), *((start, start + 3) for start in range(11, 38, 3))]


@pytest.fixture
def samples(tmp_path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of a mapped file, and labels."""
    numbers = np.random.default_rng(0).integers(0, 256, (40, 12, 10, 3), np.uint8)
    np.save(tmp_path / "images.npy", numbers)
    mapped = np.load(tmp_path / "images.npy", mmap_mode="c")
    return torch.from_numpy(mapped), torch.arange(40)


@pytest.mark.parametrize("augment", [False, True])
def test_streamed_batches_are_those_of_resident_images(
    samples: tuple[torch.Tensor, torch.Tensor], *, augment: bool
) -> None:
    order = torch.randperm(40)
    resident = ResidentImages(*samples, CPU, augment=augment, **OPTIONS)
    streamed = StreamedImages(*samples, CPU, augment=augment, **OPTIONS)
    assert len(streamed) == 40
    wanted = list(resident.batches(order, SPANS, epoch=3))
    found = list(streamed.batches(order, SPANS, epoch=3))
    assert len(found) == len(wanted) == len(SPANS)
    for (images, labels), (other_images, other_labels) in zip(found, wanted, strict=True):
        assert torch.equal(images, other_images)
        assert torch.equal(labels, other_labels)
        assert images.is_contiguous(memory_format=torch.channels_last)


def test_an_epoch_left_early_leaves_no_thread(
    samples: tuple[torch.Tensor, torch.Tensor],
) -> None:
    before = threading.active_count()
    batches = StreamedImages(*samples, CPU, **OPTIONS).batches(torch.arange(40), SPANS, epoch=0)
    next(batches)
    batches.close()
    assert threading.active_count() == before


def test_an_error_of_a_thread_reaches_the_training(
    samples: tuple[torch.Tensor, torch.Tensor],
) -> None:
    source = StreamedImages(*samples, CPU, **OPTIONS)
    with pytest.raises(IndexError):
        list(source.batches(torch.tensor([40]), [(0, 1)], epoch=0))


def test_streamed_images_need_a_mean_for_each_channel(
    samples: tuple[torch.Tensor, torch.Tensor],
) -> None:
    with pytest.raises(DataError, match="expected one number for each of 3 channels"):
        StreamedImages(*samples, CPU, mean=[0.5], std=[0.5])
