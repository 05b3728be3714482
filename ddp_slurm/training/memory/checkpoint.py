"""Activation checkpointing: a part of the model keeps its input only, and runs again in backward.

The gradient is the same. Running again restores the random state, so Dropout draws the same masks,
and must not update the running statistics of BatchNorm a second time.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training.uneven.gradients import has_sync_batchnorm


def check_checkpoint(model: nn.Module) -> None:
    """Raises DdpSlurmError for a model of which no single rank can run a part again."""
    if has_sync_batchnorm(model):
        raise DdpSlurmError(
            "checkpoint='auto' cannot be combined with SyncBatchNorm: its forward waits for all "
            "ranks, and only those with little memory would run it again in backward; use "
            "BatchNorm, or checkpoint=None"
        )


def parts_of(model: nn.Module) -> list[nn.Module]:
    """What is checkpointed: the children with parameters, those of a Sequential one by one.

    A module whose parameters are all in one child stands for that child. A module that is used in
    several places is one part.
    """
    children = [child for child in model.children() if any(True for _ in child.parameters())]
    if len(children) == 1 and not isinstance(model, nn.Sequential | nn.ModuleList):
        return parts_of(children[0])
    parts: list[nn.Module] = []
    for child in children:
        is_list = isinstance(child, nn.Sequential | nn.ModuleList)
        parts += parts_of(child) if is_list else [child]
    return list(dict.fromkeys(parts))


def checkpoint_parts(model: nn.Module) -> None:
    """From now on the parts of ``model`` run again in each backward, in training mode."""
    for part in parts_of(model):
        vars(part)["forward"] = partial(_checkpointed, part, part.forward)


def keep_activations(model: nn.Module) -> None:
    """Undo ``checkpoint_parts``."""
    for part in parts_of(model):
        del vars(part)["forward"]


def _checkpointed(part: nn.Module, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    if not (part.training and torch.is_grad_enabled()):
        return forward(*args, **options)

    def contexts() -> tuple[Any, Any]:
        """Around the first forward, and around the second."""
        return contextlib.nullcontext(), _unchanged_statistics(part)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **options)


@contextlib.contextmanager
def _unchanged_statistics(part: nn.Module) -> Iterator[None]:
    """Inside, running statistics are updated by a part of 0, and updates are not counted.

    Without the statistics autograd would save fewer tensors than in the first forward, and
    torch.utils.checkpoint compares them.
    """
    layers = [layer for layer in part.modules() if isinstance(layer, _NormBase)]
    before = [(layer, layer.momentum, layer.num_batches_tracked) for layer in layers]
    for layer in layers:
        layer.momentum = 0.0
        layer.num_batches_tracked = None
    try:
        yield
    finally:
        for layer, momentum, batches in before:
            layer.momentum = momentum
            layer.num_batches_tracked = batches
