"""Models that run out of memory, on the ranks of a test world."""

import json
import os
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ddp_slurm.training import init_distributed
from ddp_slurm.training.memory import micro_batch
from ddp_slurm.training.uneven.calibrate import TrainingStep


class Stingy(nn.Module):
    """Passes its input on; above a number of samples it runs out of memory."""

    def __init__(self, limit: int, fails_in: str = "forward") -> None:
        super().__init__()
        self.limit, self.fails_in = limit, fails_in

    def forward(self, inputs: Tensor) -> Tensor:
        if self.fails_in == "backward":
            outputs: Tensor = _FailsInBackward.apply(inputs, self.limit)
            return outputs
        _check(len(inputs), self.limit)
        return inputs


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, limit: int) -> Tensor:
        ctx.limit = limit
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        _check(len(gradients[0]), ctx.limit)
        return gradients[0], None


def _check(samples: int, limit: int) -> None:
    if samples > limit:
        raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. {samples} samples")


def found_in_world(pipe: Connection, limits: tuple[int, ...]) -> dict[str, int]:
    """This rank's micro-batch, as if its CPU were a GPU with a memory of so many samples."""
    with init_distributed() as world:
        micro_batch.has_own_memory = lambda device: True

        def batch(count: int) -> tuple[Tensor, Tensor]:
            return torch.randn(count, 3), torch.randn(count, 3)

        def find(*layers: nn.Module) -> int:
            model = nn.Sequential(nn.Linear(3, 3), Stingy(limits[world.rank]), *layers)
            step = TrainingStep(model, mse_loss, batch, world.device)
            return micro_batch.find_micro_batch(step, 64, world.control)

        found = {"plain": find(), "synced": find(nn.SyncBatchNorm(3))}
        for name, model in (("known", "Sequential"), ("other model", "Other")):
            known = [model, "float32", {"cpu": 12}]
            os.environ["DDP_SLURM_KNOWN_LIMITS"] = json.dumps(known)
            found[name] = find()
        return found
