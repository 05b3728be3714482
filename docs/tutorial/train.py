"""The tutorial's script: a model of your own and a plain loop, on uneven shares.

ddp-slurm submit --backend local --balance measured -- python train.py
"""

import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ddp_slurm.training import BalancedSampler, init_distributed

GLOBAL_BATCH = 120
# Plays a slow card on a machine without any; leave it out on real cards.
SECONDS_PER_SAMPLE = float(os.environ.get("SECONDS_PER_SAMPLE", "0"))


class Net(nn.Module):
    """Your own model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(SECONDS_PER_SAMPLE * len(inputs))
        outputs: Tensor = self.layers(inputs)
        return outputs


torch.manual_seed(0)
inputs = torch.randn(3600, 32)
targets = (inputs @ torch.randn(32, 10)).argmax(dim=1)
data = TensorDataset(inputs, targets)

with init_distributed() as world:
    model = Net().to(world.device)
    shares = world.shares(GLOBAL_BATCH, model, cross_entropy, data)
    sampler = BalancedSampler(data, shares, world.rank, drop_last=True)
    loader = DataLoader(data, batch_sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp_model = world.wrap(model, optimizer, shares)

    computing = 0.0
    started = time.perf_counter()
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        before = time.perf_counter()
        loss = cross_entropy(ddp_model(x.to(world.device)), y.to(world.device))
        computing += time.perf_counter() - before
        (loss * sampler.loss_weight(step)).backward()
        optimizer.step()
    seconds = time.perf_counter() - started

    busy = [torch.zeros(1) for _ in shares]
    dist.all_gather(busy, torch.tensor([computing / seconds]), group=world.control)
    if world.rank == 0:
        for rank, share in enumerate(shares):
            percent = 100 * busy[rank].item()
            print(f"rank {rank}: {share} samples a step, computing {percent:.0f} % of the time")
        print(f"{len(loader) * GLOBAL_BATCH / seconds:,.0f} samples a second", flush=True)
