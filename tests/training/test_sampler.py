"""Every sample once an epoch, on whichever rank; an order that depends on seed and epoch alone."""

import collections
import collections.abc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ddp_slurm.training import BalancedSampler, BalanceError
from ddp_slurm.training.uneven.sampler import emptied, seed_of

shares = st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any)
lengths = st.integers(0, 200)


def epoch_of(
    length: int, shares: list[int], epoch: int, first: int = 0, **options: bool
) -> list[list[list[int]]]:
    """Per rank, per step, the indices."""
    ranks = []
    for rank in range(len(shares)):
        sampler = BalancedSampler(length, shares, rank, seed=7, **options)
        sampler.set_epoch(epoch, first)
        ranks.append(list(sampler))
    return ranks


def in_order(ranks: list[list[list[int]]]) -> list[int]:
    """All indices, step by step, rank by rank."""
    return [index for step in zip(*ranks, strict=True) for part in step for index in part]


@given(lengths, shares, st.integers(0, 5))
def test_sampler_gives_every_index_once_in_equal_steps(
    length: int, shares: list[int], epoch: int
) -> None:
    ranks = epoch_of(length, shares, epoch)
    assert {len(steps) for steps in ranks} == {
        -(-length // sum(shares))
    }  # zip(strict) above needs it too
    assert sorted(in_order(ranks)) == list(range(length))


@given(lengths, shares)
def test_sampler_keeps_shares_and_divides_the_last_batch(length: int, shares: list[int]) -> None:
    total = sum(shares)
    for rank, steps in enumerate(epoch_of(length, shares, 0)):
        whole, rest = divmod(length, total)
        assert [len(step) for step in steps[:whole]] == [shares[rank]] * whole
        if rest:
            assert abs(len(steps[-1]) - rest * shares[rank] / total) < 1


@given(lengths, shares, shares, st.integers(0, 3))
def test_sampler_order_does_not_depend_on_ranks(
    length: int, one: list[int], other: list[int], epoch: int
) -> None:
    assert in_order(epoch_of(length, one, epoch)) == in_order(epoch_of(length, other, epoch))


@given(lengths, shares, shares, st.data())
def test_sampler_resumed_on_other_ranks_gives_the_rest(
    length: int, one: list[int], other: list[int], data: st.DataObject
) -> None:
    steps = -(-length // sum(one))
    done = min(length, data.draw(st.integers(0, steps)) * sum(one))
    whole = in_order(epoch_of(length, one, 2))
    assert in_order(epoch_of(length, other, 2, first=done)) == whole[done:]


@given(lengths, shares)
def test_sampler_drop_last_leaves_the_last_batch_out(length: int, shares: list[int]) -> None:
    ranks = epoch_of(length, shares, 0, drop_last=True)
    whole = length // sum(shares) * sum(shares)
    assert in_order(ranks) == in_order(epoch_of(length, shares, 0))[:whole]


def test_sampler_order_differs_by_epoch_and_seed() -> None:
    orders = set()
    for seed in (0, 1):
        for epoch in (0, 1, 2):
            sampler = BalancedSampler(50, [3, 4], 0, seed=seed)
            sampler.set_epoch(epoch)
            orders.add(tuple(sampler.order().tolist()))
    assert len(orders) == 6  # seed 0, epoch 1 is not seed 1, epoch 0
    assert in_order(epoch_of(9, [2, 1], 3, shuffle=False)) == list(range(9))


def test_seed_of_is_the_same_on_every_machine() -> None:
    assert seed_of(0, 1, "shuffle") == 2758376419265644486


@given(lengths.filter(bool), shares)
def test_sampler_loss_weights_average_to_one(length: int, shares: list[int]) -> None:
    samplers = [BalancedSampler(length, shares, rank) for rank in range(len(shares))]
    for step in range(len(samplers[0])):
        weights = [sampler.loss_weight(step) for sampler in samplers]
        assert sum(weights) / len(shares) == pytest.approx(1)
        assert samplers[0].global_samples(step) == sum(samplers[0].rank_samples(step))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, [3, 4], 2), r"rank 2 has no share in \[3, 4\]"),
        ((10, [0, 0], 0), "must be >= 0 and not all 0"),
        ((10, [3, -1], 0), "must be >= 0 and not all 0"),
    ],
)
def test_sampler_refuses_wrong_shares(arguments: tuple, message: str) -> None:
    with pytest.raises(BalanceError, match=message):
        BalancedSampler(*arguments)


