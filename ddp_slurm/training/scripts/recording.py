"""For ``ddp-slurm verify``: the gradients of a script's first optimizer steps, kept in a file."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_slurm.job_env import Verify
from ddp_slurm.training.scripts.modules import Modules


def record(modules: Modules, verify: Verify) -> None:
    """End this process after its first optimizer steps; rank 0 writes what they were given.

    The file has ``steps``: for each the gradients by the parameters' names, float64 on the CPU; and
    ``layers``: the kinds of layers of the models.
    """
    # in full precision, so that the differences are the script's
    torch.backends.cudnn.allow_tf32 = False
    steps: list[dict[str, Tensor]] = []

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        steps.append(_gradients(modules))
        if len(steps) < verify.steps:
            return
        if not dist.is_initialized() or dist.get_rank() == 0:
            models = [ddp.module for ddp in modules.alive()]
            layers = {type(layer).__name__ for model in models for layer in model.modules()}
            torch.save({"steps": steps, "layers": sorted(layers)}, verify.file)
        # Not through the script, which might save a model or evaluate it on the way out.
        os._exit(0)

    register_optimizer_step_pre_hook(before_step)


def _gradients(modules: Modules) -> dict[str, Tensor]:
    """Of several modules by their number too: a GAN's have parameters of the same names."""
    models = [ddp.module for ddp in modules.alive()]
    return {
        name if len(models) == 1 else f"model {number}.{name}": parameter.grad.cpu().double()
        for number, model in enumerate(models)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
