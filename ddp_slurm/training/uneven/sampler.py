"""Which samples each rank takes in each step: every sample once an epoch, in an order that knows no ranks."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import accumulate, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler, default_collate, get_worker_info

from ddp_slurm.balance import BalanceError, apportion
from ddp_slurm.training.uneven.gradients import loss_weight


def seed_of(*parts: object) -> int:
    """One 63-bit seed for a tuple such as (seed, epoch, "shuffle"); near tuples give unrelated seeds."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class BalancedSampler(Sampler[list[int]]):
    """The ``batch_sampler`` of a DataLoader on uneven ranks.

    The epoch's order depends on ``seed`` and epoch only. Step k takes the order's samples k*B to (k+1)*B, with B the
    sum of ``shares``; each rank takes its share of them, one after another in rank order. The last, incomplete global
    batch is shared out in proportion, so every rank makes the same number of steps; in it, as with a share of 0, a
    rank may get an empty list: give the DataLoader ``collate_fn=sampler.collate`` then, and see ``no_sample_loss``.

    Args:
        data: a data set, or its length.
        shares: samples of a global batch per rank, for all ranks.
        rank: default that of the default process group.
        shuffle: another order each epoch (call ``set_epoch``); otherwise the data set's own.
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
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch, self.first_sample = 0, 0

    def set_epoch(self, epoch: int, first_sample: int = 0) -> None:
        """Choose the epoch's order, and where in it to begin: ``first_sample`` samples are done (a resumed run)."""
        if not 0 <= first_sample <= self.length:
            raise BalanceError(
                f"sample {first_sample} is not within an epoch of {self.length} samples"
            )
        self.epoch, self.first_sample = epoch, first_sample

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
        """Where this rank's samples of a step stand in ``order()``: start and stop."""
        counts = self.rank_samples(step)
        start = self.first_sample + step * self.global_batch + sum(counts[: self.rank])
        return start, start + counts[self.rank]

    def loss_weight(self, step: int) -> float:
        """The factor for this rank's mean loss in a step, see ``gradients``."""
        return loss_weight(
            self.rank_samples(step)[self.rank], self.global_samples(step), len(self.shares)
        )

    def collate(self, samples: list[Any]) -> Any:
        """The DataLoader's usual batch of samples; for no samples, tensors of length 0 in the form of a batch."""
        if not samples and isinstance(self._data, int):
            raise BalanceError(
                "a rank has no sample in this step: give BalancedSampler the data set, not its length"
            )
        return default_collate(samples) if samples else _emptied(default_collate([self._data[0]]))

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        for step in range(len(self)):
            start, stop = self.span(step)
            yield order[start:stop].tolist()


def _emptied(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: _emptied(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        if all(
            isinstance(value, str | bytes) for value in batch
        ):  # a text field: the list is the batch
            return []
        return [_emptied(value) for value in batch]
    return batch[:0]


class BalancedIterable(IterableDataset[tuple[Any, int, int]]):
    """Uneven shares of a stream that every rank reads in the same order.

    Yields ``(batch, local_samples, global_samples)`` a step, ``batch`` None where the rank got no sample. Use it with
    ``DataLoader(balanced, batch_size=None, num_workers=...)``; the workers take turns, and the order stays.

    Args:
        stream: anything that can be iterated anew each epoch, and gives all ranks the same samples.
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
        self.stream, self.collate = stream, collate

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        shares, rank, size = self._sampler.shares, self._sampler.rank, self._sampler.global_batch
        worker = get_worker_info()
        turn, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        source = iter(self.stream)
        step = 0
        while block := list(islice(source, size)):
            if step % workers == turn:
                counts = shares if len(block) == size else apportion(len(block), shares)
                start = list(accumulate(counts, initial=0))[rank]
                own = block[start : start + counts[rank]]
                yield (self.collate(own) if own else None), len(own), len(block)
            step += 1
