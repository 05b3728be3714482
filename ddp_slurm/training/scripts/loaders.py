"""The seam at torch's DataLoader: batches by share, and a report of each that is delivered."""

import functools
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ddp_slurm.training.scripts.batches import Share, ShareBatches, share_batches
from ddp_slurm.training.scripts.errors import UnevenError, users_line
from ddp_slurm.training.scripts.feed import Delivery
from ddp_slurm.training.scripts.modules import Modules

IGNORED_LABEL = -100
"""By convention of torch's cross_entropy."""


class Batches(Iterator[Any]):
    """A loader's iterator that reports each batch."""

    def __init__(self, batches: Iterator[Any], report: Callable[[Any], Any]) -> None:
        self._batches = batches
        self._report = report

    def __next__(self) -> Any:
        return self._report(next(self._batches))

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def install(modules: Modules) -> None:
    """Change DataLoader in this process; ``modules`` get what is delivered."""
    plain_init, plain_iter = DataLoader.__init__, DataLoader.__iter__

    @functools.wraps(plain_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        # past DataLoader's own __setattr__, which protects a loader that is made
        object.__setattr__(self, "_ddp_slurm_line", users_line())
        balanced = share_batches(self.batch_sampler, modules.world_size, modules)
        if balanced is not None:
            refuse_without_order(self)
            object.__setattr__(self, "batch_sampler", balanced)

    @functools.wraps(plain_iter)
    def iterate(self: Any) -> Any:
        return _reported(self, plain_iter(self), modules)

    DataLoader.__init__ = init  # type: ignore[method-assign]
    DataLoader.__iter__ = iterate  # type: ignore[method-assign]


def enlarge(factor: int) -> None:
    """Multiply the batch size of every DataLoader of this process."""
    plain_init = DataLoader.__init__
    done: WeakSet[BatchSampler] = WeakSet()

    @functools.wraps(plain_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        batches = self.batch_sampler
        # A framework makes a second loader with the batch sampler of the script's loader.
        if type(batches) is BatchSampler and batches not in done:
            batches.batch_size *= factor
            done.add(batches)

    DataLoader.__init__ = init  # type: ignore[method-assign]


def refuse_without_order(loader: Any) -> None:
    """Raises UnevenError for a loader whose workers' batches come in any order (torch >= 2.6)."""
    if not getattr(loader, "in_order", True):
        raise UnevenError(
            f"the DataLoader of {loader._ddp_slurm_line} has in_order=False, so the share of a "
            "batch is not known. Leave in_order out"
        )


def _reported(loader: Any, batches: Any, modules: Modules) -> Any:
    """The batches of the iteration that has just begun, each reported if it is of interest."""
    batch_sampler, skipped = loader.batch_sampler, 0
    if type(batch_sampler).__name__ == "SkipBatchSampler":  # Accelerate's
        batch_sampler, skipped = batch_sampler.batch_sampler, batch_sampler.skip_batches
    if isinstance(batch_sampler, ShareBatches):
        delivery = Delivery(batch_sampler, skipped)
        reported = Batches(
            batches, lambda batch: _delivered(batch, modules.deliver(delivery, batch))
        )
        delivery.come_from(reported)
        return reported
    if modules.is_training(type(loader.sampler) is RandomSampler):
        why = reason(loader)
        return Batches(batches, lambda batch: modules.delivered_unknown(batch, why))
    return batches


def _delivered(batch: Any, share: Share) -> Any:
    """Stand-ins must not count as tokens: Hugging Face's Trainer counts the labels of a step."""
    if share.own or not isinstance(batch, MutableMapping):
        return batch
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and labels.ndim > 1 and not labels.is_floating_point():
        batch["labels"] = torch.full_like(labels, IGNORED_LABEL)
    return batch


def reason(loader: Any) -> str:
    """Why the shares of a loader are not known, and what to change."""
    where = f"the DataLoader of {getattr(loader, '_ddp_slurm_line', 'the script')}"
    if isinstance(loader.dataset, IterableDataset):
        return (
            f"{where} reads {type(loader.dataset).__name__}, an IterableDataset, which each rank "
            "divides by itself. Divide it with BalancedIterable and weight the loss with "
            "loss_weight (see docs/training.md)"
        )
    if loader.batch_sampler is None:
        return (
            f"{where} has batch_size=None, so the samples of a step are not known. Give it a "
            "batch_size, and a data set of single samples"
        )
    kind, sampler = "sampler", loader.sampler
    if type(loader.batch_sampler) is not BatchSampler:
        kind, sampler = "batch sampler", loader.batch_sampler
    if type(sampler) is DistributedSampler:
        return (
            f"{where} has a DistributedSampler for {sampler.num_replicas} ranks, which are "
            "not all. Leave out its num_replicas and rank"
        )
    if type(sampler) in (RandomSampler, SequentialSampler):
        return (
            f"{where} has no DistributedSampler: every rank reads all of the data. Add "
            "sampler=DistributedSampler(dataset)"
        )
    return (
        f"{where} has a {kind} of its own, {type(sampler).__name__}, which decides by itself what "
        "each rank gets. Use a DistributedSampler, or a BalancedSampler and loss_weight (see "
        "docs/recipes.md)"
    )
