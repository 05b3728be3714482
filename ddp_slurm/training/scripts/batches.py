"""A loader's global batches, divided by the plan's shares instead of equally.

The global batch of a step is what the ranks' batches of the unmodified script are together, in the
script's own order: a run with uneven shares takes the same samples in the same steps.
"""

import copy
from collections.abc import Iterator
from itertools import accumulate, islice
from typing import Any, NamedTuple, Protocol

from torch.utils.data import BatchSampler, DistributedSampler, Sampler, SequentialSampler

from ddp_slurm.balance import apportion, planned_shares

STAND_INS = 2
"""Samples that a rank without any of its own reads, with a weight of 0: its model runs as usual.
Two, since a BatchNorm1d has no variance of one."""


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


class Training(Protocol):
    """What an iteration asks at its beginning."""

    @property
    def needs_two_samples(self) -> bool:
        """Whether a model cannot train on one sample: BatchNorm has no variance of one."""

    def is_training(self, is_shuffled: bool) -> bool:
        """Whether it is of the training: others get the batches of the unmodified script."""


class Blocks(Protocol):
    """The global batches of a loader, the same on every rank."""

    world_size: int
    rank: int
    size: int
    """Samples of a whole block."""
    original: Any
    """The batch sampler of the unmodified script."""

    @property
    def is_shuffled(self) -> bool: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[list[int]]: ...


class DistributedBlocks:
    """Of a BatchSampler over a DistributedSampler."""

    def __init__(self, original: BatchSampler) -> None:
        sampler: Any = original.sampler
        self.original: Any = original
        self.sampler: DistributedSampler[Any] = sampler
        self.world_size = sampler.num_replicas
        self.rank = sampler.rank
        self.size = original.batch_size * self.world_size

    @property
    def is_shuffled(self) -> bool:
        return bool(self.sampler.shuffle)

    def _samples(self) -> int:
        """Without the copies that make the ranks' parts equal."""
        sampler: Any = self.sampler
        samples: int = sampler.total_size if sampler.drop_last else len(sampler.dataset)
        return samples

    def __len__(self) -> int:
        samples = self._samples()
        steps: int = samples // self.size if self.original.drop_last else -(-samples // self.size)
        return steps

    def __iter__(self) -> Iterator[list[int]]:
        # The order of all ranks is the one that the sampler gives a world of one rank.
        alone = copy.copy(self.sampler)
        alone.num_replicas, alone.rank = 1, 0
        alone.num_samples = alone.total_size = self._samples()
        order = iter(alone)
        while block := list(islice(order, self.size)):
            if len(block) == self.size or not self.original.drop_last:
                yield block


class ShardedBlocks:
    """Of Accelerate's BatchSamplerShard, which deals out the batches of another batch sampler."""

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
        batches, divisor = len(self.original.batch_sampler), self._batches_in_block
        return batches // divisor if self.original.drop_last else -(-batches // divisor)

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self.original.batch_sampler)
        while block := list(islice(batches, self._batches_in_block)):
            if len(block) == self._batches_in_block or not self.original.drop_last:
                yield [sample for batch in block for sample in batch]


class ShareBatches(Sampler[list[int]]):
    """The batch sampler of this rank: its share of each block.

    ``shares`` holds what the batches of the latest iteration are, as far as they were read.

    Args:
        blocks: of the loader.
        training: of the script.
    """

    def __init__(self, blocks: Blocks, training: Training) -> None:
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
        rank = self.blocks.rank
        for block in self.blocks:
            is_whole = len(block) == sum(self.planned)
            counts = self.planned if is_whole else self._part_of_the_rest(len(block))
            start = list(accumulate(counts, initial=0))[rank]
            own = block[start : start + counts[rank]]
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


def share_batches(batch_sampler: Any, world_size: int, training: Training) -> ShareBatches | None:
    """For a batch sampler whose order over all ranks is known; None for any other."""
    blocks: Blocks | None = None
    if type(batch_sampler).__name__ == "BatchSamplerShard":
        blocks = ShardedBlocks(batch_sampler)
    elif type(batch_sampler) is BatchSampler and _has_known_order(batch_sampler.sampler):
        blocks = DistributedBlocks(batch_sampler)
    if blocks is None or blocks.world_size != world_size:
        return None
    return ShareBatches(blocks, training)


def _has_known_order(sampler: object) -> bool:
    if not isinstance(sampler, DistributedSampler):
        return False
    kind = type(sampler)
    is_lightnings = kind.__name__ == "DistributedSamplerWrapper" and "lightning" in kind.__module__
    return kind.__iter__ is DistributedSampler.__iter__ or is_lightnings
