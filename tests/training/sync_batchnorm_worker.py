"""A Trainer whose model has a SyncBatchNorm, on CPUs, where torch's own does not run."""

from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_slurm.training import BalancedSampler, Trainer, init_distributed
from ddp_slurm.training.data import ResidentTensors

from .workers import CLASSES, FEATURES, flat, make_data

SAMPLES, EPOCHS, SEED = 24, 4, 3


class SyncOnCpu(_BatchNorm):
    """Normalises by the samples of all ranks; its forward waits for them."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        count = torch.tensor([float(len(input))], dtype=input.dtype)
        total = all_reduce(torch.cat([input.sum(0), (input * input).sum(0), count]))
        mean, square = total[:-1].div(total[-1]).chunk(2)
        normal = (input - mean) / torch.sqrt(square - mean * mean + self.eps)
        return normal * self.weight + self.bias


def model(norm: type[nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 8), norm(8), nn.Linear(8, CLASSES)).double()


def train(
    pipe: Connection, shares: tuple[int, ...], micro_batch: int | str | None
) -> tuple[Tensor, list[int]]:
    """The parameters at the end, and the samples of each forward on this rank."""
    nn.SyncBatchNorm = SyncOnCpu  # type: ignore[assignment,misc]
    with init_distributed() as world:
        network = model(SyncOnCpu)
        sizes: list[int] = []
        network[1].register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
        Trainer(
            world,
            network,
            torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9),
            cross_entropy,
            ResidentTensors(*make_data(SAMPLES, torch.float64), world.device),
            global_batch=sum(shares),
            shares=shares,
            micro_batch=micro_batch,
            total_epochs=EPOCHS,
            seed=SEED,
            quiet=True,
        ).train()
        dist.barrier()
        return flat(network.parameters()), sizes


def train_alone(global_batch: int) -> Tensor:
    inputs, targets = make_data(SAMPLES, torch.float64)
    network = model(nn.BatchNorm1d)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler = BalancedSampler(SAMPLES, [global_batch], 0, seed=SEED)
        sampler.set_epoch(epoch)
        for order in sampler.order().split(global_batch):
            optimizer.zero_grad()
            cross_entropy(network(inputs[order]), targets[order]).backward()
            optimizer.step()
    return flat(network.parameters())