def test_sampler_refuses_a_start_outside_the_epoch() -> None:
    with pytest.raises(BalanceError, match="sample 11 is not within an epoch of 10 samples"):
        BalancedSampler(10, [2], 0).set_epoch(0, 11)


def test_sampler_works_as_batch_sampler() -> None:
    data = torch.arange(20) * 10
    loader = DataLoader(data, batch_sampler=BalancedSampler(data, [1, 3], 1, shuffle=False))
    assert [batch.tolist() for batch in loader] == [
        [10, 20, 30],
        [50, 60, 70],
        [90, 100, 110],
        [130, 140, 150],
        [170, 180, 190],
    ]


def test_collate_gives_an_empty_batch_without_samples() -> None:
    data = [{"x": torch.full((3,), float(i)), "y": (i, torch.tensor(i))} for i in range(9)]
    sampler = BalancedSampler(data, [1, 7], 0, shuffle=False)  # the ninth sample goes to rank 1
    whole, empty = DataLoader(data, batch_sampler=sampler, collate_fn=sampler.collate)
    assert whole["x"].tolist() == [[0.0] * 3]
    assert empty["x"].shape == (0, 3)
    assert [len(part) for part in empty["y"]] == [0, 0]


Pair = collections.namedtuple("Pair", ["inputs", "target"])


class Fields(collections.abc.Mapping):
    """A Mapping that cannot be changed."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values_by_name = values

    def __getitem__(self, name: str) -> Any:
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)


@pytest.mark.parametrize(
    "sample",
    [
        Pair(torch.ones(3), 1),
        (Pair(torch.ones(3), 1), {"mask": torch.ones(2), "name": "a"}),
        {"inputs": torch.ones(3), "more": Pair(1.0, (2, 3))},
        collections.OrderedDict(inputs=torch.ones(3)),
        collections.UserDict(inputs=torch.ones(3), target=1),
        Fields({"inputs": torch.ones(3), "target": 1}),
        [torch.ones(3), [1, "a"]],
        (np.ones(3), np.float32(1)),
    ],
    ids=lambda sample: type(sample).__name__,
)
def test_collate_keeps_the_structure_of_a_batch(sample: Any) -> None:
    sampler = BalancedSampler([sample] * 9, [1, 7], 0)
    whole, empty = sampler.collate([sample]), sampler.collate([])
    assert shape_of(empty) == shape_of(whole, samples=0)


def shape_of(batch: Any, samples: int | None = None) -> Any:
    """Types and shapes, of ``samples`` samples if given."""
    if isinstance(batch, torch.Tensor):
        length = len(batch) if samples is None else samples
        return batch.dtype, (length, *batch.shape[1:])
    if isinstance(batch, collections.abc.Mapping):
        parts = {name: shape_of(part, samples) for name, part in batch.items()}
        return type(batch), parts
    if all(isinstance(part, str) for part in batch):
        return type(batch), len(batch) if samples is None else samples
    return type(batch), [shape_of(part, samples) for part in batch]


def test_collate_empties_texts_and_needs_the_data_set() -> None:
    assert BalancedSampler([("a text", 1)], [0, 1], 0).collate([])[0] == ()
    with pytest.raises(BalanceError, match="give BalancedSampler the data set, not its length"):
        BalancedSampler(9, [0, 1], 0).collate([])


def test_collate_refuses_a_batch_that_cannot_be_emptied() -> None:
    with pytest.raises(BalanceError, match="a batch of type int cannot be emptied"):
        emptied({"size": 3})
