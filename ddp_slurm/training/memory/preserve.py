"""A model that is run for a trial and is afterwards as it was, without a copy of its parameters."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from ddp_slurm.training.random_state import random_state, set_random_state


@contextlib.contextmanager
def preserved(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, forward and backward may run, and run out of memory; no optimizer may step.

    Gradients, buffers (the statistics of BatchNorm), modes and random state are afterwards as
    before. Inside, the parameters have no gradients at first.
    """
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    random = random_state(device)
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for module, name, buffer, content in buffers:
                module._buffers[name] = buffer.copy_(content)
        for module, mode in modes:
            module.training = mode
        set_random_state(random, device)
