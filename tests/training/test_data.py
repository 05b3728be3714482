"""Sources: what the Trainer reads its batches from."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    default_collate,
)

from ddp_slurm.examples.cifar10 import MEAN, STD
from ddp_slurm.training.data import (
    DataError,
    DatasetSource,
    ResidentTensors,
    as_source,
)
from ddp_slurm.training.images import ResidentImages, move, moved

CPU = torch.device("cpu")


def resident(images: torch.Tensor, labels: torch.Tensor, **options: Any) -> ResidentImages:
    return ResidentImages(images, labels, CPU, mean=MEAN, std=STD, **options)


def test_augmentation_depends_on_the_sample_only() -> None:
    images = torch.randint(0, 256, (20, 32, 32, 3), dtype=torch.uint8)
    source = resident(images, torch.arange(20), augment=True, seed=3)
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
    first, none, one = torch.tensor([0]), torch.tensor([0]), torch.tensor([1])
    shifted = moved(images, first, move(torch.tensor([2]), torch.tensor([-3]), none))
    padded = torch.nn.functional.pad(
        images.permute(0, 3, 1, 2).float(), (4, 4, 4, 4), mode="reflect"
    )
    assert torch.equal(shifted.permute(0, 3, 1, 2).float(), padded[:, :, 6:38, 1:33])
    assert torch.equal(moved(images, first, move(none, none, one)), images.flip(2))
    both = moved(images, first, move(none, one, one))
    flipped = torch.nn.functional.pad(images.permute(0, 3, 1, 2).float(), (4,) * 4, mode="reflect")
    assert torch.equal(both.permute(0, 3, 1, 2).float(), flipped.flip(3)[:, :, 4:36, 3:35])


def test_resident_images_are_normalised_per_channel() -> None:
    images = torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8)
    source = resident(images, torch.arange(4))
    [(found, labels)] = source.batches(torch.arange(4), [(0, 4)], epoch=0)
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    torch.testing.assert_close(
        found, ((images / 255 - mean) / std).permute(0, 3, 1, 2), rtol=1e-4, atol=1e-5
    )
    assert labels.tolist() == [0, 1, 2, 3]


def test_dataset_source_gives_empty_batches_too() -> None:
    source = DatasetSource(torch.utils.data.TensorDataset(torch.arange(6.0), torch.arange(6)), CPU)
    batches = list(
        source.batches(torch.tensor([5, 4, 3, 2, 1, 0]), [(0, 2), (2, 2), (3, 6)], epoch=0)
    )
    assert [targets.tolist() for _, targets in batches] == [[5, 4], [], [2, 1, 0]]


def pairs(samples: int) -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.arange(float(samples)), torch.arange(samples))


def test_as_source_takes_a_data_set() -> None:
    source = as_source(pairs(6), CPU)
    [(inputs, targets)] = source.batches(torch.tensor([5, 3, 1]), [(0, 2)], epoch=0)
    assert (len(source), inputs.tolist(), targets.tolist()) == (6, [5.0, 3.0], [5, 3])


def test_as_source_takes_data_set_and_collate_of_a_loader() -> None:
    def doubled(samples: list[Any]) -> Any:
        inputs, targets = default_collate(samples)
        return 2 * inputs, targets

    for shuffle in (False, True):
        loader = DataLoader(pairs(6), 3, shuffle=shuffle, collate_fn=doubled, num_workers=1)
        source = as_source(loader, CPU)
        assert isinstance(source, DatasetSource)
        assert source.workers == 1
        batches = source.batches(torch.tensor([5, 3, 1]), [(0, 2), (2, 2)], epoch=0)
        assert [inputs.tolist() for inputs, _ in batches] == [[10.0, 6.0], []]


def test_as_source_keeps_a_source() -> None:
    source = ResidentTensors(torch.ones(2), torch.ones(2), CPU)
    assert as_source(source, CPU) is source


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Stream(), "a Stream can only be iterated; the Trainer needs __len__ and __getitem__"),
        (DataLoader(Stream()), "a Stream can only be iterated"),
        (
            DataLoader(pairs(6), sampler=DistributedSampler(pairs(6), 2, 0)),
            "a DataLoader with its own DistributedSampler: the Trainer decides which rank",
        ),
        (DataLoader(pairs(6), batch_sampler=[[0]]), "a DataLoader with its own list"),
        (
            DataLoader(pairs(6), sampler=RandomSampler(range(6), replacement=True)),
            "its own RandomSampler",
        ),
    ],
    ids=["stream", "loader of a stream", "sampler", "batch sampler", "replacement"],
)
def test_as_source_refuses_an_order_of_its_own(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        as_source(data, CPU)


def test_dataset_source_needs_pairs_of_tensors() -> None:
    source = as_source([{"x": 1.0}, {"x": 2.0}], CPU)
    with pytest.raises(DataError, match=r"is a dict; expected a pair of tensors \(inputs, targets"):
        next(source.batches(torch.arange(2), [(0, 2)], epoch=0))


def test_resident_images_need_a_mean_for_each_channel() -> None:
    images = torch.zeros(2, 4, 4, 1, dtype=torch.uint8)
    with pytest.raises(DataError, match="expected one number for each of 1 channels"):
        resident(images, torch.zeros(2))


@pytest.mark.parametrize(("share", "workers"), [(0.0, 1), (0.5, 2), (1.0, 4), (2.6, 10)])
def test_workers_are_in_proportion_to_the_share(share: float, workers: int) -> None:
    source = DatasetSource(pairs(10), CPU, workers=4)
    source.relative_share = share
    assert source.own_workers == workers
    in_this_process = DatasetSource(pairs(10), CPU)
    in_this_process.relative_share = share
    assert in_this_process.own_workers == 0
