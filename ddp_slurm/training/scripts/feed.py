"""Which share of a step's samples the batch is that a DDP module is called with.

Loaders report what they deliver, DDP modules ask. The batch of a call is the one that was delivered
last, unless somebody reads ahead (Accelerate, a prefetcher on another stream, a list of the batches
of one optimizer step): then it is found by its number of samples.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ddp_slurm.training.scripts.batches import Share, ShareBatches
from ddp_slurm.training.scripts.errors import UnevenError

NO_LOADER = (
    "the batch of this step came from no DataLoader, so its share of the step's samples is not "
    "known. Read the data with DataLoader(..., sampler=DistributedSampler(dataset)), or weight the "
    "loss in the script with loss_weight (see docs/recipes.md)"
)


class Delivery:
    """The batches of one iteration over a loader that divides them by shares.

    Args:
        batches: of the loader, whose iteration has begun.
        skipped: how many of its first batches are never delivered.
    """

    def __init__(self, batches: ShareBatches, skipped: int = 0) -> None:
        self.batches = batches
        self.count = 0
        """Batches delivered so far."""
        self._iterator: Callable[[], object | None] | None = None
        self._shares = batches.shares
        self._skipped = skipped
        self._taken = 0
        self._first_possible = 0
        self._reads_ahead: bool | None = None

    def come_from(self, iterator: object) -> None:
        """Note what the script holds as long as it reads these batches."""
        self._iterator = weakref.ref(iterator)

    @property
    def is_over(self) -> bool:
        """Whether the script holds the iterator no more: it has read to the end, or left."""
        return self._iterator is not None and self._iterator() is None

    def deliver(self) -> Share:
        """Count one more batch. Returns its share."""
        self.count += 1
        return self._share(self.count - 1)

    def _share(self, index: int) -> Share:
        return self._shares[self._skipped + index]

    def take(self, batch: Any) -> Share:
        """The share of the batch that a module is called with.

        Raises UnevenError where it is not known.
        """
        if self._reads_ahead is None:
            self._reads_ahead = self.count > 1
        if not self._reads_ahead:
            return self._share(self.count - 1)
        share = self._find(batch)
        self._taken += 1
        return share

    def _find(self, batch: Any) -> Share:
        """Of the batches that may be meant the one in turn, if its size fits, else the first."""
        possible = range(self._first_possible, self.count)
        shares = {self._share(index) for index in possible}
        if len(shares) == 1:
            self._first_possible = self.count - 1
            return shares.pop()
        sizes = sizes_of(batch)
        in_turn = [self._taken] if self._taken < self.count else []
        for index in (*in_turn, *possible):
            if self._share(index).size in sizes:
                self._first_possible = index
                return self._share(index)
        raise UnevenError(
            "batches are read ahead, and none of those that are under way "
            f"({', '.join(str(share.size) for share in sorted(shares))} samples) is the one that "
            f"the model is called with (sizes {sorted(sizes)}). With drop_last=True in the "
            "DataLoader all batches have one size"
        )


class Feed:
    """What the loaders of this process deliver."""

    def __init__(self) -> None:
        self.latest: Delivery | str = NO_LOADER
        """Where the latest batch of the training came from; a text says why its share is not
        known."""
        self._evaluation: Delivery | None = None
        """Where a later batch came from that is not divided."""
        self._fresh: dict[int, Share] = {}
        """By loader: the share of its latest batch since the last call of a module."""

    def deliver(self, delivery: Delivery) -> Share:
        """Note that a loader hands out its next batch. Returns the batch's share."""
        share = delivery.deliver()
        if delivery.batches.is_divided:
            self.latest, self._evaluation = delivery, None
            self._fresh[id(delivery.batches)] = share
        else:
            self._evaluation = delivery
        return share

    def take(self, batch: Any, *, is_training: bool) -> Share:
        """The share of the batch that a DDP module is called with.

        Args:
            batch: all arguments of the call.
            is_training: whether the module is in training mode.

        Raises UnevenError where it is not known.
        """
        fractions = {share.own / share.total for share in self._fresh.values()}
        self._fresh.clear()
        source = self._source(is_training)
        if isinstance(source, str):
            raise UnevenError(source)
        if len(fractions) > 1:
            raise UnevenError(
                "two DataLoaders feed one step, and this rank's shares of their batches differ. "
                "Set drop_last=True in both, and give both a DistributedSampler"
            )
        return source.take(batch)

    @property
    def in_use(self) -> ShareBatches | None:
        """Of the latest batch of the training, if its loader divides by shares."""
        return None if isinstance(self.latest, str) else self.latest.batches

    def _source(self, is_training: bool) -> Delivery | str:
        """An evaluation between a batch of the training and its step is not where it came from."""
        if self._evaluation is None:
            return self.latest
        if isinstance(self.latest, str):
            is_in_use = self.latest is not NO_LOADER
        else:
            is_in_use = not self.latest.is_over
        return self.latest if is_training and is_in_use else self._evaluation


def sizes_of(batch: Any) -> set[int]:
    """Numbers that may be the number of samples: of the first two dimensions, and of lists."""
    sizes: set[int] = set()
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            sizes.update(leaf.shape[:2])
    for part in batch if isinstance(batch, tuple | list) else ():
        if isinstance(part, list | tuple):
            sizes.add(len(part))
    return sizes
