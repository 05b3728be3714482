"""Models that run out of memory, on the ranks of a test world."""

import json
import os
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from ddp_slurm.training import BalancedSampler, ResidentTensors, Trainer, World, init_distributed
from ddp_slurm.training.memory import halving, micro_batch
from ddp_slurm.training.uneven.calibrate import TrainingStep
from ddp_slurm.training.uneven.sample_batches import batch_reader


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

        def find() -> int:
            model = nn.Sequential(nn.Linear(3, 3), Stingy(limits[world.rank]))
            step = TrainingStep(model, mse_loss, batch, world.device)
            return micro_batch.find_micro_batch(step, 64, world.control)

        found = {"plain": find()}
        model = nn.Sequential(nn.Linear(3, 3), Stingy(limits[world.rank]))
        optimizer = torch.optim.AdamW(model.parameters())
        found["own loop"] = world.micro_batch(64, model, mse_loss, batch(100), optimizer)
        for name, model in (("known", "Sequential"), ("other model", "Other")):
            known = [model, "float32", {"cpu": 12}]
            os.environ["DDP_SLURM_KNOWN_LIMITS"] = json.dumps(known)
            found[name] = find()
        return found


class Part(nn.Module):
    """Has room for more samples when it is checkpointed."""

    def __init__(self, limits: tuple[int, int]) -> None:
        super().__init__()
        self.limits, self.layer = limits, nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        _check(len(inputs), self.limits["forward" in vars(self)])
        outputs: Tensor = self.layer(inputs)
        return outputs


def checkpointed_in_world(pipe: Connection, limits: list[tuple[int, int]]) -> tuple[int, bool]:
    """This rank's micro-batch, and whether its model is checkpointed then."""
    with init_distributed() as world:
        micro_batch.has_own_memory = lambda device: True
        model = nn.Sequential(Part(limits[world.rank]), nn.Linear(3, 3))
        data = torch.randn(8, 3), torch.randn(8, 3)
        step = TrainingStep(model, mse_loss, batch_reader(data, world.device), world.device)
        most = micro_batch.find_micro_batch(step, 64, world.control, may_checkpoint=True)
        return most, "forward" in vars(model[0])


@dataclass(frozen=True)
class Shortage:
    """When a rank runs out of memory, and what is compared afterwards."""

    rank: int
    fails_in: str
    pass_number: int
    """The forward at which the card's room shrinks."""
    micro_batch: int | str
    shares: tuple[int, ...] = (9, 12)
    limit: int = 3
    layer: int = 3
    """Before which layer of the network it fails."""
    options: dict[str, Any] = field(default_factory=dict)
    counts_twice: bool = False
    """The negative control: all parameters get the gradient of the failed pass again."""


class Shrinking(Stingy):
    """Has room for everything until a certain pass."""

    def __init__(self, shortage: Shortage | None) -> None:
        super().__init__(1 << 30, shortage.fails_in if shortage else "forward")
        self.shortage, self.passes = shortage, 0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.shortage and self.passes == self.shortage.pass_number:
            self.limit = self.shortage.limit
        self.passes += 1
        return super().forward(inputs)


def shrinking_network(shortage: Shortage | None, layer: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for size in (8, 8, 8, 8, 8):
        layers += [nn.Linear(8, size), nn.Tanh()]
    layers.insert(2 * layer, Shrinking(shortage))
    return nn.Sequential(*layers, nn.Linear(8, 3)).double()


def samples_of(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 8, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (count,), generator=generator)


def train_through(pipe: Connection, shortages: list[Shortage]) -> list[dict[str, Any]]:
    with init_distributed() as world:
        return [_trained(world, shortage) for shortage in shortages]


def _trained(world: World, shortage: Shortage) -> dict[str, Any]:
    """Three steps and a last, small one in the Trainer: parameters, losses, the micro-batch."""
    with pytest.MonkeyPatch.context() as patch:
        if shortage.micro_batch == "auto":
            patch.setattr(micro_batch, "has_own_memory", lambda device: True)
        if shortage.counts_twice:
            patch.setattr(halving, "_mark", lambda parameter: None)
        own = shortage if world.rank == shortage.rank else None
        model = shrinking_network(own, shortage.layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        records: list[dict[str, Any]] = []
        settings: dict[str, Any] = {
            "global_batch": sum(shortage.shares),
            "shares": shortage.shares,
            "micro_batch": shortage.micro_batch,
            "total_epochs": 1,
            "recorders": [records.append],
            "quiet": True,
            **shortage.options,
        }
        data = ResidentTensors(*samples_of(66), world.device)
        trainer = Trainer(world, model, optimizer, cross_entropy, data, **settings)
        trainer.train()
        return {
            "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]),
            "loss": [record["loss"] for record in records],
            "most_at_once": trainer.optimizer_step.most_at_once,
        }


def trained_alone(shortage: Shortage) -> Tensor:
    """The parameters of one process with the whole batches."""
    model = shrinking_network(None, shortage.layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    inputs, targets = samples_of(66)
    sampler = BalancedSampler(66, [sum(shortage.shares)], 0)
    sampler.set_epoch(0)
    for order in sampler:
        optimizer.zero_grad()
        cross_entropy(model(inputs[order]), targets[order]).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])
