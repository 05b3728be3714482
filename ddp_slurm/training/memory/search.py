"""The largest micro-batch that a card holds, found by trying: the whole share, then halves of it.

Each trial is forward, loss and backward on the model itself, beside a block of memory as large as
what comes later: a copy of the model would take the memory that is looked for.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training.memory.later import bytes_of_later
from ddp_slurm.training.memory.out_of_memory import free_memory, is_out_of_memory
from ddp_slurm.training.memory.preserve import preserved
from ddp_slurm.training.uneven.calibrate import TrainingStep, made_measurable, wait_for_device

READ = 8
"""Samples that are read; a trial repeats them."""
SEARCH_SECONDS = 8.0
"""After that the search takes what it has found."""
CLOSE = 1 / 16
"""The search ends when the smallest size that failed is larger than the found one by this part."""
MARGIN = 0.1
"""The part of the found size that is not used: the allocator fragments over many steps, batches of
other shapes (the last one, an evaluation) get workspaces of their own, and a neighbour on the card
may grow."""


class MemoryTooSmall(DdpSlurmError):
    """Not even the smallest batch fits a card."""


def largest_micro_batch(step: TrainingStep, most: int) -> int:
    """The most samples, up to ``most``, that this rank's card runs at once.

    No rank waits for another. Parameters, gradients, optimizer state, buffers and random state are
    afterwards as before. Takes up to about ten seconds; what was found until then counts.

    Args:
        step: on this rank. Its optimizer says how much state comes later.
        most: samples of this rank's share of the batch: no more are ever needed.

    Raises MemoryTooSmall if not even one sample fits (two, where ``most`` is above one: BatchNorm
    has no variance of one sample).
    """
    least = min(2, most)
    with preserved(step.model, step.device), _without_search_for_kernels():
        made_measurable(step.model)
        trial = _Trial(step, most)
        found, failed = trial.halved(most, least)
        found = trial.between(found, failed)
        del trial
    free_memory(step.device)
    return found if failed is None else max(least, int(found * (1 - MARGIN)))


class _Trial:
    def __init__(self, step: TrainingStep, most: int) -> None:
        self._step = step
        self._ends = time.monotonic() + SEARCH_SECONDS
        self._samples = min(READ, most)
        # Read once: a data set's loader starts its workers for each batch.
        self._inputs, self._targets = step.get_batch(self._samples)
        whole_share = most * (_sample_bytes(self._inputs) + _sample_bytes(self._targets))
        self._later = whole_share + bytes_of_later(step.model, step.optimizer)

    def halved(self, most: int, least: int) -> tuple[int, int | None]:
        """The first size that fits, of ``most`` and its halves, and the one before it.

        Downwards, since most shares fit at once: that costs one trial, and one that does not fit
        costs next to nothing.
        """
        size, failed = most, None
        while not self.fits(size):
            if size == least:
                raise MemoryTooSmall(
                    f"{least} samples at once do not fit the memory of {self._step.device} beside "
                    f"{self._later / 1e9:.3g} GB for optimizer state, gradients and the batch; use "
                    "a smaller model, an optimizer with less state, or checkpoint='auto'"
                )
            size, failed = max(least, size // 2), size
        return size, failed

    def between(self, found: int, failed: int | None) -> int:
        """The largest size that fitted, close to the smallest that did not."""
        while failed is not None and failed - found > max(1, found * CLOSE):
            if time.monotonic() > self._ends:
                break
            size = (found + failed) // 2
            if self.fits(size):
                found = size
            else:
                failed = size
        return found

    def fits(self, size: int) -> bool:
        try:
            self._run(size)
            return True
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        free_memory(self._step.device)
        return False

    def _run(self, size: int) -> None:
        """Gradients are kept from one trial to the next, as from one micro-batch to the next."""
        step = self._step
        later = torch.empty(self._later, dtype=torch.uint8, device=step.device)
        with step.autocast():
            outputs = step.model(self._repeated(self._inputs, size))
            loss = step.loss_function(outputs, self._repeated(self._targets, size))
        loss.backward()  # type: ignore[no-untyped-call]
        wait_for_device(step.device)
        del later

    def _repeated(self, batch: Any, size: int) -> Any:
        return batch[torch.arange(size, device=batch.device) % self._samples]


@contextlib.contextmanager
def _without_search_for_kernels() -> Iterator[None]:
    """cuDNN's ``benchmark`` mode would take seconds for each size."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _sample_bytes(batch: Any) -> int:
    return batch[:1].numel() * batch.element_size() if isinstance(batch, Tensor) else 0
