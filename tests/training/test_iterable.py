"""Uneven shares of a stream, with and without loader workers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddp_slurm.training import BalancedIterable, BalanceError

from .test_sampler import lengths, shares


class Stream:
    """Numbers that can only be iterated, again each epoch."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


@given(lengths, shares)
def test_iterable_shares_a_stream_like_a_data_set(length: int, shares: list[int]) -> None:
    parts = [
        list(BalancedIterable(Stream(length), shares, rank, collate=list))
        for rank in range(len(shares))
    ]
    steps = list(zip(*parts, strict=True))
    assert [i for step in steps for batch, _, _ in step for i in batch or []] == list(range(length))
    for step in steps:
        assert {total for _, _, total in step} == {sum(own for _, own, _ in step)}
        assert all((batch is None) == (own == 0) for batch, own, _ in step)


@pytest.mark.parametrize("workers", [0, 2])
def test_iterable_keeps_the_order_over_loader_workers(workers: int) -> None:
    loader = DataLoader(
        BalancedIterable(Stream(101), [5, 7], 1), batch_size=None, num_workers=workers
    )
    found = [batch.tolist() for batch, _, _ in loader]
    expected = [list(range(12 * step + 5, 12 * step + 12)) for step in range(8)]
    assert found == [*expected, [98, 99, 100]]  # of the last five, shared out 2 and 3


class SplittingStream(IterableDataset[int]):
    """Gives each loader worker a part, as most streamed data sets do; shuffles by epoch."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker else (0, 1)
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order.tolist()[start::step])


@pytest.mark.parametrize(
    ("shares", "persistent", "method"),
    [([5, 7], False, "fork"), ([5, 7], True, "fork"), ([12], True, "spawn")],
)
def test_iterable_of_a_splitting_stream_loses_nothing(
    shares: list[int], persistent: bool, method: str
) -> None:
    loaders = []
    for rank in range(len(shares)):
        balanced = BalancedIterable(SplittingStream(101), shares, rank)
        loader = DataLoader(
            balanced,
            batch_size=None,
            num_workers=2,
            persistent_workers=persistent,
            multiprocessing_context=method,
        )
        loaders.append((balanced, loader))
    orders = []
    for epoch in (0, 1):
        parts = []
        for balanced, loader in loaders:
            balanced.set_epoch(epoch)
            parts.append([batch.tolist() for batch, _, _ in loader])
        order = [index for step in zip(*parts, strict=True) for part in step for index in part]
        expected = SplittingStream(101)
        expected.set_epoch(epoch)
        assert order == list(expected)
        orders.append(order)
    assert orders[0] != orders[1]


def test_iterable_refuses_a_forgotten_epoch_in_persistent_workers() -> None:
    balanced = BalancedIterable(SplittingStream(20), [5], 0)
    loader = DataLoader(balanced, batch_size=None, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 4
    with pytest.raises(BalanceError, match=r"Call balanced\.set_epoch\(epoch\) in each epoch"):
        list(loader)


def test_iterable_set_epoch_needs_a_stream_with_one() -> None:
    with pytest.raises(BalanceError, match="the stream, a Stream, has no set_epoch"):
        BalancedIterable(Stream(3), [1], 0).set_epoch(1)


def test_iterable_gives_the_worker_back_after_an_epoch() -> None:
    class Asks(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 0 if get_worker_info() is None else 1

    class Collates(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for batch, _, _ in BalancedIterable(Asks(), [1], 0, collate=list):
                yield batch
            yield get_worker_info() is not None

    assert list(DataLoader(Collates(), batch_size=None, num_workers=1)) == [[0], True]
