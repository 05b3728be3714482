"""The memory that a training step takes besides what forward and backward allocate in a trial."""

import copy

import torch
from torch import nn
from torch.optim import Optimizer


def bytes_of_later(model: nn.Module, optimizer: Optimizer | None) -> int:
    """Of the optimizer's state that does not exist yet, and of two more copies of the gradients.

    One is DistributedDataParallel's buckets: with several micro-batches the gradients are added up
    outside of them. The other is the buffer of steps as CUDA graphs.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = _bytes_of(parameters)
    return 2 * gradients + (0 if optimizer is None else bytes_of_new_state(optimizer))


def bytes_of_new_state(optimizer: Optimizer) -> int:
    """Of the state that the first step will make; 0 once it exists.

    A copy of the optimizer steps parameters of the device "meta", which have shapes and no content.
    One that cannot is taken for Adam: two numbers for each parameter.
    """
    if optimizer.state:
        return 0
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"] if p.requires_grad]
    stand_ins = {id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in parameters}
    copied = copy.deepcopy(optimizer, dict(stand_ins))
    for stand_in in stand_ins.values():
        stand_in.grad = torch.empty_like(stand_in)
    try:
        copied.step()
    except (RuntimeError, TypeError):  # fused kernels, a closure, a look at a value
        return 2 * _bytes_of(parameters)
    values = [value for state in copied.state.values() for value in state.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return _bytes_of([tensor for tensor in tensors if tensor.is_meta])


def _bytes_of(tensors: list[torch.Tensor] | list[nn.Parameter]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
