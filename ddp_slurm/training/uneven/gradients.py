"""The gradient of the mean over all samples of the global batch, whatever each rank's share of it.

Why the loss is weighted and not a DDP communication hook: a hook sees only a bucket that already holds the sum of
all micro-batches that ``no_sync`` let pile up, so it cannot weigh micro-batches of different sizes, and it would have
to be told the share of each step behind DDP's back. A factor on the loss is linear: it passes through accumulation,
``no_sync`` and the loss scaler unchanged, and what DDP hands to clipping and to the optimizer is the true gradient,
the same bits on every rank. So every rank's GradScaler finds the same overflow too.

With B samples in the global batch, n of them in this rank's micro-batch, and W ranks, DDP computes

    1/W * sum over ranks of grad(W * n/B * mean of the n losses)  =  1/B * sum over all B samples of grad(loss).
"""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def loss_weight(local_samples: int, global_samples: int, world_size: int | None = None) -> float:
    """The factor for a micro-batch's mean loss before ``backward``.

    Args:
        local_samples: samples the mean was taken over.
        global_samples: samples of the whole optimizer step: all ranks, all micro-batches.
        world_size: default that of the default process group.

    >>> loss_weight(72, 101, world_size=7) * 101 / 7
    72.0
    """
    if not 0 <= local_samples <= global_samples or global_samples == 0:
        raise ValueError(f"{local_samples} samples of a global batch of {global_samples}")
    size = dist.get_world_size() if world_size is None else world_size
    return local_samples * size / global_samples


def no_sample_loss(model: nn.Module) -> Tensor:
    """A loss of zero for a rank without a sample in this step: its ``backward`` takes part in DDP's reduction.

    ``model`` is the DistributedDataParallel module. The model's own forward does not run, so no BatchNorm statistic
    and no random state moves. A model with SyncBatchNorm talks in its forward and needs an empty batch instead.
    """
    inner = model.module if isinstance(model, DistributedDataParallel) else model

    def forward(*args: object, **kwargs: object) -> Tensor:
        parameters = [p for p in inner.parameters() if p.requires_grad]
        return torch.stack([p.flatten()[:0].sum(dtype=torch.float32) for p in parameters]).sum()

    # DDP prepares its reducer in its own forward, which calls the inner one: that one is replaced for this call.
    own = vars(inner).get("forward")  # of a compiled or patched module; usually it is the class's
    inner.forward = forward
    try:
        # With device_ids DDP moves its inputs to the GPU, and needs one to move.
        loss = model(next(inner.parameters()).detach())
    finally:
        del inner.forward
        if own is not None:
            inner.forward = own
    assert isinstance(loss, Tensor)
    return loss


def has_sync_batchnorm(model: nn.Module) -> bool:
    """Whether the ranks talk within the model's forward, so that all of them must run it equally often."""
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def wrap_model(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """DDP as it is right on uneven ranks: each keeps its own BatchNorm statistics, see ``batchnorm``."""
    # DDP would send rank 0's buffers before each forward. torch 2.13 renamed the option that stops it.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    keep_buffers: dict[str, Any] = {
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False
    }
    if "forward_sync_buffers" not in known:
        for (
            buffer
        ) in model.buffers():  # the older option leaves out the first synchronisation as well
            dist.broadcast(buffer, src=0)
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **keep_buffers,
    )
