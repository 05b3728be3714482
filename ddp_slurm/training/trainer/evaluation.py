"""Evaluation that counts every sample once: no padding, no mean of means."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_slurm.balance import apportion
from ddp_slurm.training.data import DataError, Source, Span
from ddp_slurm.training.trainer.precision import Precision
from ddp_slurm.training.uneven.sampler import rank_span
from ddp_slurm.training.uneven.weighted_loss import WeightedLoss


@torch.no_grad()
def evaluate(
    model: nn.Module,
    source: Source,
    loss: WeightedLoss,
    *,
    rank: int,
    shares: list[int],
    precision: Precision,
    batch_size: int = 512,
) -> dict[str, float]:
    """Loss, accuracy (if the targets are class numbers) and sample count over all of ``source``.

    Each rank takes one part of it, in proportion to ``shares``. ``model`` is the module without
    DDP: no rank waits for another until the sums are reduced. All ranks call it and get the same
    values.

    Raises DataError, on every rank, if ``source`` has no samples, or none with a weight.
    """
    if len(source) == 0:
        raise DataError("the evaluation data have no samples")
    spans = _own_spans(len(source), shares, rank, batch_size)
    with _evaluation_mode(model):
        sums = _sums_over(model, source, spans, loss, precision)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)
    loss_sum, weight, samples, correct, classified = sums.tolist()
    if weight == 0:
        raise DataError("the targets of the evaluation data are all ignored, or of weight 0")
    result = {"loss": loss_sum / weight, "samples": samples}
    if classified == samples:
        result["accuracy"] = correct / samples
    return result


def _sums_over(
    model: nn.Module, source: Source, spans: list[Span], loss: WeightedLoss, precision: Precision
) -> Tensor:
    """Of this rank: loss, its weight, samples, correct ones, those with a class; float64 (5,)."""
    sums = torch.zeros(5, dtype=torch.float64, device=source.device)
    loss_sum, weight, samples, correct, classified = sums.unbind()  # views: += changes sums
    for inputs, targets in source.batches(torch.arange(len(source)), spans, epoch=0):
        with precision.autocast():
            outputs = model(inputs)
            if not loss.is_empty(targets):
                value, factor = loss.value_and_factor(outputs, targets)
                loss_sum += value.double() * factor
                weight += loss.weight(targets)
        samples += len(targets)
        if _are_classes(outputs, targets):
            correct += (outputs.argmax(dim=1) == targets).sum()
            classified += len(targets)
    return sums


def _own_spans(samples: int, shares: list[int], rank: int, batch_size: int) -> list[Span]:
    first, last = rank_span(apportion(samples, shares), rank)
    return [(start, min(start + batch_size, last)) for start in range(first, last, batch_size)]


@contextlib.contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """``model.eval()``, and afterwards every layer in the mode that it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _are_classes(outputs: Tensor, targets: Tensor) -> bool:
    is_matrix = isinstance(outputs, Tensor) and outputs.ndim == 2
    return is_matrix and targets.ndim == 1 and not targets.is_floating_point()
