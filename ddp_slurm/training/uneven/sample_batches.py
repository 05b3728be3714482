"""Batches of any size, to measure a training step with."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from ddp_slurm.balance import BalanceError

TrainingData: TypeAlias = Dataset[Any] | Sequence[Any]
"""A map-style data set of (input, target), or one batch (inputs, targets) of tensors."""

ReadBatch: TypeAlias = Callable[[int], tuple[Tensor, Tensor]]
"""Number of samples to (inputs, targets); more samples than there are repeat the first ones."""


def batch_reader(data: TrainingData, device: torch.device) -> ReadBatch:
    """Reads batches of ``data`` to ``device``. Raises BalanceError for data without a length, or
    without a sample."""
    batch: Any = data
    is_batch = isinstance(batch, tuple) and all(isinstance(part, Tensor) for part in batch)
    samples = len(batch[1]) if is_batch else _length(data)
    if samples == 0:
        raise BalanceError("the training data have no sample to measure with")

    def read(count: int) -> tuple[Tensor, Tensor]:
        numbers = [index % samples for index in range(count)]
        if is_batch:
            inputs, targets = (part[numbers] for part in batch)
        else:
            inputs, targets = default_collate([data[number] for number in numbers])
        return inputs.to(device), targets.to(device)

    return read


def _length(data: Any) -> int:
    try:
        return len(data)
    except TypeError:
        raise BalanceError(
            f"{type(data).__name__} has no length; to measure with a stream, give one batch "
            "(inputs, targets)"
        ) from None
