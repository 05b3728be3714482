"""Training data as a Source: batches on the rank's device, by position in the epoch's order."""

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.parent import die_with_parent
from ddp_slurm.training.uneven.sampler import emptied, seed_of

SAVING_SECONDS = 60
"""How long a loader worker outlives SIGTERM; Slurm itself ends it after KillWait."""

Span = tuple[int, int]
"""Start and stop of a batch in the epoch's order."""
Batch = tuple[Tensor, Tensor]
"""Inputs and targets, both of shape (samples, ...)."""


class DataError(DdpSlurmError):
    """Training data that is missing or has an unexpected form."""


class Source(Protocol):
    """Where the Trainer's batches come from. Any object with these members is one."""

    device: torch.device

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def batches(self, order: Tensor, spans: Sequence[Span], epoch: int) -> Iterator[Batch]:
        """One batch on ``device`` for each span; tensors of length 0 for an empty span.

        Args:
            order: sample numbers of the whole epoch, int64 (samples,), on the CPU.
            spans: parts of ``order``: this rank's samples of each step.
            epoch: from 0; random augmentation should depend on it and on the sample only.
        """
        ...


class ResidentTensors:
    """Inputs and targets that fit on the device, both of shape (samples, ...)."""

    def __init__(self, inputs: Tensor, targets: Tensor, device: torch.device) -> None:
        if len(inputs) != len(targets):
            raise DataError(f"{len(inputs)} inputs for {len(targets)} targets")
        self.inputs = inputs.to(device)
        self.targets = targets.to(device)
        self.device = device

    def __len__(self) -> int:
        return len(self.targets)

    def batches(self, order: Tensor, spans: Sequence[Span], epoch: int) -> Iterator[Batch]:
        order = order.to(self.device)
        for start, stop in spans:
            chosen = order[start:stop]
            yield self.inputs[chosen], self.targets[chosen]


class DatasetSource:
    """A map-style Dataset whose batches are pairs (inputs, targets) of tensors.

    Args:
        dataset: with ``__len__`` and ``__getitem__``.
        workers: processes of the DataLoader that reads it, of a rank with an equal share; a larger
            share gets more, a smaller one fewer. 0 reads in the training process.
        collate: makes a batch of a list of samples.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        device: torch.device,
        *,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self.dataset = dataset
        self.device = device
        self.workers = workers
        self.collate = collate
        self.relative_share = 1.0
        """This rank's share of the batch, in equal shares. The Trainer sets it."""

    @property
    def own_workers(self) -> int:
        """The workers of this rank: as many as its share of the batch needs."""
        return max(1, round(self.workers * self.relative_share)) if self.workers else 0

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batches(self, order: Tensor, spans: Sequence[Span], epoch: int) -> Iterator[Batch]:
        filled = [order[start:stop].tolist() for start, stop in spans if stop > start]
        # With the global generator, each start of a loader, also after a resume, would advance it.
        seed = seed_of(torch.initial_seed(), epoch, *spans[:1], "loader")
        loader = DataLoader(
            self.dataset,
            batch_sampler=filled,
            num_workers=self.own_workers,
            collate_fn=self.collate,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator().manual_seed(seed),
            worker_init_fn=outlive_sigterm,
        )
        with _sigterm_waits():
            batches = iter(loader)
        for start, stop in spans:
            batch = next(batches) if stop > start else emptied(self.collate([self.dataset[0]]))
            inputs, targets = _checked_pair(batch)
            yield (
                inputs.to(self.device, non_blocking=True),
                targets.to(self.device, non_blocking=True),
            )


def outlive_sigterm(worker: int) -> None:
    """Called in each loader worker: it ends with its rank, not before.

    Slurm sends the SIGTERM of a preemption to all processes of a job, and the ranks then still take
    steps until all of them have agreed to save.
    """
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(SAVING_SECONDS))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@contextlib.contextmanager
def _sigterm_waits() -> Iterator[None]:
    """Processes that are started meanwhile get a SIGTERM once they are ready for it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _checked_pair(batch: Any) -> Batch:
    is_pair = isinstance(batch, list | tuple) and len(batch) == 2
    if not is_pair or not all(isinstance(part, Tensor) for part in batch):
        raise DataError(
            f"a batch of the data set is a {type(batch).__name__}; expected a pair of tensors "
            "(inputs, targets). Give DatasetSource or the DataLoader a collate function for it"
        )
    inputs, targets = batch
    return inputs, targets


def as_source(data: Any, device: torch.device) -> Source:
    """``data`` itself if it is a Source, else a DatasetSource for a Dataset or a DataLoader.

    Of a DataLoader the data set, ``collate_fn`` and ``num_workers`` are used. Batch size and order
    are the Trainer's: they decide what each rank gets.

    Raises DataError for an IterableDataset and for a DataLoader with its own sampler.
    """
    if hasattr(data, "batches"):
        source: Source = data
        return source
    if not isinstance(data, DataLoader):
        _check_map_style(data)
        return DatasetSource(data, device)
    _check_map_style(data.dataset)
    own = _own_sampler(data)
    if own is not None:
        raise DataError(
            f"a DataLoader with its own {own}: the Trainer decides which rank takes which sample. "
            "Pass the data set, or a DataLoader without it"
        )
    collate = data.collate_fn if data.batch_size is not None else default_collate
    return DatasetSource(data.dataset, device, workers=data.num_workers, collate=collate)


def _check_map_style(data: Any) -> None:
    is_map_style = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if isinstance(data, IterableDataset) or not is_map_style:
        raise DataError(
            f"a {type(data).__name__} can only be iterated; the Trainer needs __len__ and "
            "__getitem__. For a stream write your own loop with BalancedIterable"
        )


def _own_sampler(loader: DataLoader[Any]) -> str | None:
    """The type name of a sampler that the user chose; None for what ``shuffle`` makes."""
    batch_sampler, sampler = loader.batch_sampler, loader.sampler
    if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        return type(batch_sampler).__name__
    if type(sampler) is RandomSampler:
        covers_all = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        return None if covers_all else "RandomSampler(replacement=..., num_samples=...)"
    return None if type(sampler) is SequentialSampler else type(sampler).__name__
