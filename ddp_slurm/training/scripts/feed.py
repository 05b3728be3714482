"""Finds the share of the batch that a DDP module is called with.

Loaders report what they deliver, DDP modules ask. All batches of an iteration have the same share,
except an incomplete last one. Once that was delivered, a call may be with it or, if the script
reads ahead (Accelerate, a prefetcher, a list of batches), with an earlier one: the values show
which, else the number of samples; where neither does, the script is refused.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ddp_slurm.training.scripts.batches import Share, ShareBatches
from ddp_slurm.training.scripts.errors import UnevenError

NO_LOADER = (
    "the batch of this step did not come from a DataLoader, so its share of the step's samples is "
    "not known. Read the data with DataLoader(..., sampler=DistributedSampler(dataset)), or weight "
    "the loss in the script with loss_weight (see docs/recipes.md)"
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
        self._latest: Any = None
        self._reader = 0
        """The thread that reads the loader."""
        self._iterator: Callable[[], object | None] | None = None
        self._shares = batches.shares
        self._skipped = skipped
        self._known: set[Share] = set()
        self._taken = 0
        self._ahead: int | None = None
        """Batches that the script had read before it came to the first."""
        self._is_in_turn = True
        """Each batch is used in one call, in the order in which they were delivered."""

    def come_from(self, iterator: object) -> None:
        """Note the object that the script holds while it reads these batches."""
        self._iterator = weakref.ref(iterator)

    @property
    def is_over(self) -> bool:
        """Whether the script no longer holds the iterator: it has read to the end, or left."""
        return self._iterator is not None and self._iterator() is None

    def deliver(self, batch: Any) -> Share:
        """Count one more batch. Returns its share."""
        self.count += 1
        self._latest = batch
        self._reader = threading.get_ident()
        share = self._share(self.count - 1)
        self._known.add(share)
        return share

    def _share(self, index: int) -> Share:
        return self._shares[self._skipped + index]

    def take(self, batch: Any) -> Share:
        """The share of the batch that a module is called with.

        Raises UnevenError where it is not known.
        """
        if self._ahead is None:
            is_first = self.count == 1 or _is_same(batch, self._latest)
            self._ahead = 0 if is_first else self.count - 1
        turn, self._taken = self._taken, self._taken + 1
        all_batches = len(self.batches) - self._skipped
        expected = min(all_batches, turn + 1 + self._ahead)
        self._is_in_turn &= turn < self.count == expected
        latest = self._share(self.count - 1)
        # Only after the last batch, if it is incomplete, there are two candidates.
        if len(self._known) == 1 or _is_same(batch, self._latest):
            return latest
        fitting = self._fitting(batch)
        is_read_here = self._reader == threading.get_ident() and not self.is_over
        if is_read_here and not self._ahead:
            return latest
        if self._ahead and self._is_in_turn:
            if self._share(turn) in fitting:
                return self._share(turn)
        elif len(fitting) == 1:
            return fitting.pop()
        sizes = ", ".join(str(share.size) for share in sorted(self._known))
        raise UnevenError(
            "the script has read the last, incomplete batch, and it is not known whether the model "
            f"is called with it or with an earlier one: batches of {sizes} samples, a call with "
            f"sizes {sorted(sizes_of(batch))}. With drop_last=True in the DataLoader all batches "
            "have one size"
        )

    def _fitting(self, batch: Any) -> set[Share]:
        """The shares whose number of samples a call has: as its first dimension, else another."""
        for dimensions in (1, 2):
            sizes = sizes_of(batch, dimensions)
            if fitting := {share for share in self._known if share.size in sizes}:
                return fitting
        return set()


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

    def deliver(self, delivery: Delivery, batch: Any) -> Share:
        """Note that a loader hands out its next batch. Returns the batch's share."""
        share = delivery.deliver(batch)
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
        """Of a call's batch; an evaluation between a training batch and its step does not count."""
        if self._evaluation is None:
            return self.latest
        if isinstance(self.latest, str):
            is_in_use = self.latest is not NO_LOADER
        else:
            is_in_use = not self.latest.is_over
        return self.latest if is_training and is_in_use else self._evaluation


def sizes_of(batch: Any, dimensions: int = 2) -> set[int]:
    """Numbers that may be the number of samples: of the first dimensions, and of lists."""
    sizes: set[int] = set()
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            sizes.update(leaf.shape[:dimensions])
    for part in batch if isinstance(batch, tuple | list) else ():
        if isinstance(part, list | tuple):
            sizes.add(len(part))
    return sizes


def _is_same(call: Any, batch: Any) -> bool:
    """Whether the largest tensor of a call is one of the batch's, perhaps on another device."""
    tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor)]
    if not tensors:
        return False
    largest = max(tensors, key=Tensor.numel)
    alike = [
        leaf
        for leaf in tree_leaves(batch)
        if isinstance(leaf, Tensor) and leaf.shape == largest.shape and leaf.dtype == largest.dtype
    ]
    return any(torch.equal(leaf, largest.to(leaf.device)) for leaf in alike)
