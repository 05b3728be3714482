"""The gradient of the mean over all samples of the global batch, whatever each rank's share of it.

Why the loss is weighted, and not the gradients in a DDP communication hook: a hook sees a bucket
in which ``no_sync`` has already added all micro-batches, so it cannot weight micro-batches of
different sizes, and it does not know the share of each step. A factor on the loss is linear: it
passes through accumulation, ``no_sync`` and the loss scaler unchanged, and what DDP hands to
clipping and to the optimizer is the true gradient, the same bits on every rank. So every rank's
GradScaler finds the same overflow too.

With B samples in the global batch, n of them in this rank's micro-batch, and W ranks, DDP computes

    1/W * sum over ranks of grad(W * n/B * mean of the n losses)  =  1/B * sum of all B gradients.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_slurm.errors import DdpSlurmError

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) to the mean loss over the samples, a scalar."""


def loss_weight(
    local_samples: float, global_samples: float, world_size: int | None = None
) -> float:
    """The factor for a micro-batch's mean loss before ``backward``.

    Args:
        local_samples: samples that the mean was taken over; if it is not over samples, the sum of
            weights that it was divided by.
        global_samples: the same of the whole optimizer step: all ranks, all micro-batches.
        world_size: default that of the default process group.

    >>> loss_weight(72, 101, world_size=7) * 101 / 7
    72.0
    """
    rounding = 1e-9 * global_samples
    if not 0 <= local_samples <= global_samples + rounding or global_samples == 0:
        raise ValueError(f"{local_samples} samples of a global batch of {global_samples}")
    size = dist.get_world_size() if world_size is None else world_size
    return local_samples * size / global_samples


def no_sample_loss(model: nn.Module) -> Tensor:
    """A loss of zero for a rank without samples in this step.

    Its ``backward`` takes part in DDP's reduction and adds nothing to any gradient: a parameter
    that no rank used in this step keeps no gradient (with ``find_unused_parameters=True``; without
    it DDP gives every parameter one). The model's own forward does not run, so no BatchNorm
    statistic and no random state changes. A model with SyncBatchNorm communicates in its forward
    and needs an empty batch instead.

    Args:
        model: the DistributedDataParallel module, or a module with one in it at any depth.

    Raises DdpSlurmError if there is none, or more than one, in a world of several ranks.
    """
    ddp = find_ddp(model)
    if ddp is None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise DdpSlurmError(
                f"no_sample_loss: found no DistributedDataParallel in {type(model).__name__}; this "
                "rank would not take part in the others' reduction. Pass the module that DDP wraps"
            )
        return _zero_without_gradients(model)
    inner = ddp.module

    def forward(*args: object, **kwargs: object) -> Tensor:
        return _zero_without_gradients(inner)

    # DDP prepares its reducer in its own forward, which calls the inner module's: that one is
    # replaced for this call, and so are compiled versions, which would not look at it.
    with (
        _replaced(ddp, _compiled_call_impl=None),
        _replaced(inner, _compiled_call_impl=None, forward=forward),
    ):
        # With device_ids DDP moves its inputs to the GPU, and fails without any.
        loss = ddp(next(inner.parameters()).detach())
    assert isinstance(loss, Tensor)
    return loss


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel module in ``model``: itself, or below a wrapper at any depth.

    Raises DdpSlurmError if there are several: the order of their reductions would differ by rank.
    """
    found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if len(found) > 1:
        raise DdpSlurmError(
            f"{type(model).__name__} has {len(found)} DistributedDataParallel modules in it; "
            "expected one. Pass each of them by itself, in the order in which the others use them"
        )
    return found[0] if found else None


class _NoGradient(torch.autograd.Function):
    """Passes ``total`` on; its backward visits ``parameter`` without a gradient for it."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, parameter: Tensor) -> Tensor:
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _zero_without_gradients(model: nn.Module) -> Tensor:
    """A zero whose backward visits all parameters, the last one first, as DDP's hooks need it.

    A hook that is called without a gradient counts its parameter as ready, but not as used.
    Source: torch/csrc/distributed/c10d/reducer.cpp, Reducer::autograd_hook.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = torch.zeros((), device=parameters[0].device)
    for parameter in parameters:
        total = _NoGradient.apply(total, parameter)
    return total


@contextlib.contextmanager
def _replaced(module: nn.Module, **values: object) -> Iterator[None]:
    """Instance attributes replaced for a while, past the module's own ``__setattr__``."""
    attributes = vars(module)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            del attributes[name]
        attributes.update(before)


def has_sync_batchnorm(model: nn.Module) -> bool:
    """Whether the ranks communicate in the model's forward: all must run it equally often."""
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def wrap_model(
    model: nn.Module, device: torch.device, bucket_bytes: int | None = None
) -> DistributedDataParallel:
    """DDP with the options that uneven ranks need. All ranks call it.

    Each rank keeps its own BatchNorm statistics, see ``batchnorm``. A resumed process adds the
    ranks' gradients up in the same order as an uninterrupted one, so that it gets the same bits.

    Args:
        bucket_bytes: of gradients that are sent together; None: DDP's own 25 MiB.
    """
    # DDP would send rank 0's buffers before each forward. torch 2.13 renamed the option that stops
    # it; the older option also leaves out the synchronisation at the start.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    options: dict[str, Any] = {"forward_sync_buffers": False}
    if "forward_sync_buffers" not in known:
        options = {"broadcast_buffers": False}
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
    if bucket_bytes is not None:
        options["bucket_cap_mb"] = bucket_bytes / 2**20
    ddp = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **options,
    )
    _settle_buckets(ddp)
    return ddp


def _settle_buckets(ddp: DistributedDataParallel) -> None:
    """Let DDP choose its final buckets now, by the order of the parameters, the last one first.

    After its first backward DDP regroups the gradients by their order in it, and a sum over three
    or more ranks in another grouping differs in the last bit. A resumed process would take its
    first step with the first grouping, where the uninterrupted one has the second.
    Source: torch/csrc/distributed/c10d/reducer.cpp, Reducer::rebuild_buckets.
    """
    no_sample_loss(ddp).backward()  # type: ignore[no-untyped-call]
    ddp.zero_grad(set_to_none=True)
