"""Evaluation that counts every sample once: no padding, no mean of means."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_slurm.balance import apportion
from ddp_slurm.training.data import DataError, Source
from ddp_slurm.training.trainer.precision import Precision

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) to the mean loss over the samples, a scalar."""


def reduce_sums(sums: Tensor) -> Tensor:
    """The sum over all ranks of a float64 vector of sums; every rank gets it."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)
    return sums


@torch.no_grad()
def evaluate(
    model: nn.Module,
    source: Source,
    loss_function: LossFunction,
    *,
    rank: int,
    shares: list[int],
    precision: Precision,
    batch_size: int = 512,
) -> dict[str, float]:
    """Loss, accuracy (where the targets are class numbers) and sample count over the whole of ``source``.

    Each rank takes one stretch of it, in proportion to ``shares``. ``model`` is the module without DDP: no rank waits
    for another until the sums are reduced. All ranks call it and get the same values.

    Raises DataError, on every rank, where ``source`` holds no sample.
    """
    if len(source) == 0:
        raise DataError("the evaluation data hold no sample")
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    modes = {module: module.training for module in inner.modules()}
    inner.eval()
    counts = apportion(len(source), shares)
    first, last = sum(counts[:rank]), sum(counts[: rank + 1])
    spans = [(start, min(start + batch_size, last)) for start in range(first, last, batch_size)]
    sums = torch.zeros(
        4, dtype=torch.float64, device=source.device
    )  # loss, correct, samples, samples with a class
    for inputs, targets in source.batches(torch.arange(len(source)), spans, epoch=0):
        with precision.autocast():
            outputs = inner(inputs)
            loss = loss_function(outputs, targets)
        samples = len(targets)
        sums[0] += loss.double() * samples
        if _are_classes(outputs, targets):
            sums[1] += (outputs.argmax(dim=1) == targets).sum()
            sums[3] += samples
        sums[2] += samples
    for module, mode in modes.items():
        module.training = mode
    loss_sum, correct, seen, classified = reduce_sums(sums).tolist()
    result = {"loss": loss_sum / seen, "samples": seen}
    if classified == seen:
        result["accuracy"] = correct / seen
    return result


def _are_classes(outputs: Tensor, targets: Tensor) -> bool:
    return outputs.ndim == 2 and targets.ndim == 1 and not targets.is_floating_point()
