"""A loader's global batches, divided by the plan's shares instead of equally.

The global batch of a step is what the ranks' batches of the unmodified script are together, in the
script's own order: a run with uneven shares takes the same samples in the same steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import BatchSampler, DistributedSampler, Sampler, SequentialSampler

from ddp_slurm.balance import apportion, planned_shares
from ddp_slurm.training.uneven.sampler import rank_span

if TYPE_CHECKING:
    from ddp_slurm.training.scripts.modules import Modules

STAND_INS = 2
"""Samples that a rank without any of its own reads, with a weight of 0: its model runs as usual.
Two, since a BatchNorm1d cannot train on one."""


class Share(NamedTuple):
    """A rank's part of one micro-batch of all ranks."""

    own: int
    total: int

    @property
    def size(self) -> int:
        """Samples of the rank's batch."""
        return self.own or STAND_INS

    def factor(self, world_size: int) -> float:
        """What the gradient of the rank's mean loss is multiplied by, see ``uneven.gradients``."""
        return world_size * self.own / self.total


class DistributedBlocks:
    """The global batches of a BatchSampler over a DistributedSampler, the same on every rank."""

    def __init__(self, original: Any) -> None:
        self.original = original
        """The batch sampler of the unmodified script."""
        self.world_size = original.sampler.num_replicas
        self.rank = original.sampler.rank
        self.size = original.batch_size * self.world_size
        """Samples of a whole block."""

    @property
    def is_shuffled(self) -> bool:
        return bool(self.original.sampler.shuffle)

    def _samples(self) -> int:
        """Without the copies that make the ranks' parts equal."""
        sampler = self.original.sampler
        return int(sampler.total_size if sampler.drop_last else len(sampler.dataset))

    def __len__(self) -> int:
        return _number_of_groups(self._samples(), self.size, self.original.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        # The order of all ranks is the one that the sampler gives a world of one rank.
        alone = copy.copy(self.original.sampler)
        alone.num_replicas, alone.rank = 1, 0
        alone.num_samples = alone.total_size = self._samples()
        return _groups(alone, self.size, self.original.drop_last)


class ShardedBlocks:
    """The same for Accelerate's BatchSamplerShard, which deals out another sampler's batches."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.world_size = original.num_processes
        self.rank = original.process_index
        self._batches_in_block = 1 if original.split_batches else self.world_size
        self.size = (original.batch_size or 1) * self._batches_in_block

    @property
    def is_shuffled(self) -> bool:
        return type(getattr(self.original.batch_sampler, "sampler", None)) is not SequentialSampler

    def __len__(self) -> int:
        batches = len(self.original.batch_sampler)
        return _number_of_groups(batches, self._batches_in_block, self.original.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        batches = self.original.batch_sampler
        for block in _groups(batches, self._batches_in_block, self.original.drop_last):
            yield [sample for batch in block for sample in batch]


def _number_of_groups(items: int, size: int, drop_last: bool) -> int:
    return items // size if drop_last else -(-items // size)


def _groups(items: Iterable[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
    rest = iter(items)
    while group := list(islice(rest, size)):
        if len(group) == size or not drop_last:
            yield group


class ShareBatches(Sampler[list[int]]):
    """The batch sampler of this rank: its share of each block.

    ``shares`` holds what the batches of the latest iteration are, as far as they were read.

    Args:
        blocks: of the loader.
        training: of the script.
    """

    def __init__(self, blocks: DistributedBlocks | ShardedBlocks, training: Modules) -> None:
        self.blocks = blocks
        self._training = training
        self.is_divided = False
        self.planned = planned_shares(blocks.size, blocks.world_size)
        self.shares: list[Share] = []

    def __getattr__(self, name: str) -> Any:
        # Frameworks look for sampler, batch_size, drop_last, ... here.
        if name == "blocks":
            raise AttributeError(name)
        return getattr(self.blocks.original, name)

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[list[int]]:
        self.shares = []
        self.is_divided = self._training.is_training(self.blocks.is_shuffled)
        if self.is_divided:
            return self._own_parts(self.shares)
        return self._equal_parts(self.shares)

    def _own_parts(self, shares: list[Share]) -> Iterator[list[int]]:
        """By shares: each sample once, without copies."""
        for block in self.blocks:
            is_whole = len(block) == sum(self.planned)
            counts = self.planned if is_whole else self._part_of_the_rest(len(block))
            own = block[slice(*rank_span(counts, self.blocks.rank))]
            shares.append(Share(len(own), len(block)))
            yield own or (block * STAND_INS)[:STAND_INS]

    def _part_of_the_rest(self, samples: int) -> list[int]:
        """The shares of an incomplete block."""
        counts = apportion(samples, self.planned)
        return without_ones(counts) if self._training.needs_two_samples else counts

    def _equal_parts(self, shares: list[Share]) -> Iterator[list[int]]:
        """The batches of the unmodified script, all ranks the same number of samples."""
        for batch in self.blocks.original:
            shares.append(Share(1, self.blocks.world_size))
            yield batch


def without_ones(counts: list[int]) -> list[int]:
    """No rank has a single sample: the largest share takes it, so that all samples are trained on.

    >>> without_ones([1, 1, 3])
    [0, 0, 5]
    >>> without_ones([0, 1, 1])
    [0, 2, 0]
    """
    changed = [0 if count == 1 else count for count in counts]
    changed[counts.index(max(counts))] += sum(counts) - sum(changed)
    return changed


def share_batches(batch_sampler: Any, world_size: int, training: Modules) -> ShareBatches | None:
    """For a batch sampler whose order over all ranks is known; None for any other."""
    blocks: DistributedBlocks | ShardedBlocks
    if type(batch_sampler).__name__ == "BatchSamplerShard":
        blocks = ShardedBlocks(batch_sampler)
    elif type(batch_sampler) is BatchSampler and _has_known_order(batch_sampler.sampler):
        blocks = DistributedBlocks(batch_sampler)
    else:
        return None
    return ShareBatches(blocks, training) if blocks.world_size == world_size else None


def _has_known_order(sampler: object) -> bool:
    if not isinstance(sampler, DistributedSampler):
        return False
    kind = type(sampler)
    is_lightnings = kind.__name__ == "DistributedSamplerWrapper" and "lightning" in kind.__module__
    return kind.__iter__ is DistributedSampler.__iter__ or is_lightnings
