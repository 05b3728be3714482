"""Which samples each rank takes in each step: every sample once an epoch, in an order that does
not depend on the ranks."""

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Sized
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler, default_collate, get_worker_info

from ddp_slurm.balance import BalanceError, apportion
from ddp_slurm.training.uneven.gradients import loss_weight

NO_EPOCH = -1
"""The epoch of a stream whose ``set_epoch`` was not called."""


def seed_of(*parts: object) -> int:
    """One 63-bit seed for a tuple such as (seed, epoch, "shuffle").

    Tuples that differ little give unrelated seeds. The same on every machine.
    """
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class BalancedSampler(Sampler[list[int]]):
    """The ``batch_sampler`` of a DataLoader on uneven ranks.

    The epoch's order depends on ``seed`` and epoch only. Step k takes the order's samples k*B to
    (k+1)*B, with B the sum of ``shares``; each rank takes its share of them, one after another in
    rank order. The last, incomplete global batch is divided in proportion, so every rank makes the
    same number of steps. In it, as with a share of 0, a rank may get an empty list: give the
    DataLoader ``collate_fn=sampler.collate`` then, and see ``no_sample_loss``.

    Args:
        data: a data set, or its length.
        shares: samples of a global batch per rank, for all ranks.
        rank: default that of the default process group.
        shuffle: another order each epoch (call ``set_epoch``); otherwise the data set's own.
        seed: of the order.
        drop_last: leave the incomplete global batch out.
    """

    def __init__(
        self,
        data: Sized | int,
        shares: Sequence[int],
        rank: int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self._data: Any = data
        self.length = data if isinstance(data, int) else len(data)
        self.shares = list(shares)
        self.rank = dist.get_rank() if rank is None else rank
        self.global_batch = sum(self.shares)
        if not 0 <= self.rank < len(self.shares):
            raise BalanceError(f"rank {self.rank} has no share in {self.shares}")
        if self.global_batch < 1 or min(self.shares) < 0:
            raise BalanceError(f"shares {self.shares} must be >= 0 and not all 0")
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.first_sample = 0

    def set_epoch(self, epoch: int, first_sample: int = 0) -> None:
        """Choose the epoch's order, and where in it to begin.

        A resumed run gives the samples of the epoch that are done as ``first_sample``.
        """
        if not 0 <= first_sample <= self.length:
            raise BalanceError(
                f"sample {first_sample} is not within an epoch of {self.length} samples"
            )
        self.epoch = epoch
        self.first_sample = first_sample

    def set_shares(self, shares: Sequence[int]) -> None:
        """Divide the steps that are still to come in another way; the global batch stays.

        Steps keep their numbers and their samples. Not while a DataLoader is reading ahead.
        """
        shares = list(shares)
        if len(shares) != len(self.shares) or sum(shares) != self.global_batch or min(shares) < 0:
            raise BalanceError(
                f"shares {shares}: expected {len(self.shares)} shares with the sum "
                f"{self.global_batch}"
            )
        self.shares = shares

    def __len__(self) -> int:
        """Steps left in this epoch, the same on every rank."""
        left = self.length - self.first_sample
        return left // self.global_batch if self.drop_last else -(-left // self.global_batch)

    def order(self) -> Tensor:
        """The epoch's whole order, int64 of shape (length,), the same on every rank."""
        if not self.shuffle:
            return torch.arange(self.length)
        generator = torch.Generator().manual_seed(seed_of(self.seed, self.epoch, "shuffle"))
        return torch.randperm(self.length, generator=generator)

    def global_samples(self, step: int) -> int:
        """Samples of all ranks in a step, counted from ``first_sample``."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        return min(self.global_batch, self.length - self.first_sample - step * self.global_batch)

    def rank_samples(self, step: int) -> list[int]:
        """Samples of each rank in a step."""
        total = self.global_samples(step)
        return self.shares if total == self.global_batch else apportion(total, self.shares)

    def span(self, step: int) -> tuple[int, int]:
        """Start and stop of this rank's samples of a step in ``order()``."""
        first = self.first_sample + step * self.global_batch
        return rank_span(self.rank_samples(step), self.rank, first)

    def loss_weight(self, step: int) -> float:
        """The factor for this rank's mean loss in a step, see ``gradients``."""
        own = self.rank_samples(step)[self.rank]
        return loss_weight(own, self.global_samples(step), len(self.shares))

    def collate(self, samples: list[Any]) -> Any:
        """The DataLoader's usual batch; for no samples, the same structure with length 0."""
        if samples:
            return default_collate(samples)
        if isinstance(self._data, int):
            raise BalanceError(
                "a rank has no sample in this step: "
                "give BalancedSampler the data set, not its length"
            )
        return emptied(default_collate([self._data[0]]))

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        for step in range(len(self)):
            start, stop = self.span(step)
            yield order[start:stop].tolist()


def rank_span(counts: Sequence[int], rank: int, first: int = 0) -> tuple[int, int]:
    """Start and stop of a rank's samples, of which each rank has so many, in rank order."""
    start = first + sum(counts[:rank])
    return start, start + counts[rank]


def emptied(batch: Any) -> Any:
    """``batch`` with no samples: the same structure, every tensor of shape (0, ...)."""
    if isinstance(batch, Mapping):
        return _emptied_mapping(batch)
    if isinstance(batch, list | tuple):
        is_text_field = all(isinstance(value, str | bytes) for value in batch)
        if is_text_field:  # the list has one text per sample
            return batch[:0]
        values = [emptied(value) for value in batch]
        is_named = hasattr(batch, "_fields")
        return type(batch)(*values) if is_named else type(batch)(values)
    try:
        return batch[:0]
    except TypeError as error:
        raise BalanceError(
            f"a rank has no sample in this step, and a batch of type {type(batch).__name__} cannot "
            "be emptied; expected tensors in lists, tuples or dicts. Leave the incomplete batch "
            "out with drop_last=True and give every rank a share above 0"
        ) from error


def _emptied_mapping(batch: Mapping[Any, Any]) -> Any:
    values = {key: emptied(value) for key, value in batch.items()}
    make: Any = type(batch)
    try:  # in the ways in which default_collate makes a batch of the samples' own type
        if not isinstance(batch, MutableMapping):
            return make(values)
        empty = copy.copy(batch)
        empty.update(values)
    except TypeError:
        return values
    return empty


class BalancedIterable(IterableDataset[tuple[Any, int, int]]):
    """Uneven shares of a stream that every rank reads in the same order.

    Yields ``(batch, local_samples, global_samples)`` a step, ``batch`` None if the rank got no
    sample. Use it with ``DataLoader(balanced, batch_size=None, num_workers=...)``: each worker
    reads the whole stream, and the workers take turns at collating, in order.

    Args:
        stream: can be iterated again for each epoch, and yields the same samples on all ranks. One
            with ``set_epoch`` gets the epoch before each iteration. ``get_worker_info`` returns
            None to it: a stream that gives each worker a part would lose the others' parts.
        shares: samples of a global batch per rank, for all ranks.
        rank: default that of the default process group.
        collate: makes a batch of a list of samples.
    """

    def __init__(
        self,
        stream: Iterable[Any],
        shares: Sequence[int],
        rank: int | None = None,
        *,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self._sampler = BalancedSampler(0, shares, rank)
        self.stream = stream
        self.collate = collate
        # In shared memory: workers that live on over epochs have a copy of everything else.
        self._epoch = torch.full((1,), NO_EPOCH)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._iterations = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration, by the stream's own ``set_epoch``.

        Also reaches loader workers that are already running (``persistent_workers=True``).
        """
        if not hasattr(self.stream, "set_epoch"):
            raise BalanceError(
                f"the stream, a {type(self.stream).__name__}, has no set_epoch: its order cannot "
                "be chosen"
            )
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        shares, rank = self._sampler.shares, self._sampler.rank
        worker = get_worker_info()
        turn, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        self._begin_epoch(in_worker=worker is not None)
        with _hidden_worker():
            source = iter(self.stream)
            step = 0
            while block := list(islice(source, sum(shares))):
                if step % workers == turn:
                    own = block[slice(*rank_span(apportion(len(block), shares), rank))]
                    yield (self.collate(own) if own else None), len(own), len(block)
                step += 1

    def _begin_epoch(self, *, in_worker: bool) -> None:
        stream: Any = self.stream
        epoch = int(self._epoch)
        self._iterations += 1
        if epoch != NO_EPOCH:
            stream.set_epoch(epoch)
        elif in_worker and self._iterations > 1 and hasattr(stream, "set_epoch"):
            raise BalanceError(
                "a second epoch in persistent loader workers, without set_epoch on the "
                "BalancedIterable: the stream would repeat the first epoch's order, since the "
                "workers have their own copy of it. Call balanced.set_epoch(epoch) in each epoch"
            )


@contextlib.contextmanager
def _hidden_worker() -> Iterator[None]:
    """``get_worker_info`` returns None within, also in threads that the stream has started."""
    from torch.utils.data._utils import worker

    info = worker._worker_info
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = info
