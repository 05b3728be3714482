"""Running statistics of a script's BatchNorm: averaged over the ranks by their samples.

DDP alone gives every rank those of rank 0, on uneven ranks perhaps those of the smallest share.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from ddp_slurm.console import say
from ddp_slurm.training.scripts.batches import Share
from ddp_slurm.training.uneven.batchnorm import weighted_means


def average_statistics(ddp: DistributedDataParallel, get_share: Callable[[], Share | None]) -> None:
    """Replace DDP's broadcast of these buffers, and say once that there are any.

    Args:
        ddp: other buffers of it stay those of rank 0.
        get_share: the share of the latest batch; None outside of the training.
    """
    names = statistics_of(ddp.module)
    if not names or not ddp.broadcast_buffers:
        return
    if dist.get_rank(ddp.process_group) == 0:
        say(
            "uneven: BatchNorm normalises by each rank's own samples; its running statistics are "
            "averaged by samples. SyncBatchNorm uses those of the whole batch"
        )

    def synchronize(state: Any, buffers: dict[str, Tensor]) -> None:
        if not ddp.module.training:
            return
        averaged = [buffers[name] for name in names]
        others = [buffer for name, buffer in buffers.items() if name not in names]
        if others:
            ddp._default_broadcast_coalesced(bufs=others)  # type: ignore[no-untyped-call]
        share = get_share()
        weight = 1 if share is None else share.own
        means = weighted_means(averaged, weight, ddp.process_group)
        for buffer, mean in zip(averaged, means, strict=True):
            buffer.copy_(mean)

    ddp._register_buffer_comm_hook(None, synchronize)


def statistics_of(model: nn.Module) -> list[str]:
    """Names of the running means and variances in the model's state.

    In the model's order, the same on all ranks: each process iterates over a set in an order of its
    own, and the statistics of one layer would be added to those of another.
    """
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in model.named_modules()
        if isinstance(layer, _NormBase) and not isinstance(layer, nn.SyncBatchNorm)
        for name, buffer in layer.named_buffers(recurse=False)
        if buffer.is_floating_point()
    ]
